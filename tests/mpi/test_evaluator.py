"""A rank set aside for evaluation: it evaluates the newest weights all the time, and training does not notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterenv_hpc.run.config import ConfigError, compose

TESTS = Path(__file__).parents[1]
SMALL = (
    "env=catch policy.hidden=[16] envs_per_worker=4 algo.num_steps=16 algo.minibatch_size=64 algo.epochs=1 threads=1 "
    "eval.episodes=8 log.progress=none log.tensorboard=false checkpoint.every_s=1000 timeout=60"
)
RANKS = ["-m", "clusterenv_hpc.cli", "train", *SMALL.split()]


def told(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads((run / "summary.json").read_text()), [json.loads(line) for line in lines]


def test_it_evaluates_while_the_learner_learns(mpiexec: Callable[..., Any], tmp_path: Path) -> None:
    words = ["total_steps=4000"]
    mpiexec(4, RANKS, *words, "eval_workers=1", "run_dir=aside").check()
    mpiexec(3, RANKS, *words, "run_dir=alone").check()
    summary, records = told(tmp_path / "aside")
    _, alone = told(tmp_path / "alone")
    evaluated = [record for record in records if "eval_return_mean" in record]
    assert summary["workers"] == 2 and len(summary["hosts"]) == 3 and summary["exit_reason"] == "completed"
    assert summary["evaluations"] == len(evaluated) >= 2
    assert summary["evaluation_weight_bytes"] >= 4 * 100 * 16 * summary["evaluations"]  # the first layer alone
    for record in evaluated:
        assert record["eval_episodes"] == 8 and -1.0 <= record["eval_return_mean"] <= 1.0
        assert record["eval_env_steps"] <= record["env_steps"] and record["eval_version"] <= record["version"]
    versions = [record["eval_version"] for record in evaluated]
    assert versions == sorted(set(versions)), "each version once, the newest at the time"
    same = ("update", "env_steps", "return_mean", "episodes", "weight_messages", "lag_mean")
    for one, other in zip(records, alone, strict=True):
        assert [one[name] for name in same] == [other[name] for name in same], "to the bit what it is without"


def test_a_run_ends_when_the_evaluator_sees_it_solved(tmp_path: Path) -> None:
    """Started plainly: one learner, one worker, one evaluator."""
    command = [sys.executable, "-m", "clusterenv_hpc.cli", "train", *SMALL.split(), "workers=1", "eval_workers=1"]
    ran = subprocess.run(
        [*command, "stop.at_return=-1", "total_steps=1e7", "run_dir=run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    summary, records = told(tmp_path / "run")
    assert summary["exit_reason"] == "solved" and summary["eval_episodes"] == 8
    assert sum("eval_return_mean" in record for record in records) == summary["evaluations"] >= 1


FAILS = """
import gymnasium as gym
import toy_envs as toy

class Judged(toy.Walk):
    def __init__(self, judge=False, **kwargs):
        super().__init__(**kwargs)
        self.judge = judge
    def step(self, action):
        if self.judge == "fail":
            raise ValueError("the judge is ill")
        if self.judge == "slow":
            import time; time.sleep(0.2)
        return super().step(action)
"""
JUDGED = ["env.id=judged:Judged", "env=custom", "env.kwargs={mean_length: 5}"]


@pytest.fixture
def judged(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "judged.py").write_text(FAILS)
    return {"PYTHONPATH": f"{tmp_path}:{TESTS}"}


def test_its_failure_ends_the_run_and_is_named(mpiexec: Callable[..., Any], judged: dict[str, str]) -> None:
    words = [*JUDGED, "env.eval_kwargs={judge: fail}", "eval_workers=1", "total_steps=1e7", "run_dir=run"]
    ran = mpiexec(4, RANKS, *words, env=judged)
    assert ran.returncode != 0 and ran.seconds < 40
    assert "rank 3 (evaluator, " in ran.stderr and "failed: ValueError: the judge is ill" in ran.stderr


def test_a_stop_does_not_wait_for_its_episodes(judged: dict[str, str], tmp_path: Path) -> None:
    words = [*SMALL.split(), *JUDGED, "env.eval_kwargs={judge: slow, mean_length: 1000}", "eval_workers=1", "workers=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterenv_hpc.cli", "train", *words, "total_steps=1e7", "run_dir=run"],
        cwd=tmp_path, env={**os.environ, **judged}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 80
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 143, said
    assert told(tmp_path / "run")[0]["exit_reason"] == "SIGTERM" and "did not leave" not in said


def test_numbers_that_do_not_fit(mpiexec: Callable[..., Any]) -> None:
    for words, part in (
        (["workers=0", "eval_workers=1"], "eval_workers=1: needs a rank of its own; allowed: workers >= 1"),
        (["eval_workers=1", "eval.episodes=0"], "eval.episodes=0 leaves it nothing to do"),
        (["eval_workers=2"], "eval_workers=2: allowed: an integer >= 0 and <= 1"),
    ):
        with pytest.raises(ConfigError) as caught:
            compose(words)
        assert part in str(caught.value)
    ran = mpiexec(2, RANKS, "eval_workers=1", "total_steps=100")
    assert ran.returncode == 2 and "the launcher has started 2 ranks; allowed: at least 3 ranks" in ran.stderr
    ran = mpiexec(3, RANKS, "eval_workers=1", "workers=2", "total_steps=100")
    assert ran.returncode == 2
    assert "one learner, one evaluator and 1 workers; allowed: workers=1, or leave it out, or start 4" in ran.stderr
