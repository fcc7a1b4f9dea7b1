"""Flaky environments on real ranks: the run goes on, and says where they failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import clusterenv_hpc as ce
from flaky_env import Flaky, Maker
from toy_policy import Linear

plan = {int(instance): tuple(what) for instance, what in json.loads(sys.argv[2]).items()}
policy = Linear(Flaky.observation_space, Flaky.action_space)
with ce.ClusterEnv(Maker(plan), 4, policy=policy, on_error=sys.argv[3], max_restarts=3) as envs:
    envs.reset(seed=3)
    told = [envs.rollout(6).valid.tolist() for _ in range(3)]
    for rollout, _ in zip(envs.rollouts(5), range(4)):
        told.append([bool(rollout.valid.any()), int(rollout.ranks[0])])
print(json.dumps([told, envs.stats.as_dict()["restarts_by_rank"]]))
"""


def test_every_worker_rebuilds_its_own(mpiexec: Callable[..., Any]) -> None:
    plan = {1: ["step", 3], 2: ["reset", 1]}  # on each rank: its second environment, and then the one in its place
    ran = mpiexec(3, SCRIPT, str(TESTS), json.dumps(plan), "restart").check()
    told, restarts = json.loads(ran.stdout.splitlines()[-1])
    assert restarts == {"1": {"1": 2}, "2": {"3": 2}}, "by rank and environment"
    assert told[0][2] == [True, False, True, False]
    assert all(valid for step in told[0][:2] + told[0][3:] for valid in step)
    assert {rank for _, rank in told[3:]} <= {1, 2}
    for row in (1, 3):
        assert f"environment {row} was built anew (restart 2): RuntimeError: planned for reset 1" in ran.stderr


def test_one_that_fails_again_and_again_ends_the_run(mpiexec: Callable[..., Any]) -> None:
    plan = {instance: ["step", 2] for instance in range(1, 20)}
    ran = mpiexec(3, SCRIPT, str(TESTS), json.dumps(plan), "restart")
    assert ran.returncode != 0 and ran.seconds < 30
    assert "failed once more than max_restarts=3 allows: RuntimeError: planned for step 2" in ran.stderr
    assert "Traceback" not in ran.stderr.replace("remote", "")


def test_without_leave_to_restart_the_first_failure_ends_the_run(mpiexec: Callable[..., Any]) -> None:
    ran = mpiexec(3, SCRIPT, str(TESTS), json.dumps({1: ["step", 3]}), "abort")
    assert ran.returncode != 0 and "failed in environment" in ran.stderr
