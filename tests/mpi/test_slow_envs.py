"""Environments whose steps take long, on real ranks: a worker that gives signs of life is not taken for dead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]

SCRIPT = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import clusterenv_hpc as ce
import toy_envs as toy
from clusterenv_hpc.envs.delays import Delay
from toy_policy import Linear

mode, seconds = sys.argv[2], float(sys.argv[3])
policy = Linear(toy.Walk.observation_space, toy.Walk.action_space)
delay = Delay("list", values=(0.0, seconds))
with ce.ClusterEnv(toy.Walk, 2, policy=policy, sync=ce.APS(0.1), timeout=2.0, delay=delay) as envs:
    envs.reset(seed=3)
    began = time.monotonic()
    if mode == "rollout":
        told = [envs.rollout(8).env_steps for _ in range(2)]
    elif mode == "rollouts":
        counts = {1: 0, 2: 0}
        for rollout in envs.rollouts(4):
            counts[int(rollout.ranks[0])] += 1
            envs.publish()
            if counts[2] == 3:
                break
        told = counts
    print(json.dumps([told, time.monotonic() - began, envs.stats.as_dict()["seconds_by_rank"]]))
"""


def run(mpiexec: Callable[..., Any], mode: str, seconds: float) -> Any:
    return mpiexec(3, SCRIPT, str(TESTS), mode, str(seconds))


def test_a_rollout_may_take_longer_than_the_timeout(mpiexec: Callable[..., Any]) -> None:
    told, seconds, by_rank = json.loads(run(mpiexec, "rollout", 0.5).check().stdout.splitlines()[-1])
    assert len(told) == 2 and seconds > 8 and by_rank["2"]["env"] > 8 > by_rank["1"]["env"]


def test_a_slow_worker_keeps_nobody_waiting(mpiexec: Callable[..., Any]) -> None:
    told, *_ = json.loads(run(mpiexec, "rollouts", 0.3).check().stdout.splitlines()[-1])
    assert told["2"] == 3 and told["1"] > 10 * told["2"]


def test_a_single_step_longer_than_the_timeout_is_taken_for_death(mpiexec: Callable[..., Any]) -> None:
    ran = run(mpiexec, "rollout", 20.0)
    assert ran.returncode != 0 and ran.seconds < 30
    assert (
        "rank 2 (worker, " in ran.stderr and "no sign of life for 2 s" in ran.stderr and "raise timeout" in ran.stderr
    )
