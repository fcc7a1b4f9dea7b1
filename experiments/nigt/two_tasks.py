"""Two workers of unlike speed with two unlike tasks: which method finds what is best for both?  Real ranks and sleeps.

    mpiexec -n 3 python experiments/nigt/two_tasks.py [METHOD ...] [seed=N] [unit=SECONDS] [limit=SECONDS]

A unit is one choice among three arms.  Arm 0 is worth 1 to the first worker and -1 to the second, arm 1 the other way
round, and arm 2 is worth 0.5 to both: the best for their mean, whose value at any policy is exactly J = p(arm 2) / 2.
The first worker is ten times as fast.  Whoever weighs workers by how many gradients they give climbs
(10 J_1 + J_2) / 11 instead, whose top is arm 0, with J = 0.

The learner prints a line of JSON for each method: the seconds until J has first reached 0.4 (null: not within
``limit``), J at the end, updates, and gradients used of each worker.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from clusterenv_hpc.envs import EnvSource
from clusterenv_hpc.gradients.gradient_cluster import GradientCluster
from clusterenv_hpc.gradients.gradient_settings import GradientSettings
from clusterenv_hpc.gradients.methods import Method
from clusterenv_hpc.policies import flat_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, settings

REACHED = 0.4
TRAJECTORIES = 8
"""In one message of a worker."""
METHODS = ("malenia_nigt", "sync_nigt", "rennala_nigt", "m_sync_nigt", "rennala_pg", "afedpg")
ALPHA = {"afedpg": 0.05, "rennala_pg": 2.0}
"""Steps; AFedPG makes about ten of them in the time of one of the others'."""


class Arms(gym.Env):
    """One choice, and it is over."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, task: int = 0) -> None:
        self._worth = ([1.0, -1.0, 0.5], [-1.0, 1.0, 0.5])[task]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.ones(1, dtype=np.float32), {}

    def step(self, action: Any) -> Any:
        return np.ones(1, dtype=np.float32), self._worth[int(action)], True, False, {}


def mean_value(weights: Any) -> float:
    """J of the policy with these weights."""
    return float(torch.as_tensor(weights).double().softmax(0)[2]) / 2


def solve(name: str, seed: int, unit_s: float, limit_s: float) -> dict[str, Any] | None:
    """One method; None on worker ranks."""
    torch.set_num_threads(1)
    policy = torch.nn.Linear(1, 3, bias=False)
    torch.nn.init.zeros_(policy.weight)
    method = Method(name, M=10 * TRAJECTORIES, m=1, eta=0.3, alpha=ALPHA.get(name, 0.5))
    settings = GradientSettings(
        (EnvSource(Arms, {"task": 0}), EnvSource(Arms, {"task": 1})),
        horizon=1,
        envs_per_worker=TRAJECTORIES,
        seed=seed,
        compute_s=(unit_s, 10 * unit_s),
        timeout_s=60.0,
    )
    optimizer = method.optimizer(flat_weights(policy))
    rule = method.aggregator(2)
    cluster = GradientCluster(settings, policy, rule, optimizer, num_workers=2, exit_workers=False)
    if not cluster.is_learner:
        return None
    used, reached, began = np.zeros(2, dtype=int), None, time.monotonic()
    with cluster:
        while reached is None and time.monotonic() < began + limit_s:
            used += cluster.update().aggregate.counts
            if mean_value(optimizer.iterate) >= REACHED:
                reached = time.monotonic() - began
    return {
        "method": name,
        "seed": seed,
        "seconds": reached,
        "J": mean_value(optimizer.iterate),
        "updates": optimizer.updates,
        "used": used.tolist(),
    }


def main() -> None:
    """Method after method on the same ranks."""
    parser = command_line(__doc__)
    allowed = ", ".join(METHODS)
    parser.add_argument("words", nargs="*", metavar="WORD", help=f"methods of {allowed} (default: all), and settings")
    words = parser.parse_args().words
    given = settings(parser, [word for word in words if "=" in word], seed=1, unit=0.02, limit=20.0)
    methods = [word for word in words if "=" not in word]
    if unknown := [name for name in methods if name not in METHODS]:
        parser.error(f"{unknown[0]}: allowed: {allowed}")
    for name in methods or METHODS:
        told = solve(name, given["seed"], given["unit"], given["limit"])
        if told is not None:
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
