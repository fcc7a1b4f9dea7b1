"""External solvers beside real MPI ranks: they are in no world of ours, and end with their ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]

SCRIPT = """
import json, sys
import gymnasium as gym, numpy as np
import clusterenv_hpc as ce
from clusterenv_hpc.envs.solver import Solver, run_solver
python, fails = sys.argv[1:3], int(sys.argv[3])

class RodEnv(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gym.spaces.Discrete(2)
    def __init__(self):
        self.names = run_solver([*python, "environ"]).decode().split()
        self.solver, self.steps = Solver([*python, "rod", "4"], reply_s=30), 0
    def reset(self, *, seed=None, options=None):
        return np.array(self.solver.ask("reset").split(), float), {}
    def step(self, action):
        self.steps += 1
        line = "die 9" if self.steps == fails else f"step {action}"
        return np.array(self.solver.ask(line).split(), float), 0.0, False, False, {}
    def close(self):
        self.solver.close()

with ce.ClusterEnv(RodEnv, 4) as envs:
    envs.reset(seed=1)
    for step in range(5):
        observation, *_ = envs.step(np.ones(4, int))
    print(json.dumps([observation.tolist(), envs.get_attr("names")]))
"""


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.needs("openmpi"))])
def test_each_environment_has_one_of_its_own(mpi: str, mpiexec: Callable[..., Any]) -> None:
    ran = mpiexec(3, SCRIPT, sys.executable, str(TESTS / "solver.py"), "0", mpi=mpi).check()
    observation, names = json.loads(ran.stdout.splitlines()[-1])
    assert len(observation) == 4 and all(row == observation[0] for row in observation) and observation[0][0] == 1.0
    seen = {name for row in names for name in row}
    assert "PATH" in seen and not {
        name for name in seen if name.startswith(("PMI_", "PMIX_RANK", "OMPI_COMM", "SLURM_"))
    }


def test_a_dead_solver_ends_the_job_and_leaves_none(mpiexec: Callable[..., Any]) -> None:
    """That none is left is seen to by ``mpiexec``."""
    ran = mpiexec(3, SCRIPT, sys.executable, str(TESTS / "solver.py"), "3")
    assert ran.returncode != 0 and ran.seconds < 30
    assert "SolverError: the solver" in ran.stderr and "rod 4 ended before it had answered (exit code 9)" in ran.stderr
