"""Run by real ranks, and in one process by the test: what a training loop gets to see, as digests."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import toy_envs as toy
from toy_policy import Linear

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.envs.spaces import split
from clusterenv_hpc.rollout import Rollout
from clusterenv_hpc.sync import APS, Always, EveryK, Never, SyncRule

CASES: dict[str, tuple[Any, SyncRule, dict[str, Any]]] = {
    "aps": (toy.Walk, APS(0.05, max_lag=6), {}),
    "aps, few probes": (toy.Kinds, APS(0.02), {"num_probes": 3}),
    "aps, continuous": (toy.FloatActions, APS(0.2), {}),
    "always": (toy.BinaryActions, Always(), {}),
    "every 2": (toy.FromMinusTwo, EveryK(2), {}),
    "never": (toy.Image, Never(), {}),
    "same step": (toy.Walk, Always(), {"autoreset_mode": "SameStep"}),
    "disabled": (toy.Walk, APS(0.05), {"autoreset_mode": "Disabled"}),
}


def digest(rollout: Rollout, space: Any) -> str:
    """Of every bit of it."""
    known = hashlib.sha256()
    for key, value in vars(rollout).items():
        if key in ("observations", "next_observations"):
            arrays = split(space, value)
        elif key == "episodes":
            arrays = [value.rows, value.returns, value.lengths]
        else:
            arrays = [np.asarray(value)]
        for array in arrays:
            known.update(f"{key} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return known.hexdigest()[:16]


def record(case: str, num_workers: int | None = None) -> list[Any] | None:
    """Train a little; digests of all rollouts, and the numbers of the sync rule.  None on a worker."""
    env, rule, changes = CASES[case]
    policy = Linear(env.observation_space, env.action_space)
    envs = ClusterEnv(
        env, 5, policy=policy, sync=rule, num_workers=num_workers, seed=3, exit_workers=False, **changes
    )  # fmt: skip
    if not envs.is_learner:
        return None
    digests: list[Any] = []
    random = torch.Generator().manual_seed(1)
    with envs:
        for update in range(10):
            if update == 5:
                envs.reset(seed=8)
            rollout = envs.rollout(4 + update % 3)
            digests.append(digest(rollout, envs.single_observation_space))
            with torch.no_grad():
                for tensor in policy.parameters():
                    tensor += 0.1 * torch.randn(tensor.shape, generator=random)
            envs.publish()
        rollout = envs.rollout(3)
        digests.append(digest(rollout, envs.single_observation_space))
        stats = envs.stats
        numbers = [stats.kl_sum, stats.kl_count, stats.kl_last, stats.lag_sum, stats.lag_max, stats.weight_messages]
        numbers += [stats.weight_requests, stats.weight_bytes, stats.probe_bytes, stats.rollout_bytes]
    return [*digests, *(float(number).hex() for number in numbers), sorted(stats.env_steps.items())]


if __name__ == "__main__":
    for name in CASES:
        recorded = record(name)
        if recorded is not None:
            print(json.dumps([name, recorded]), flush=True)
