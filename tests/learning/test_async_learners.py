"""The asynchronous learners learn, from the stored recipes cut short, with stale policies (APS) and two workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterenv_hpc import cli

PLAIN = ["workers=0", "logical_workers=2", "seed=1", "eval.episodes=20", "log.progress=none", "log.tensorboard=false"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)


def learn(env: str, algo: str, total_steps: int) -> dict[str, Any]:
    """The run's summary: greedy returns, and the share of weight messages that were not sent."""
    words = [f"env={env}", f"algo={algo}", f"total_steps={total_steps}", "run_dir=run", *PLAIN]
    assert cli.main(["train", *words]) == 0
    told: dict[str, Any] = json.loads(Path("run/summary.json").read_text())
    return told


def test_vtrace_learns_cartpole() -> None:
    """20 at the start, 500 at most."""
    told = learn("cartpole", "vtrace", 150_000)
    assert told["eval_return_mean"] > 120
    assert told["weights_saved"] > 0.9 and told["lag_mean"] > 5


def test_dqn_learns_cartpole() -> None:
    """10 at the start: a greedy policy that knows nothing falls at once."""
    told = learn("cartpole", "dqn", 20_000)
    assert told["eval_return_mean"] > 80
    assert told["weights_saved"] > 0.9 and told["lag_mean"] > 5


def test_sac_learns_pendulum() -> None:
    """-1200 or worse at the start; upright in most episodes is -400."""
    told = learn("pendulum", "sac", 10_000)
    assert told["eval_return_mean"] > -700
