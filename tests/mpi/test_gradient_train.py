"""The gradient methods of ``clusterenv-hpc train`` on ranks of MPI: both transports, resume, and bits that stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterenv_hpc.run.checkpoint import CheckpointStore, read

TESTS = Path(__file__).parents[1]
SMALL = [
    "env.id=gradient_ranks:Walk", "envs_per_worker=2", "algo.horizon=5", "algo.M=8", "policy.hidden=[8]",
    "eval.episodes=2", "eval.max_steps=5", "log.progress=none", "log.tensorboard=false", "timeout=30",
]  # fmt: skip
RANKS = ["-m", "clusterenv_hpc.cli", "train", *SMALL]


@pytest.fixture
def train(mpiexec: Any, tmp_path: Path) -> Any:
    """``train(word, ...)``: a run on three ranks, and its directory."""

    def start(*words: str, run: str = "run") -> Path:
        mpiexec(3, RANKS, *words, f"run_dir={run}", env={"PYTHONPATH": str(TESTS)}).check()
        return tmp_path / run

    return start


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def theta(run: Path) -> Any:
    state = read(CheckpointStore(run / "checkpoints", 1).paths()[-1])
    return state["learner"]["optimizer"]["theta"].numpy()


def test_both_transports_train_alike(train: Any) -> None:
    runs = [
        train("algo=sync_nigt", "total_steps=300", f"gradients.transport={by}", run=by) for by in ("p2p", "allreduce")
    ]
    np.testing.assert_allclose(theta(runs[0]), theta(runs[1]), rtol=1e-5, atol=1e-6)
    told = [summary(run) for run in runs]
    assert told[0]["workers"] == told[1]["workers"] == 2 and len(told[0]["hosts"]) == 3
    assert told[0]["updates"] == told[1]["updates"] and told[0]["gradients_used"] == told[1]["gradients_used"]
    assert told[0]["gradient_messages"] > told[1]["gradient_messages"] == told[1]["updates"]
    assert all(one["exit_reason"] == "completed" and one["eval_episodes"] == 2 for one in told)


@pytest.mark.parametrize("transport", ["p2p", "allreduce"])
def test_rennala_trains_and_goes_on(train: Any, transport: str) -> None:
    words = ("algo=rennala_nigt", f"gradients.transport={transport}")
    first = summary(train(*words, "total_steps=200"))
    again = summary(train(*words, "resume=true", "total_steps=400"))
    assert again["resumed_from"] == f"update-{first['updates']:09d}.pt"
    assert again["updates"] > first["updates"] and again["env_steps"] >= 400
    assert again["gradients_used"] > first["gradients_used"] and sum(again["shares"]) == pytest.approx(1.0)


def test_a_resumed_synchronous_run_is_bit_equal(train: Any) -> None:
    whole = train("algo=sync_nigt", "total_steps=400", run="whole")
    train("algo=sync_nigt", "total_steps=200", run="part")
    resumed = train("algo=sync_nigt", "total_steps=400", "resume=true", run="part")
    np.testing.assert_array_equal(theta(whole), theta(resumed))
    assert summary(whole)["updates"] == summary(resumed)["updates"]
