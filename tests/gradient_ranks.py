"""A small problem for gradient workers, and checks of whole runs on it: imported by tests, and run as ranks of MPI.

    python gradient_ranks.py NAME TRANSPORT UPDATES [KEY=JSON ...] [-- NAME ...]

``expected_gradient`` redoes by itself what the workers of a round should have computed, from the counts the round ended
with: a gradient of another version, one counted twice, or one that is missing would show.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from clusterenv_hpc.envs import EnvSource, build_vector_env
from clusterenv_hpc.gradients.gradient_cluster import GradientCluster
from clusterenv_hpc.gradients.gradient_settings import GradientSettings
from clusterenv_hpc.gradients.methods import Method
from clusterenv_hpc.gradients.policy_gradient import Sampler, summed_gradient
from clusterenv_hpc.policies import distribution_for, flat_weights, load_flat_weights

HORIZON = 5


class Walk(gym.Env):
    """A walk on a line; each step costs its distance from ``goal``; ends beyond 3.

    ``bad``: rewards are NaN.  ``dies_at``: the process is killed at this step of the environment's, ``hangs_at``: it
    is no more heard of.
    """

    observation_space = spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(
        self,
        goal: float = 1.0,
        bad: bool = False,
        sleep_s: float = 0.0,
        broken: bool = False,
        dies_at: int = -1,
        hangs_at: int = -1,
    ) -> None:
        self.goal, self.bad, self.sleep_s, self.broken = goal, bad, sleep_s, broken
        self.dies_at, self.hangs_at, self.steps = dies_at, hangs_at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = float(self.np_random.normal())
        return self._seen(), {}

    def _seen(self) -> Any:
        return np.array([self.place, self.goal], dtype=np.float32)

    def step(self, action: Any) -> Any:
        if self.broken:
            raise RuntimeError("the floor is gone")
        self.steps += 1
        if self.steps == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600.0 if self.steps == self.hangs_at else self.sleep_s)
        self.place += float(action) - 1.0 + 0.1 * float(self.np_random.normal())
        reward = math.nan if self.bad else -abs(self.place - self.goal)
        return self._seen(), reward, abs(self.place) > 3, False, {}


def make_policy(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))


def make_settings(transport: str = "p2p", **changes: Any) -> GradientSettings:
    sources = changes.pop("sources", (EnvSource(Walk),))
    kept = {"horizon": HORIZON, "gamma": 0.9, "envs_per_worker": 2, "seed": 3, "timeout_s": 20.0}
    return GradientSettings(sources, transport=transport, **{**kept, **changes})


def unit(settings: GradientSettings, worker: int, version: int, number: int, point: Any) -> np.ndarray:
    """The summed gradient of one unit, computed here and now."""
    policy = make_policy()
    load_flat_weights(policy, np.array(point))
    envs = build_vector_env(settings.source(worker), settings.envs_per_worker)
    distribution = distribution_for(envs.single_action_space)
    words = [int(w) for w in np.random.SeedSequence([settings.seed, worker, version, number]).generate_state(4)]
    generator = torch.Generator().manual_seed((words[0] << 32) | words[1])
    sampler = Sampler(envs, distribution, settings.horizon, ending=settings.ending)
    units = sampler.collect(policy, generator, seed=(words[2] << 30) | (words[3] >> 2))
    assert units is not None
    return summed_gradient(policy, distribution, units, settings.gamma, baseline=settings.baseline).astype(np.float64)


def expected_gradient(settings: GradientSettings, name: str, version: int, point: Any, counts: Any) -> np.ndarray:
    """What a round of ``name`` must give, if it used ``counts`` gradients of the workers, taken at ``point``."""
    sums = []
    for worker, count in enumerate(counts):
        units = [unit(settings, worker, version, k, point) for k in range(int(count) // settings.envs_per_worker)]
        sums.append(sum(units, np.zeros(len(point))))
    if name == "malenia_nigt":
        return np.mean([s / c for s, c in zip(sums, counts, strict=True)], axis=0)
    return np.sum(sums, axis=0) / np.sum(counts)


def train(
    name: str,
    settings: GradientSettings,
    updates: int,
    *,
    num_workers: int | None = None,
    verify: bool = False,
    M: int = 12,
) -> dict[str, Any] | None:
    """A run of ``updates``; with ``verify`` every estimate is compared with :func:`expected_gradient`.

    None on worker ranks.
    """
    torch.set_num_threads(1)
    method = Method(name, M=M, m=1, alpha=0.05, eta=0.3)
    policy = make_policy()
    optimizer = method.optimizer(flat_weights(policy))
    workers = num_workers
    if workers is None:
        from clusterenv_hpc.comm.mpi import MPI

        workers = MPI.COMM_WORLD.Get_size() - 1
    began = time.perf_counter()
    cluster = GradientCluster(
        settings, policy, method.aggregator(workers), optimizer, num_workers=num_workers, exit_workers=False
    )
    if not cluster.is_learner:
        return None
    with cluster:
        returns = []
        while optimizer.updates < updates:
            point = optimizer.point
            update = cluster.update()
            returns.append(update.units.return_mean)
            if verify:
                done = update.aggregate
                wanted = expected_gradient(settings, name, optimizer.updates - 1, point, done.counts)
                np.testing.assert_allclose(done.gradient, wanted, rtol=1e-5, atol=1e-6)
        seconds = time.perf_counter() - began
    return {
        "iterate": optimizer.iterate.astype(float).tolist(),
        "total": vars(cluster.rule.total),
        "counts": update.aggregate.counts.tolist(),
        "cancelled": sum(cluster.stats.cancelled.values()),
        "sent": {kind: traffic.messages for kind, traffic in cluster.stats.sent.items()},
        "received": {kind: traffic.messages for kind, traffic in cluster.stats.received.items()},
        "returns": returns,
        "seconds": seconds,
        "not_finite": cluster.rule.not_finite,
        "units": cluster.stats.units,
    }


def main(argv: list[str]) -> None:
    """Run after run on the same ranks; the learner prints a line of JSON for each."""
    while "--" in argv:
        cut = argv.index("--")
        run(argv[:cut])
        argv = argv[cut + 1 :]
    run(argv)


def run(argv: list[str]) -> None:
    """``NAME TRANSPORT UPDATES [KEY=JSON ...]``."""
    name, transport, updates, *words = argv
    changes = {key: json.loads(text) for key, _, text in (word.partition("=") for word in words)}
    verify, M = changes.pop("verify", False), changes.pop("M", 12)
    if "envs" in changes:
        changes["sources"] = tuple(EnvSource(Walk, kwargs) for kwargs in changes.pop("envs"))
    for key in ("compute_s", "communication_s"):
        if key in changes:
            changes[key] = tuple(changes[key])
    result = train(name, make_settings(transport, **changes), int(updates), verify=verify, M=M)
    if result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
