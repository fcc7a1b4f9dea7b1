"""The benchmarks run for real, briefly; whether their bounds hold is for `make bench`, which can fail."""

from __future__ import annotations

import json

import pytest

from clusterenv_hpc.bench.command import BenchError, main, missed_bounds, parse
from clusterenv_hpc.cli import main as cli


@pytest.mark.parametrize("words", [["workers=0"], ["env"], ["speed=3"], ["seconds=fast"], ["check=1"]])
def test_bad_options_name_the_word(words: list[str]) -> None:
    with pytest.raises(BenchError, match=words[0].split("=")[0]):
        parse(words)


def test_bad_requests_end_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "speed"]) == 2
    assert cli(["bench", "rollout", "env=cartpol"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "speed" in lines[0] and "cartpole" in lines[1]


def test_bounds_can_fail() -> None:
    assert not missed_bounds("rollout", {"ratio_to_limit": 0.96})
    assert missed_bounds("rollout", {"ratio_to_limit": 0.94}) == ["ratio_to_limit is 0.940, expected at least 0.95"]
    poor = {"latency_ratio": 1.6, "bandwidth_ratio": 0.7, "rollout_bandwidth_ratio": 0.7}
    assert len(missed_bounds("transport", poor)) == 3


@pytest.mark.parametrize("kind", ["rollout", "learner"])
def test_rollout_and_learner_report(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([kind, "env=cartpole", "seconds=0.2", "repeats=2", "num_steps=32"]) == 0
    result = json.loads(capfd.readouterr().out)
    row = result["results"]["cartpole"]
    if kind == "rollout":
        assert 0 < result["ratio_to_limit"] < 2
        assert row["ratio_to_limit"] == pytest.approx(sum(r["ratio_to_limit"] for r in row["rounds"]) / 2)
        assert row["backend"] == "vector" and row["envs_per_worker"] == 64 and row["workers"] == 2
    else:
        assert row["workers_served"] == pytest.approx(1e6 / row["us_per_message"] / row["worker_messages_per_s"])
        assert row["message_bytes"] > 32 * 64 * (4 * 4 + 8 + 8 + 8)
    assert {"commit", "machine", "versions", "command"} <= result.keys()


def test_transport_reports_ratios(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["transport", "repeats=1"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["latency_ratio"] == max(row["latency_ratio"] for row in result["results"].values())
    assert result["bandwidth_ratio"] == min(row["bandwidth_ratio"] for row in result["results"].values())
    rollouts = [row["rollout_bandwidth_ratio"] for size, row in result["results"].items() if int(size) >= 65536]
    assert result["rollout_bandwidth_ratio"] == min(rollouts) and len(rollouts) == 4
