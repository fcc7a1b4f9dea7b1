"""The life of a run on the learner's rank, whatever makes its updates: from its configuration to its summary.

    start -> update -> record, now and then a checkpoint ... evaluation -> summary

Nothing that depends on the clock enters the training itself: with a fixed seed a run is bit-equal twice.  A resumed
run goes on with weights, optimizer, schedules, counters and random states; what cannot go on is the inside of the
environments: episodes that were under way begin anew, from seeds made of the run's seed and the update it goes on at.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from clusterenv_hpc.comm.channel import SilenceError, WorkerError
from clusterenv_hpc.files import write_atomically
from clusterenv_hpc.jobs.record import remember
from clusterenv_hpc.jobs.signals import JobSignals
from clusterenv_hpc.run.build import build_policy, choose_device, choose_threads, spaces_of
from clusterenv_hpc.run.checkpoint import CheckpointStore, Loaded, State
from clusterenv_hpc.run.config import to_yaml
from clusterenv_hpc.run.evaluate import Evaluation, evaluate
from clusterenv_hpc.run.evaluator import Evaluating
from clusterenv_hpc.run.interrupt import EXIT_CODES, Interrupted, StopSignals
from clusterenv_hpc.run.memory import demand_memory
from clusterenv_hpc.run.metrics import MetricsWriter, RunLog, write_json
from clusterenv_hpc.run.owner import Ownership, TakenOverError
from clusterenv_hpc.run.progress import Progress, make_progress
from clusterenv_hpc.run.randomness import random_states, seed_everything, seeds_of, set_random_states
from clusterenv_hpc.run.run_dir import RunDir
from clusterenv_hpc.run.schema import Config

CONFIRM_EVERY = 0.02
"""Share of total_steps between two evaluations that are to confirm ``stop.at_return``."""

LOOK_EVERY_S = 5.0
"""Seconds between two looks at whether the run is still this process's."""


class LearnerRun(ABC):
    """One start of a run, on the learner's rank: ``RolloutRun`` or ``GradientRun``, by what makes its updates."""

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
            with self.stop.deferred():  # Slurm ends the job with SIGTERM as soon as it is asked to take it back
                return self.job.leave().exit_code
        if self.result is None and self.exit_reason == "completed" and self.stop.reason == "SIGINT":
            return EXIT_CODES["SIGINT"]  # of the evaluation
        return EXIT_CODES.get(self.exit_reason, 0)

    # -- what depends on the kind of run ------------------------------------------------------------------------------

    @abstractmethod
    def make_tally(self) -> Any:
        """The counters."""

    @abstractmethod
    def make_learner(self, device: torch.device, spaces: tuple[Any, Any], seed: int) -> Any:
        """What changes the policy; its state, with the policy's in it, is what a checkpoint holds.  ``spaces``: of one
        environment: observation, action."""

    @abstractmethod
    def make_envs(self, version: int) -> Any:
        """The workers, ready to work."""

    @abstractmethod
    def updates(self, envs: Any) -> Iterator[dict[str, Any] | None]:
        """Updates without end: the record of each, None where there was nothing to learn from."""

    @abstractmethod
    def opening(self, device: str) -> str:
        """The first line."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json."""

    @abstractmethod
    def closing(self) -> str:
        """The last lines."""

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
