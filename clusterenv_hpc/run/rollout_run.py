"""Runs that learn from rollouts: the environments of a run, and an update from each batch that they bring."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from clusterenv_hpc.algorithms import Replaying
from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.run.build import build_learner, build_sync, env_source
from clusterenv_hpc.run.config import config_hash
from clusterenv_hpc.run.learner_run import LearnerRun
from clusterenv_hpc.run.randomness import seeds_of
from clusterenv_hpc.run.report import closing, opening, summary
from clusterenv_hpc.run.schema import Config
from clusterenv_hpc.run.source import demand_finite, publishes, rollouts_for, trim
from clusterenv_hpc.run.tally import Tally


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


class RolloutRun(LearnerRun):
    """One start of a run whose updates are a learner's, from rollouts."""

    def make_tally(self) -> Any:
        """The counters."""
        return Tally(self.config.log.window, self.config.worker_count)

    def make_learner(self, device: torch.device, spaces: tuple[Any, Any], seed: int) -> Any:
        """What changes the policy; its state, with the policy's in it, is what a checkpoint holds.  ``spaces``: of one
        environment: observation, action."""
        config = self.config
        if isinstance(config.algo, Replaying) and config.algo.learning_starts > config.total_steps:
            self.say(
                f"warning: algo.learning_starts={config.algo.learning_starts} is above "
                f"total_steps={config.total_steps}: no learning"
            )
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
