"""The training loop: what each rank of a run does, from its configuration to its summary.

    learner:  rollout -> update -> publish -> record, now and then a checkpoint ... evaluation -> summary
    worker:   served within ClusterEnv, until the learner sends it home

Nothing that depends on the clock enters the training itself: with a fixed seed a run is bit-equal twice.  A resumed
run goes on with weights, optimizer, schedules, counters and random states; what cannot go on is the inside of the
environments: episodes that were under way begin anew, from seeds made of the run's seed and the update it goes on at.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.comm.channel import Channel, ClusterError, SilenceError, WorkerError
from clusterenv_hpc.jobs.record import remember
from clusterenv_hpc.jobs.signals import JobSignals
from clusterenv_hpc.run.build import (
    build_learner,
    build_policy,
    build_sync,
    choose_device,
    choose_threads,
    env_source,
    spaces_of,
)
from clusterenv_hpc.run.checkpoint import CheckpointStore, Loaded, State
from clusterenv_hpc.run.config import config_hash, to_yaml
from clusterenv_hpc.run.errors import abort_world, describe, exit_code, wants_traceback
from clusterenv_hpc.run.evaluate import Evaluation, evaluate
from clusterenv_hpc.run.evaluator import Evaluating
from clusterenv_hpc.run.interrupt import EXIT_CODES, Interrupted, StopSignals, ignore_stop_signals
from clusterenv_hpc.run.memory import demand_memory
from clusterenv_hpc.run.metrics import MetricsWriter, RunLog, write_json
from clusterenv_hpc.run.owner import Ownership, TakenOverError
from clusterenv_hpc.run.progress import Progress, make_progress
from clusterenv_hpc.run.randomness import random_states, seed_everything, seeds_of, set_random_states
from clusterenv_hpc.run.report import closing, opening, summary
from clusterenv_hpc.run.run_dir import RunDir, write_atomically
from clusterenv_hpc.run.schema import Config
from clusterenv_hpc.run.source import demand_finite, publishes, rollouts_for, trim
from clusterenv_hpc.run.tally import Tally
from clusterenv_hpc.run.tasks import gradient_method

CONFIRM_EVERY = 0.02
"""Share of total_steps between two evaluations that are to confirm ``stop.at_return``."""

LOOK_EVERY_S = 5.0
"""Seconds between two looks at whether the run is still this process's."""

SAME_ERROR_S = 1.5
"""How long a worker keeps an error to itself that the learner probably tells as well."""


def make_envs(config: Config, policy: torch.nn.Module, *, comm: Any, version: int) -> ClusterEnv:
    """The environments of the run, wherever they are; on worker ranks this serves and raises SystemExit."""
    source = env_source(config.env)
    return ClusterEnv(
        config.env.id,
        config.num_envs,
        policy=policy,
        sync=build_sync(config.sync),
        env_kwargs=source.kwargs,
        comm=comm,
        seed=seeds_of(config.seed, 0)[2],
        backend=config.env.backend,
        num_workers=config.worker_count,
        env_ranks=config.env.ranks,
        num_probes=getattr(config.sync, "num_probes", 64),
        timeout=config.timeout,
        learner_timeout=config.learner_timeout,
        on_error=config.env.on_error,
        max_restarts=config.env.max_restarts,
        wrappers=source.wrappers,
        delay=source.delay,
        on_worker_loss=config.on_worker_loss or ("continue" if config.slurm.launcher == "ulfm" else "abort"),
        config_hash=config_hash(config),
        first_version=version,
    )


def work(config: Config, comm: Any) -> int:
    """A worker rank's life; leaves by SystemExit when the learner is done."""
    ignore_stop_signals(config.slurm.signal)
    torch.set_num_threads(1)
    try:
        spaces = spaces_of(config.env)
        demand_memory(config, *spaces)
        policy = build_policy(config.policy, *spaces, seeds_of(config.seed, 0)[0], config.algo)
        if gradient_method(config):
            from clusterenv_hpc.run.gradient_run import make_cluster

            make_cluster(config, policy, None, comm)
        else:
            make_envs(config, policy, comm=comm, version=0)
    except Exception as error:
        time.sleep(SAME_ERROR_S)
        rank, host = comm.Get_rank(), socket.gethostname()
        print(f"clusterenv-hpc: rank {rank} (worker, {host}) failed: {describe(error)}", file=sys.stderr, flush=True)
        abort_world(comm, exit_code(error))
    return 1


def learn(
    config: Config, run: RunDir, comm: Any = None, aside: Channel | None = None, owner: Ownership | None = None
) -> int:
    """The learner's life.  Returns the exit code; what goes wrong is told in one line, and ends every rank.

    Args:
        config: with ``workers`` as they are: the ranks beside this one, or 0.
        run: where to write.
        comm: an mpi4py communicator where there are worker ranks.
        aside: to the rank that evaluates, where there is one.
        owner: this process's hold on ``run``; given back where this process may not return from here.
    """
    with StopSignals(config.slurm.signal).listening() as stop:
        learner = kind_of_run(config)(config, run, comm, stop)
        learner.owner = owner
        if aside is not None:
            learner.evaluating = Evaluating(aside, config.eval.sampled)
        try:
            return learner.run()
        except (Exception, Interrupted) as error:
            ignore_stop_signals(config.slurm.signal)  # the end has begun
            where = f"rank 0 (learner, {socket.gethostname()}): " if comm is not None else ""
            line = describe(error) if isinstance(error, ClusterError) else where + describe(error)
            learner.fail(line, error)
            print(f"clusterenv-hpc: {line}", file=sys.stderr, flush=True)
            if wants_traceback():
                traceback.print_exception(error)
            code = exit_code(error)
            if owner is not None:
                owner.release()
            if learner.envs is not None:
                learner.envs.abort()
            elif comm is not None:
                abort_world(comm, code)
            return code
        finally:
            if learner.evaluating is not None:
                learner.evaluating.leave()


def kind_of_run(config: Config) -> type[LearnerRun]:
    """What drives the run: rollouts and a learner, or gradients and an optimizer."""
    if gradient_method(config):
        from clusterenv_hpc.run.gradient_run import GradientRun  # which is built on this module

        return GradientRun
    return LearnerRun


class LearnerRun:
    """One start of a run, on the learner's rank; ``GradientRun`` makes its updates in another way."""

    def __init__(self, config: Config, run: RunDir, comm: Any, stop: StopSignals) -> None:
        self.config, self.dir, self.comm, self.stop = config, run, comm, stop
        self.log = RunLog(run.log)
        self.progress = Progress(sys.stderr)
        self.tally: Any = self.make_tally()
        self.store = CheckpointStore(run.checkpoints, config.checkpoint.keep)
        self.envs: Any = None  # a ClusterEnv, or what else has the workers
        self.result: Evaluation | None = None
        self.evaluating: Evaluating | None = None
        self.owner: Ownership | None = None
        self.resumed_from: str | None = None
        self.exit_reason = "running"
        self.saved_at = -1
        self.confirm_from = 0
        self.job: JobSignals | None = None
        self.update_s: deque[float] = deque([0.0], maxlen=20)

    def run(self) -> int:
        """From the first object to the last line; returns the exit code."""
        config = self.config
        self.job = self.enter_job()
        device = choose_device(config.device)
        observation_space, action_space = spaces_of(config.env)
        demand_memory(config, observation_space, action_space)
        policy_seed, learner_seed, _ = seeds_of(config.seed, 0)
        self.policy = build_policy(config.policy, observation_space, action_space, policy_seed, config.algo)
        torch.set_num_threads(choose_threads(config, self.policy))
        self.learner: Any = self.make_learner(device, (observation_space, action_space), learner_seed)
        seed_everything(config.seed)
        loaded = self.store.load_latest(self.restore) if config.resume else None
        if loaded is not None:
            self.go_on_from(loaded)
        version = 0 if loaded is None else int(loaded.state["version"])
        self.envs = self.make_envs(version)
        self.demand_ownership()
        write_atomically(self.dir.config, to_yaml(config).encode())
        self.say(self.opening(str(device)))
        if (starts := getattr(config.algo, "learning_starts", 0)) > config.total_steps:
            self.say(f"warning: algo.learning_starts={starts} is above total_steps={config.total_steps}: no learning")
        if self.owner is not None and self.owner.before is not None:
            self.log.write(f"{self.owner.before} had this run, and is gone")
        self.log.write(f"hosts: {' '.join(self.envs.hosts)}")
        self.progress = make_progress(config.log.progress, config.total_steps, self.tally.env_steps, config.log.every_s)
        tensorboard = config.log.tensorboard
        with (
            self.stop.deferred(),
            MetricsWriter(self.dir.path, self.tally.updates, self.tally.env_steps, tensorboard=tensorboard) as metrics,
        ):
            self.exit_reason = self.loop(metrics)
            if self.saved_at != self.tally.updates:
                self.save(metrics)
            self.progress.close()
            self.close_envs()
            if self.evaluating is not None:
                self.evaluating.leave()
            if self.exit_reason == "completed" and config.eval.episodes:
                self.result = evaluate(self.policy, config.env, config.eval, stop=lambda: self.stop.reason is not None)
            self.write_summary()
        text = self.closing()
        self.log.write(text)
        print(text, flush=True)
        if self.job is not None and self.job.wish and self.exit_reason == self.job.reason:
            return self.job.leave().exit_code
        if self.result is None and self.exit_reason == "completed" and self.stop.reason == "SIGINT":
            return EXIT_CODES["SIGINT"]  # of the evaluation
        return EXIT_CODES.get(self.exit_reason, 0)

    # -- what depends on the kind of run ------------------------------------------------------------------------------

    def make_tally(self) -> Any:
        """The counters."""
        return Tally(self.config.log.window, self.config.worker_count)

    def make_learner(self, device: torch.device, spaces: tuple[Any, Any], seed: int) -> Any:
        """What changes the policy; its state, with the policy's in it, is what a checkpoint holds.  ``spaces``: of one
        environment: observation, action."""
        config = self.config
        return build_learner(
            config.algo,
            self.policy,
            spaces[1],
            device,
            seed,
            observation_space=spaces[0],
            num_envs=config.num_envs,
        )

    def make_envs(self, version: int) -> Any:
        """The workers, ready to work."""
        envs = make_envs(self.config, self.policy, comm=self.comm, version=version)
        if self.tally.updates:  # other episodes than at the start
            envs.reset(seed=seeds_of(self.config.seed, self.tally.updates)[2])
        return envs

    def updates(self, envs: Any) -> Iterator[dict[str, Any] | None]:
        """Updates without end: the record of each, None where there was nothing to learn from."""
        config, tally = self.config, self.tally
        batches = rollouts_for(
            config.algo,
            envs,
            lambda steps: steps >= config.total_steps - tally.env_steps or self.stop.reason is not None,
        )
        self.learner.meanwhile = envs.poll
        while True:
            began = time.perf_counter()
            rollout = trim(next(batches), config.total_steps - tally.env_steps)
            if rollout.env_steps == 0:  # every environment was being reset
                yield None
                continue
            collected, waiting = time.perf_counter(), envs.poll()
            try:
                learned = self.learner.update(rollout, tally.env_steps / config.total_steps)
            except FloatingPointError as error:
                demand_finite(rollout, error)
                raise
            if published := publishes(config.algo, tally.updates + 1):
                envs.publish()
            ended = time.perf_counter()
            record = tally.add(
                rollout,
                envs.stats,
                ended - began,
                idle_s=collected - began,
                published=published,
                telling=self.learner.telling(rollout),
            )
            record |= {"collect_s": collected - began, "learn_s": ended - collected, "waiting": waiting}
            yield record | {"version": envs.version, **learned}

    def opening(self, device: str) -> str:
        """The first line."""
        return opening(self.config, self.dir, self.envs, self.tally, self.resumed_from, device)

    def summary(self) -> dict[str, Any]:
        """The contents of summary.json."""
        return summary(self.config, self.tally, self.envs, self.resumed_from, self.exit_reason, self.result)

    def closing(self) -> str:
        """The last lines."""
        return closing(self.config, self.dir, self.tally, self.exit_reason, self.result)

    # -- what all have in common --------------------------------------------------------------------------------------

    def enter_job(self) -> JobSignals | None:
        """Within a Slurm job: what its end is, and how to be requeued; the run's directory remembers the job."""
        slurm = self.config.slurm
        signals = JobSignals(slurm.signal, lead_s=slurm.lead_s, requeue=slurm.requeue, say=self.say)
        if signals.job is None:
            return None
        remember(self.dir.path, signals.job.label)
        left = f"{signals.time_left:,.0f} s" if signals.time_left is not None else "unlimited"
        self.log.write(
            f"job {signals.job.label} on {','.join(signals.job.nodes)}, restart {signals.job.restart_count}, "
            f"time left: {left}"
        )
        return signals

    def asked_to_stop(self) -> str | None:
        """Why to stop before the next update, if there is a reason: a signal, or no time for it before the limit."""
        if self.job is None or self.stop.reason in ("SIGINT", "SIGHUP"):
            return self.stop.reason
        if self.stop.reason is not None:
            self.job.note(self.stop.reason)
        return self.job.reason if self.job.look(max(self.update_s)) else None

    def loop(self, metrics: MetricsWriter) -> str:
        """Updates until the steps are used up, the task is solved or a signal came; returns which of these."""
        config, tally = self.config, self.tally
        last_save = last_summary = time.monotonic()
        updates = self.updates(self.envs)
        while tally.env_steps < config.total_steps:
            if (reason := self.asked_to_stop()) is not None:
                return reason
            self.demand_ownership(LOOK_EVERY_S)
            began = time.perf_counter()
            record = next(updates)
            self.update_s.append(time.perf_counter() - began)
            if record is None:
                continue
            if self.evaluating is not None:
                record |= self.evaluating.exchange(self.policy, record["version"], tally.env_steps)
            metrics.write(record)
            self.progress.update(record)
            if time.monotonic() - last_save >= config.checkpoint.every_s:
                self.save(metrics)
                last_save = last_summary = time.monotonic()
            elif time.monotonic() - last_summary >= config.log.every_s:
                self.write_summary()
                last_summary = time.monotonic()
            if self.solved():
                return "solved"
        return "completed"

    def solved(self) -> bool:
        """Whether the recent returns pass ``stop.at_return`` and greedy episodes confirm it."""
        config, tally, target = self.config, self.tally, self.config.stop.at_return
        if target is None:
            return False
        if self.evaluating is not None:
            if not self.evaluating.passed(target):
                return False
        elif not tally.settled or tally.return_mean < target:
            return False
        if not config.eval.episodes:
            return True
        if tally.env_steps < self.confirm_from:
            return False
        self.confirm_from = tally.env_steps + int(CONFIRM_EVERY * config.total_steps)
        greedy = dataclasses.replace(config.eval, sampled=False)
        self.result = evaluate(self.policy, config.env, greedy, stop=lambda: self.stop.reason is not None)
        return self.result is not None and self.result.mean >= target

    def save(self, metrics: MetricsWriter) -> None:
        """A checkpoint of everything that goes on, and the summary beside it."""
        assert self.envs is not None
        self.demand_ownership()
        metrics.flush()
        state = {
            "learner": self.learner.state_dict(),
            "tally": self.tally.state_dict(),
            "version": self.envs.version,
            "random": random_states(),
        }
        path = self.store.save(state, self.tally.updates)
        self.saved_at = self.tally.updates
        self.log.write(f"saved {path.name} at {self.tally.env_steps:,} steps")
        self.write_summary()

    def restore(self, state: State) -> None:
        """Puts everything back as a checkpoint has it."""
        self.tally = self.make_tally()  # an unfinished attempt may have left something in the other
        self.learner.load_state_dict(state["learner"])
        self.tally.load_state_dict(state["tally"])
        int(state["version"])
        set_random_states(state["random"])

    def go_on_from(self, loaded: Loaded) -> None:
        """Says which checkpoint it is, and which ones it could not be."""
        for line in loaded.damaged:
            self.say(f"warning: {line}; {loaded.path.name}, the one before, is used")
        if notice := getattr(self.learner, "notice", ""):
            self.say(f"warning: {notice}")
        self.resumed_from = loaded.path.name
        self.saved_at = self.tally.updates

    def write_summary(self) -> None:
        """summary.json, as things stand."""
        assert self.envs is not None
        aside = {} if self.evaluating is None else self.evaluating.summary()
        write_json(self.dir.summary, self.summary() | aside)

    def fail(self, line: str, error: BaseException) -> None:
        """Writes down why the run ends, as far as there is a run and that can be done."""
        self.progress.close()
        if isinstance(error, TakenOverError):
            return  # what is written down there is another's now
        # An exception from MPI itself: the other side of some message is gone.
        lost = isinstance(error, SilenceError) or type(error).__module__.startswith("mpi4py")
        kind = "lost a rank" if lost else "failed"
        self.exit_reason = error.name if isinstance(error, Interrupted) else f"{kind}: {line}"
        try:
            if self.envs is not None:
                self.write_summary()
            elif self.dir.summary.exists():  # of an earlier start: its numbers stand
                told = json.loads(self.dir.summary.read_text())
                write_json(self.dir.summary, told | {"exit_reason": self.exit_reason})
            if self.dir.holds_a_run():
                self.log.write(line + "\n" + "".join(traceback.format_exception(error)))
        except (OSError, ValueError) as another:
            why = getattr(another, "strerror", None) or another
            self.progress.say(f"warning: {self.dir.path}: cannot be written to: {why}")

    def close_envs(self) -> None:
        """Ends the workers; an environment that fails to close has nothing to spoil any more."""
        try:
            self.envs.close()
        except WorkerError as error:
            self.say(f"warning: {str(error).splitlines()[0]}; all steps are made and saved")

    def demand_ownership(self, every_s: float = 0.0) -> None:
        """Raises TakenOverError where another process has taken the run; looks at most every ``every_s`` seconds."""
        if self.owner is not None:
            self.owner.demand(every_s)

    def say(self, text: str) -> None:
        """To the person who watches, and to log.txt."""
        self.progress.say(text)
        self.log.write(text)
