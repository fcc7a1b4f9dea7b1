"""How fast the replay samples:  python experiments/async/replay.py     writes replay.json beside it

A million CartPole transitions, played by a Q-network that explores, in a prioritized and in a uniform replay; then
batches of 256 on one core, as a learner draws them: for the prioritized one with new priorities for each batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import clusterenv_hpc as ce
from clusterenv_hpc.bench.command import circumstances
from clusterenv_hpc.learners import Replay
from clusterenv_hpc.policies import QNetwork

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, store

TRANSITIONS, BATCH, ENVS, STEPS, BATCHES, ROUNDS = 1_000_000, 256, 64, 128, 400, 5
ROOM = 1.2
"""Slots for each transition: where an episode ends, its final observation takes one too."""


def filled() -> dict[str, Replay]:
    """Both kinds, of the same transitions."""
    single = gymnasium.make("CartPole-v1")
    torch.manual_seed(0)
    policy = QNetwork(single.observation_space, single.action_space, (64, 64))  # type: ignore[arg-type]
    kinds = {"prioritized": True, "uniform": False}
    replays = {
        name: Replay(int(ROOM * TRANSITIONS), ENVS, n_step=3, gamma=0.99, prioritized=kind)
        for name, kind in kinds.items()
    }
    random = np.random.default_rng(0)
    with ce.ClusterEnv("CartPole-v1", ENVS, policy=policy, backend="vector", num_workers=1, seed=1) as envs:
        while min(len(replay) for replay in replays.values()) < TRANSITIONS:
            rollout = envs.rollout(STEPS)
            for replay in replays.values():
                replay.add(rollout, random.random(rollout.rewards.shape) + 0.01)
    return replays


def speeds(replay: Replay, prioritized: bool) -> list[float]:
    """Batches a second, of several rounds."""
    generator, device = torch.Generator().manual_seed(0), torch.device("cpu")
    random, told = np.random.default_rng(1), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(BATCHES):
            sample = replay.sample(BATCH, generator, device, 0.4)
            if prioritized:
                replay.set_priorities(sample.index, random.random(BATCH) + 0.01)
        told.append(BATCHES / (time.perf_counter() - began))
    return told


def main() -> None:
    """Measure and store."""
    command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    told: dict[str, Any] = {"batch": BATCH, "envs": ENVS, "n_step": 3, **circumstances([])}
    told["command"] = "python experiments/async/replay.py"
    for name, replay in filled().items():
        told[name] = {
            "transitions": len(replay),
            "bytes": replay.nbytes,
            "batches_per_s": [round(speed) for speed in speeds(replay, name == "prioritized")],
        }
    path = Path(__file__).with_name("replay.json")
    store(path, told)
    print(json.dumps({name: told[name] for name in ("prioritized", "uniform")}))


if __name__ == "__main__":
    main()
