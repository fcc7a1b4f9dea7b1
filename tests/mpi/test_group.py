"""Environments that span ranks: a domain-decomposed solver on two groups of two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import heat_env
import numpy as np
import pytest

SCRIPT = """
import importlib.util, json, sys
import numpy as np, torch
import clusterenv_hpc as ce
spec = importlib.util.spec_from_file_location("heat_env", sys.argv[1])
heat_env = importlib.util.module_from_spec(spec)
spec.loader.exec_module(heat_env)
from clusterenv_hpc.policies import ActorCritic
kwargs = json.loads(sys.argv[2])
policy = ActorCritic(heat_env.HeatEnv.observation_space, heat_env.HeatEnv.action_space)
with ce.ClusterEnv(heat_env.HeatEnv, 4, policy=policy, env_ranks=2, env_kwargs=kwargs) as envs:
    observations, infos = envs.reset(seed=3)
    told = {"reset": observations.tolist(), "ranks": infos["ranks"].tolist(), "parts": envs.call("part"), "steps": []}
    rng = np.random.default_rng(0)
    for _ in range(70):
        observations, rewards, terminated, truncated, _ = envs.step(rng.uniform(-1, 1, (4, 1)).astype(np.float32))
        told["steps"].append([observations.tolist(), rewards.tolist(), truncated.tolist()])
    rollout = envs.rollout(40)
    told["rollout"] = [rollout.env_steps, rollout.ranks.tolist(), len(rollout.episodes)]
    print(json.dumps(told))
"""


def test_two_groups_of_two_solve_what_one_process_solves(mpiexec: Callable[..., Any]) -> None:
    ran = mpiexec(5, SCRIPT, heat_env.__file__, "{}").check()
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["ranks"] == [2, 2, 2, 2]
    assert told["parts"] == [[6, 6]] * 4
    alone = gym.vector.SyncVectorEnv([heat_env.HeatEnv] * 4)
    np.testing.assert_allclose(told["reset"], alone.reset(seed=3)[0], rtol=1e-12, atol=1e-12)
    rng = np.random.default_rng(0)
    first_episode = 30  # later ones start from each rank's own random state
    for observations, rewards, truncated in told["steps"][:first_episode]:
        expected = alone.step(rng.uniform(-1, 1, (4, 1)).astype(np.float32))
        np.testing.assert_allclose(observations, expected[0], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(rewards, expected[1], rtol=1e-9, atol=1e-12)
        assert truncated == expected[3].tolist()
    assert told["rollout"][1] == [1, 1, 3, 3]  # the groups' first ranks, as the job numbers them
    assert told["rollout"][2] == 4


def test_a_follower_that_fails_ends_the_job(mpiexec: Callable[..., Any]) -> None:
    ran = mpiexec(5, SCRIPT, heat_env.__file__, '{"fail_on_follower": true}', timeout=30)
    assert ran.returncode != 0 and ran.seconds < 15
    assert "of the group of worker rank" in ran.stderr + ran.stdout
    assert "the solver diverged" in ran.stderr + ran.stdout


def test_from_the_command_line(mpiexec: Callable[..., Any], tmp_path: Path) -> None:
    words = (
        "env.id=heat_env:HeatEnv env.ranks=2 algo=sac algo.learning_starts=64 algo.batch_size=32 algo.capacity=400 "
        "algo.critic_hidden=16 envs_per_worker=2 total_steps=200 eval.episodes=1 threads=1 log.progress=none "
        "run_dir=heat"
    )
    env = {"PYTHONPATH": str(Path(heat_env.__file__).parent)}
    argv = ["-m", "clusterenv_hpc", "train", *words.split()]
    refused = mpiexec(4, argv, env=env)
    assert refused.returncode == 2
    assert "env.ranks=2: the launcher has started 4 ranks; allowed: 1 + W x 2" in refused.stderr
    mpiexec(5, argv, env=env).check()
    summary = json.loads((tmp_path / "heat" / "summary.json").read_text())
    assert summary["workers"] == 2 and summary["num_envs"] == 4 and summary["env_steps"] == 200
    assert summary["eval_episodes"] == 1 and summary["eval_length_mean"] == 30  # played on the learner's rank alone


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_number_of_ranks_that_does_not_fit_is_named(mpiexec: Callable[..., Any], ranks: int) -> None:
    ran = mpiexec(ranks, SCRIPT, heat_env.__file__, "{}", timeout=30)
    assert ran.returncode != 0
    assert "env_ranks=2" in ran.stderr or "span 2 ranks" in ran.stderr
