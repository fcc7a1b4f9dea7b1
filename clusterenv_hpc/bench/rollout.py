"""Steps per second of W workers and a receiving learner, against W processes that step and infer with nobody listening.

The limit is the least that any design must do: the same environments, policy, sampling and noise, in a bare loop that
keeps nothing, and calls the policy as a script would.  The workers call it without torch's module machinery
(``policies.make_lean``), which wins back some of what sending costs; ``ratio_to_lean_limit`` is measured against a bare
loop that does the same.  All are measured in turn in one run on the same cores, each round in another order than the
one before, and every vector step counts alike on both sides (those that only reset included).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from clusterenv_hpc.bench.command import Options
from clusterenv_hpc.bench.ranks import barrier, say
from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.envs.build import EnvSource, SyncEnvs, build_vector_env
from clusterenv_hpc.policies import ActorCritic, as_tensors, distribution_of, make_lean
from clusterenv_hpc.run.build import spaces_of
from clusterenv_hpc.run.config import compose
from clusterenv_hpc.sync import APS

WARM_UP = 4
"""Rollouts of each worker before the clock starts."""


class Case:
    """One environment to measure on.

    Args:
        name: of ``conf/env``.
        options: of the benchmark.
    """

    def __init__(self, name: str, options: Options) -> None:
        env = compose([f"env={name}"]).env
        self.name, self.options, self._env = name, options, env
        self.source = EnvSource(env.id, env.kwargs, env.backend)
        self.num_envs = options.envs_per_worker or (64 if env.backend != "sync" else 16)

    def policy(self) -> ActorCritic:
        """The network of the peers' table: separate 64-64 tanh actor and critic."""
        torch.manual_seed(0)
        return ActorCritic(*spaces_of(self._env))

    def bare(self, seed: int, lean: bool = False) -> float:
        """Steps per second of this process alone, with nobody listening."""
        envs = build_vector_env(self.source, self.num_envs)
        if isinstance(envs, SyncEnvs):
            envs.record_infos = False
        policy = self.policy().eval()
        if lean:
            make_lean(policy)
        distribution = distribution_of(policy, envs.single_action_space)
        generator = torch.Generator().manual_seed(seed)
        observation, _ = envs.reset(seed=seed)
        flat = isinstance(observation, np.ndarray)
        length, steps, rounds = self.options.num_steps, 0, 0
        began = time.perf_counter()
        with torch.inference_mode():
            while rounds < WARM_UP or time.perf_counter() - began < self.options.seconds:
                noise = distribution.noise((length, self.num_envs), generator).unbind(0)
                for t in range(length):
                    tensors = torch.from_numpy(observation) if flat else as_tensors(observation)
                    actions = distribution.sample(policy(tensors), noise[t]).numpy()
                    observation, *_ = envs.step(distribution.env_actions(actions))
                rounds += 1
                steps += length * self.num_envs
                if rounds == WARM_UP:
                    began, steps = time.perf_counter(), 0
        seconds = time.perf_counter() - began
        envs.close()
        return steps / seconds

    def cluster(self, comm: Any, seed: int) -> dict[str, float]:
        """Steps per second that arrive at the learner; on worker ranks this serves."""
        workers = comm.Get_size() - 1
        envs = ClusterEnv(
            self.source.env,
            self.num_envs * workers,
            policy=self.policy(),
            sync=APS(0.1),
            env_kwargs=self.source.kwargs,
            backend=self.source.backend,
            comm=comm,
            seed=seed,
            exit_workers=False,
        )
        if not envs.is_learner:
            return {}
        rollouts = envs.rollouts(self.options.num_steps)
        for _ in range(WARM_UP * workers):
            next(rollouts)
        steps = messages = 0
        began, cpu = time.perf_counter(), time.process_time()
        while (seconds := time.perf_counter() - began) < self.options.seconds:
            rollout = next(rollouts)
            steps += rollout.num_steps * rollout.num_envs
            messages += 1
        cpu = time.process_time() - cpu
        rollouts.close()
        envs.close()
        return {"steps_per_s": steps / seconds, "learner_cpu": cpu / seconds, "learner_us": cpu / messages * 1e6}


def measure(comm: Any, case: Case) -> dict[str, Any]:
    """All rounds of one case; the numbers are rank 0's."""
    rank, rounds = comm.Get_rank(), []
    kinds = ["limit", "ours", "lean_limit"]
    for number in range(case.options.repeats):
        figures: dict[str, float] = {}
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            barrier(comm)
            if kind == "ours":
                figures |= case.cluster(comm, number)
            else:
                rate = case.bare(1 + 1000 * number + rank, lean=kind == "lean_limit") if rank else 0.0
                barrier(comm)  # rank 0 sleeps meanwhile
                figures[f"{kind}_steps_per_s"] = sum(comm.gather(rate) or [])
        if rank == 0:
            for kind in ("limit", "lean_limit"):
                figures[f"ratio_to_{kind}"] = figures["steps_per_s"] / figures[f"{kind}_steps_per_s"]
            rounds.append(figures)
            say(
                f"{case.name}: {figures['steps_per_s']:,.0f} steps/s of {figures['limit_steps_per_s']:,.0f}, ratio "
                f"{figures['ratio_to_limit']:.3f} (lean {figures['ratio_to_lean_limit']:.3f}), "
                f"learner {figures['learner_us']:.0f} us a message"
            )
    if rank:
        return {}
    medians = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
    return {
        **medians,
        "workers": comm.Get_size() - 1,
        "envs_per_worker": case.num_envs,
        "backend": case.source.backend,
        "rounds": rounds,
    }


def run(comm: Any, options: Options) -> dict[str, Any]:
    """The benchmark; ``ratio_to_limit`` is the smallest over the environments."""
    results = {name: measure(comm, Case(name, options)) for name in options.env.split(",")}
    if comm.Get_rank():
        return {}
    return {"ratio_to_limit": min(result["ratio_to_limit"] for result in results.values()), "results": results}
