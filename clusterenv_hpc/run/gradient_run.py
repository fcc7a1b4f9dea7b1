"""A run of a gradient method: the same directory, loop and endings as any other, around ``GradientCluster.update``.

    learner:  point to the workers ... gradients -> the rule is met -> update -> record, now and then a checkpoint
    worker:   served within GradientCluster, until the learner sends it home

Random numbers depend on the seed, the worker, the version and the number of the unit: where the counts of a round do
not depend on timing (synchronous rules, one worker), a run that was resumed is bit-equal to one that was not.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from clusterenv_hpc.envs.build import EnvSource
from clusterenv_hpc.envs.delays import Delay
from clusterenv_hpc.gradients.gradient_cluster import GradientCluster
from clusterenv_hpc.gradients.gradient_settings import GradientSettings
from clusterenv_hpc.gradients.methods import Method
from clusterenv_hpc.gradients.nigt import Optimizer, Schedule, linear, polynomial
from clusterenv_hpc.policies import flat_weights, load_flat_weights
from clusterenv_hpc.run.build import env_source
from clusterenv_hpc.run.config import config_hash
from clusterenv_hpc.run.gradient_tally import GradientTally
from clusterenv_hpc.run.learner_run import LearnerRun
from clusterenv_hpc.run.randomness import seeds_of
from clusterenv_hpc.run.report import beginning, common_summary, ending
from clusterenv_hpc.run.schema import Config, DelayConfig
from clusterenv_hpc.run.tasks import task_of

LOGGER = "clusterenv_hpc.gradients"


def build_method(config: Config) -> Method:
    """The aggregation rule and the optimizer that one of the algo schemas describes."""
    algo = config.algo
    names = [spec.name for spec in dataclasses.fields(Method) if hasattr(algo, spec.name)]
    return Method(**{name: getattr(algo, name) for name in names} | {"alpha": step_lengths(config)})


def step_lengths(config: Config) -> Schedule:
    """alpha, or how it changes over the updates: the same on every rank, without a word from the learner."""
    algo = config.algo
    if algo.alpha_schedule == "power":
        return polynomial(algo.alpha, algo.alpha_power)
    if algo.alpha_schedule == "linear":
        per_update = getattr(algo, "M", config.envs_per_worker) * algo.horizon
        return linear(algo.alpha, algo.alpha / 100, max(1, config.total_steps // per_update))
    return float(algo.alpha)


def gradient_settings(config: Config) -> GradientSettings:
    """What every rank is told; delays by worker, with a unit of H steps taking H times what a step is to take."""
    env, algo, n = config.env, config.algo, config.worker_count
    tasks = [task_of(env, worker) for worker in range(len(env.per_worker))] or [env]
    compute = _seconds(env.delay, n)
    return GradientSettings(
        tuple(_undelayed(env_source(task)) for task in tasks),
        horizon=algo.horizon,
        gamma=float(algo.gamma),
        envs_per_worker=config.envs_per_worker,
        ending=algo.ending,
        baseline=algo.baseline,
        transport=config.gradients.transport,
        seed=seeds_of(config.seed, 0)[2],
        compute_s=tuple(algo.horizon * seconds for seconds in compute),
        communication_s=_seconds(config.gradients.communication, n),
        timeout_s=float(config.timeout),
        config_hash=config_hash(config),
    )


def _seconds(delay: DelayConfig, workers: int) -> tuple[float, ...]:
    if delay.scheme == "none":
        return ()
    return Delay(delay.scheme, delay.seconds, delay.factor, tuple(delay.values)).by_worker(workers)


def _undelayed(source: EnvSource) -> EnvSource:
    """Here delays are a matter of whole units, which can be given up while they last."""
    return dataclasses.replace(source, delay=Delay())


def make_cluster(config: Config, policy: torch.nn.Module, optimizer: Optimizer | None, comm: Any) -> GradientCluster:
    """The workers of the run, wherever they are; on worker ranks this serves and raises SystemExit.

    optimizer: where the run stands; None: at its start, which is all that a worker needs.
    """
    method = build_method(config)
    return GradientCluster(
        gradient_settings(config),
        policy,
        method.aggregator(config.worker_count),
        method.optimizer(flat_weights(policy)) if optimizer is None else optimizer,
        comm=comm,
        num_workers=config.worker_count,
        first_target=method.M_init if config.algo.name != "afedpg" else None,
        learner_timeout=config.learner_timeout,
        on_worker_loss=config.on_worker_loss or ("continue" if config.slurm.launcher == "ulfm" else "abort"),
    )


class GradientLearner:
    """The optimizer, and the policy that its iterate is: what a checkpoint holds."""

    def __init__(self, config: Config, policy: torch.nn.Module) -> None:
        self.policy = policy
        self.optimizer = build_method(config).optimizer(flat_weights(policy))

    def settle(self) -> None:
        """Have the policy be the iterate.  Raises DivergedError before one is stored that cannot be gone on from."""
        _ = self.optimizer.point
        load_flat_weights(self.policy, self.optimizer.iterate)

    def state_dict(self) -> dict[str, Any]:
        """Policy and optimizer, as plain tensors."""
        return {"policy": copy.deepcopy(self.policy.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state_dict`` was taken."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])


class GradientRun(LearnerRun):
    """One start of a run of a gradient method, on the learner's rank."""

    def make_tally(self) -> GradientTally:
        return GradientTally(self.config.log.window, self.config.worker_count)

    def make_learner(self, device: torch.device, spaces: Any, seed: int) -> GradientLearner:
        return GradientLearner(self.config, self.policy)

    def make_envs(self, version: int) -> GradientCluster:
        cluster = make_cluster(self.config, self.policy, self.learner.optimizer, self.comm)
        self.opened = time.perf_counter()  # the workers have begun with the first round
        return cluster

    def run(self) -> int:
        handler = _Saying(self.say)
        logging.getLogger(LOGGER).addHandler(handler)
        try:
            return super().run()
        finally:
            logging.getLogger(LOGGER).removeHandler(handler)

    def must_stop(self) -> bool:
        """Whether a signal or the time limit forbids to wait for the end of a round: a slow worker may need long."""
        return self.stop.reason is not None or (self.job is not None and bool(self.job.look()))

    def updates(self, envs: GradientCluster) -> Iterator[dict[str, Any] | None]:
        began = self.opened
        while True:
            alpha, waiting = envs.optimizer.alpha, time.perf_counter()
            if not envs.wait(self.must_stop):  # the round is given up, and begins anew when the run goes on
                yield None
                continue
            update = envs.update()
            waited = time.perf_counter() - waiting
            self.learner.settle()
            seconds = time.perf_counter() - began
            record = self.tally.add(update, envs.stats, envs.rule.not_finite, seconds, waited)
            yield record | {"alpha": alpha, "last_rank": envs.last_worker + 1, "version": envs.version}
            began = time.perf_counter()

    def opening(self, device: str) -> str:
        config, algo, envs = self.config, self.config.algo, self.envs
        rule = f"M={algo.M}, " if hasattr(algo, "M") else ""
        return beginning(config, self.dir, self.tally, self.resumed_from) + (
            f", {rule}H={algo.horizon}, {config.envs_per_worker} trajectories a message, gradients by "
            f"{config.gradients.transport} over {envs.transport}"
        )

    def summary(self) -> dict[str, Any]:
        envs = self.envs
        return {
            **common_summary(self.config, self.tally, self.resumed_from, self.exit_reason, self.result),
            "gradients": dataclasses.asdict(self.config.gradients),
            "backend": self.config.env.backend,
            "transport": envs.transport,
            "hosts": envs.hosts,
            "lost_ranks": [worker + 1 for worker in envs.lost],
            "unit_seconds_by_rank_since_start": {str(w + 1): s for w, s in sorted(envs.stats.seconds.items())},
        }

    def closing(self) -> str:
        tally = self.tally
        shares = ", ".join(f"{100 * share:.0f} %" for share in tally.shares[:8])
        more = ", ..." if tally.workers > 8 else ""
        particulars = [
            f"  {tally.used:,} gradients used, {tally.stale:,} came too late, {tally.rejected:,} refused, "
            f"{tally.cancelled:,} units given up; shares of the workers {shares}{more}"
        ]
        for worker, count in enumerate(tally.not_finite_by):
            if count:
                particulars.append(f"  rank {worker + 1} gave {count:,} gradients that were not finite")
        return ending(self.config, self.dir, tally, tally.recent_episodes, particulars, self.exit_reason, self.result)


class _Saying(logging.Handler):
    """Warnings of the gradient workers' learner, to the person who watches and to log.txt."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"warning: {record.getMessage()}")
