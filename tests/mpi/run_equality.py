"""Run by real ranks: many ``ClusterEnv`` one after the other in one world, each equal to ``SyncVectorEnv``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import toy_envs as toy
from exact import assert_same, drive, sync_reference

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.comm.channel import WorkerError

CASES: list[tuple[Any, int, str, int]] = [
    ("CartPole-v1", 5, "NextStep", 2000),
    ("LunarLander-v3", 3, "SameStep", 300),
    ("Taxi-v4", 4, "NextStep", 400),
    ("FrozenLake-v1", 4, "Disabled", 400),
    (toy.Kinds, 5, "NextStep", 60),
    (toy.Kinds, 5, "SameStep", 60),
    (toy.Kinds, 5, "Disabled", 60),
    (toy.Kinds, 1, "NextStep", 30),
    (toy.NestedActions, 5, "NextStep", 40),
    (toy.Image, 5, "SameStep", 40),
    (toy.FromMinusTwo, 5, "NextStep", 40),
    (toy.BinaryActions, 5, "NextStep", 40),
    (toy.BoxActions, 5, "Disabled", 40),
    (toy.RareInfo, 5, "NextStep", 60),
    (toy.NoInfo, 5, "NextStep", 60),
    (toy.Aliasing, 5, "SameStep", 60),
    (toy.Wide, 3, "NextStep", 8),
]


def name_of(env: Any) -> str:
    return env if isinstance(env, str) else env.__name__


def equal(env: Any, num_envs: int, mode: str, steps: int) -> None:
    envs = ClusterEnv(env, num_envs, autoreset_mode=mode, exit_workers=False)
    if not envs.is_learner:
        assert envs.closed
        return
    with envs:
        assert envs.transport != "local"
        ended = drive(envs, sync_reference(env, num_envs, mode=mode), steps, options={"shift": 1.0})
    print(f"equal: {name_of(env)} {num_envs} {mode}, {ended} episodes", flush=True)


def calls() -> None:
    envs = ClusterEnv(toy.wrapped, 5, exit_workers=False)
    if not envs.is_learner:
        return
    reference = sync_reference(toy.wrapped, 5)
    both: list[Callable[[Any], Any]] = [
        lambda e: e.reset(seed=4),
        lambda e: e.get_attr("label"),
        lambda e: e.get_attr("halves"),
        lambda e: e.call("scaled", 3.0, times=2),
        lambda e: e.set_attr("gain", [1.0, 2.0, 3.0, 4.0, 5.0]),
        lambda e: e.set_attr("label", "one for all"),
        lambda e: e.get_attr("gain"),
        lambda e: e.get_attr("label"),
        lambda e: e.np_random_seed,
        lambda e: e.step([0, 1, 2, 1, 0]),
        lambda e: e.step((0, 1, 2, 1, 0)),
        lambda e: e.step(np.zeros(5, np.int32)),
    ]
    with envs:
        for ask in both:
            assert_same(ask(envs), ask(reference))
        for ask in (lambda e: e.get_attr("no_such"), lambda e: e.call("fail"), lambda e: e.get_attr("np_random")):
            try:
                ask(envs)
            except WorkerError as error:
                assert "environment 0" in str(error)
            else:
                raise AssertionError("no WorkerError")
            actions = reference.action_space.sample()
            assert_same(envs.step(actions), reference.step(actions))
    print("equal: calls", flush=True)


if __name__ == "__main__":
    for case in CASES:
        equal(*case)
    calls()
