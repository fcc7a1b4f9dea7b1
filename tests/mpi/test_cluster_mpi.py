"""``ClusterEnv`` on real MPI ranks: equal to ``SyncVectorEnv``, and to itself in one process."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
OPENMPI = pytest.mark.needs("openmpi")
WORLDS = [
    (2, "mpich"),
    (3, "mpich"),
    (4, "mpich"),
    pytest.param(2, "openmpi", marks=OPENMPI),
    pytest.param(4, "openmpi", marks=OPENMPI),
]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("ranks", "mpi"), WORLDS)
def test_equal_to_sync_vector_env(mpiexec: Callable[..., Any], ranks: int, mpi: str) -> None:
    ran = mpiexec(ranks, HERE / "run_equality.py", mpi=mpi, timeout=100).check()
    equal = [line for line in ran.stdout.splitlines() if line.startswith("equal: ")]
    assert len(equal) == len(load("run_equality").CASES) + 1
    assert "clusterenv-hpc" not in ran.stderr


@pytest.mark.parametrize(("ranks", "mpi"), [(3, "mpich"), pytest.param(4, "openmpi", marks=OPENMPI)])
def test_rollouts_equal_those_of_one_process(mpiexec: Callable[..., Any], ranks: int, mpi: str) -> None:
    """Every bit of every rollout, and every number of the sync rules, for the same number of workers."""
    ran = mpiexec(ranks, HERE / "run_rollouts.py", mpi=mpi, timeout=100).check()
    over_mpi = dict(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("["))
    module = load("run_rollouts")
    assert set(over_mpi) == set(module.CASES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in module.CASES:
            assert json.loads(json.dumps(module.record(name, ranks - 1))) == over_mpi[name], name
    finally:
        torch.set_num_threads(threads)
