"""A user's own script on real ranks: workers serve in the constructor and leave; the script goes on in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = str(Path(__file__).parents[1])
BOTH_MPIS = ["mpich", pytest.param("openmpi", marks=pytest.mark.needs("openmpi"))]

TRAINING = """
import os
import torch
import gymnasium as gym
import clusterenv_hpc as ce
from clusterenv_hpc.policies import ActorCritic

env = gym.make("CartPole-v1")
agent = ActorCritic(env.observation_space, env.action_space)
with ce.ClusterEnv("CartPole-v1", num_envs=8, policy=agent, sync=ce.APS(delta=0.1)) as envs:
    for update in range(3):
        batch = envs.rollout(16)
        assert batch.observations.shape == (16, 8, 4) and batch.env_steps <= 16 * 8
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter += 0.01
        envs.publish()
    print(f"trained: {batch.num_envs} environments, ranks {sorted(set(batch.ranks.tolist()))}, {envs.transport}")
print("after the body")
"""


@pytest.mark.parametrize("mpi", BOTH_MPIS)
def test_a_training_script_runs_its_body_on_the_learner_alone(mpiexec: Callable[..., Any], mpi: str) -> None:
    ran = mpiexec(3, TRAINING, mpi=mpi).check()
    lines = ran.stdout.splitlines()
    assert len(lines) == 2 and lines[1] == "after the body"
    assert lines[0].startswith("trained: 8 environments, ranks [1, 2], ") and "local" not in lines[0]
    assert "clusterenv-hpc" not in ran.stderr and "Traceback" not in ran.stderr


def test_the_same_script_with_one_rank_and_without_any(mpiexec: Callable[..., Any]) -> None:
    ran = mpiexec(1, TRAINING).check()
    assert ran.stdout.splitlines()[0] == "trained: 8 environments, ranks [1], local"


PLAIN = """
import sys, time
import numpy as np
import clusterenv_hpc as ce
envs = ce.ClusterEnv("CartPole-v1", num_envs=5)
observation, info = envs.reset(seed=1)
for _ in range(20):
    observation, *_ = envs.step(np.ones(5, np.int64))
print("stepped", observation.shape)
"""


@pytest.mark.parametrize(
    "end",
    [
        "",  # neither a with block nor close
        "envs.close(); envs.close()",
        "envs.close(); time.sleep(1.5)",  # the learner has other things to do; nobody may grow impatient
        "import threading; t = threading.Thread(target=time.sleep, args=(0.5,)); t.start()",
    ],
    ids=["no close", "closed twice", "closed long before", "a thread outlives the script"],
)
def test_every_way_to_end_a_script_well(mpiexec: Callable[..., Any], end: str) -> None:
    script = PLAIN.replace("num_envs=5)", "num_envs=5, learner_timeout=1.0)") + end + "\nprint('over')\n"
    ran = mpiexec(3, script).check()
    assert ran.stdout.splitlines() == ["stepped (5, 4)", "over"]
    assert "clusterenv-hpc" not in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize("mpi", BOTH_MPIS)
def test_more_workers_than_environments(mpiexec: Callable[..., Any], mpi: str) -> None:
    script = TRAINING.replace("num_envs=8", "num_envs=2").replace("(16, 8, 4)", "(16, 2, 4)")
    ran = mpiexec(4, script, mpi=mpi).check()
    assert "2 environments, ranks [1, 2]" in ran.stdout


def test_a_communicator_of_the_scripts_own(mpiexec: Callable[..., Any]) -> None:
    """Two clusters side by side in one job, each with its own learner."""
    ran = mpiexec(
        4,
        """
        import sys
        from mpi4py import MPI
        import clusterenv_hpc as ce
        world = MPI.COMM_WORLD
        half = world.Split(world.rank % 2, world.rank)
        with ce.ClusterEnv("CartPole-v1", num_envs=3, comm=half) as envs:
            observation, _ = envs.reset(seed=world.rank)
            sys.stdout.write(f"learner {world.rank}: {observation.shape}, {envs.num_workers} worker\\n")
        """,
    ).check()
    assert sorted(ran.stdout.splitlines()) == [f"learner {rank}: (3, 4), 1 worker" for rank in (0, 1)]


def test_a_wrong_number_of_workers_is_told_once(mpiexec: Callable[..., Any]) -> None:
    ran = mpiexec(3, PLAIN.replace("num_envs=5", "num_envs=5, num_workers=4"))
    assert ran.returncode != 0 and ran.stdout == ""
    message = "num_workers=4, but the job has 3 ranks: one learner and 2 workers"
    assert message in ran.stderr and "start 5 ranks, or leave num_workers out" in ran.stderr


def test_a_second_cluster_is_refused_or_kept_in_this_process(mpiexec: Callable[..., Any]) -> None:
    ran = mpiexec(
        3,
        """
        from mpi4py import MPI
        import clusterenv_hpc as ce
        with ce.ClusterEnv("CartPole-v1", num_envs=2) as envs:
            envs.reset(seed=0)
            with ce.ClusterEnv("CartPole-v1", num_envs=3, comm=MPI.COMM_SELF) as here:
                print(here.transport, here.reset(seed=0)[0].shape)
            ce.ClusterEnv("CartPole-v1", num_envs=2)
        """,
    )
    assert ran.stdout == "local (3, 4)\n" and ran.returncode != 0
    (message,) = (line for line in ran.stderr.splitlines() if "clusterenv-hpc" in line)
    assert "a second ClusterEnv" in message and "exit_workers=False" in message and "COMM_SELF" in message


def test_clusters_one_after_the_other(mpiexec: Callable[..., Any]) -> None:
    """And an error that nobody catches still ends all ranks, after any number of them."""
    ran = mpiexec(
        3,
        """
        import clusterenv_hpc as ce
        for size in (2, 5, 1):
            envs = ce.ClusterEnv("CartPole-v1", num_envs=size, exit_workers=False)
            if envs.is_learner:
                with envs:
                    print(envs.reset(seed=0)[0].shape, flush=True)
        with ce.ClusterEnv("CartPole-v1", num_envs=2) as envs:
            raise KeyError("on purpose")
        """,
    )
    assert ran.stdout.splitlines() == ["(2, 4)", "(5, 4)", "(1, 4)"] and ran.returncode != 0
    assert ran.stderr.count("clusterenv-hpc:") == 1 and "KeyError: 'on purpose'" in ran.stderr
