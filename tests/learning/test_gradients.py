"""Rennala and Malenia reach what synchronous NIGT reaches with as many gradients, from the stored configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clusterenv_hpc import cli

PLAIN = ["workers=0", "logical_workers=3", "eval.episodes=0", "log.progress=none", "log.tensorboard=false"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)


def learn(env: str, algo: str, total_steps: int) -> tuple[float, float]:
    """Mean return of the first update's episodes, and of the last ones."""
    words = [f"env={env}", f"algo={algo}", f"total_steps={total_steps}", "log.window=60", f"run_dir={algo}", *PLAIN]
    assert cli.main(["train", *words]) == 0
    told = json.loads(Path(algo, "summary.json").read_text())
    assert told["env_steps"] < 1.15 * total_steps
    first = json.loads(Path(algo, "metrics.jsonl").read_text().splitlines()[0])
    return first["return_mean"], told["return_mean"]


def test_cartpole() -> None:
    """Returns are cut at H = 200; a first policy stands for some 20 steps."""
    begun, reached = learn("cartpole", "sync_nigt", 90_000)
    assert begun < 40 and reached > 150, f"sync_nigt: {begun:.0f} to {reached:.0f}"
    for algo in ("rennala_nigt", "malenia_nigt"):
        begun, found = learn("cartpole", algo, 90_000)
        assert begun < 40 and found > 0.8 * reached, f"{algo}: {begun:.0f} to {found:.0f}, sync_nigt {reached:.0f}"


@pytest.mark.needs("mujoco")
def test_reacher() -> None:
    """Returns are negative: -50 at the start, -10 once learned."""
    begun, reached = learn("reacher", "sync_nigt", 60_000)
    assert begun < -40 and reached > -30, f"sync_nigt: {begun:.1f} to {reached:.1f}"
    for algo in ("rennala_nigt", "malenia_nigt"):
        begun, found = learn("reacher", algo, 60_000)
        assert begun < -40 and found > 1.3 * reached, f"{algo}: {begun:.1f} to {found:.1f}, sync_nigt {reached:.1f}"
