"""metrics.jsonl, TensorBoard events, summaries and counters: valid, continuous over resumes, nothing counted twice."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterenv_hpc.rollout import Episodes, Rollout
from clusterenv_hpc.run.metrics import MetricsWriter, RecordError, RunLog, cut_metrics, finite, read_metrics, write_json
from clusterenv_hpc.run.source import trim
from clusterenv_hpc.run.tally import Tally
from clusterenv_hpc.stats import Stats


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def record(update: int, **more: Any) -> dict[str, Any]:
    return {"update": update, "env_steps": 100 * update, "return_mean": float(update), **more}


# -- files ---------------------------------------------------------------------------------------------------------


def test_numbers_that_are_none_become_null() -> None:
    tree = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": np.float32(2), "d": np.int64(3), "e": {"f": None}}
    tree |= {4: True}
    expected = {"a": None, "b": [None, None, 1.5], "c": 2.0, "d": 3, "e": {"f": None}, "4": True}
    assert finite(tree) == expected
    assert finite(np.bool_(True)) is True


def test_each_update_is_a_line_on_its_own_and_there_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0, 0, tensorboard=False)
    for update in (1, 2):
        writer.write(record(update, kl_mean=math.nan, grad=np.float32(0.5)))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [strict(line)["update"] for line in lines] == list(range(1, update + 1))
    writer.close()
    assert strict(lines[1]) == {"update": 2, "env_steps": 200, "return_mean": 2.0, "kl_mean": None, "grad": 0.5}


def test_what_came_after_the_checkpoint_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, 0, 0, tensorboard=False) as writer:
        for update in range(1, 8):
            writer.write(record(update))
    with open(path, "ab") as file:
        file.write(b'{"update": 8, "env_st')  # the process died here
    with MetricsWriter(tmp_path, 5, 500, tensorboard=False) as writer:
        writer.write(record(6, second=True))
    records = [strict(line) for line in path.read_text().splitlines()]
    assert [one["update"] for one in records] == [1, 2, 3, 4, 5, 6] and records[5]["second"]


def test_a_start_anew_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    MetricsWriter(tmp_path, 0, 0, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"update": 1}\n\xff\xfe\n[]\n{"other": 1}\n\n{"update": 2}\n{"upda')
    assert [one["update"] for one in read_metrics(path)] == [1, 2]
    cut_metrics(path, 1)
    assert path.read_bytes() == b'{"update": 1}\n'


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_is_continuous_over_a_resume(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 0, 0, tensorboard=True) as writer:
        for update in range(1, 7):
            writer.write(record(update))
    with MetricsWriter(tmp_path, 4, 400, tensorboard=True) as writer:
        for update in range(5, 9):
            writer.write(record(update, return_mean=-float(update)))
    expected = [(100 * u, float(u)) for u in range(1, 5)] + [(100 * u, -float(u)) for u in range(5, 9)]
    assert scalars(tmp_path, "return_mean") == expected


@pytest.mark.parametrize("full", ["_file", "_events"])
def test_a_full_disk_is_one_error_and_no_thread_speaks(
    tmp_path: Path, full: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/full takes nothing."""
    threads = threading.active_count()
    with MetricsWriter(tmp_path, 0, 0, tensorboard=True) as writer:
        assert threading.active_count() == threads
        if full == "_file":
            writer._file = open("/dev/full", "a")  # noqa: SIM115
        else:
            assert writer._events is not None
            writer._events._file = writer._events._records._writer = open("/dev/full", "wb")  # noqa: SIM115
        with pytest.raises(RecordError, match=r"cannot be written: No space left on device; the checkpoints"):
            writer.write(record(1))
    assert capsys.readouterr().err == ""


def test_a_summary_is_valid_json_and_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": math.nan})
    write_json(path, {"a": np.float64(1.0), "b": ["x"]})
    assert strict(path.read_text()) == {"a": 1.0, "b": ["x"]}
    assert [one.name for one in tmp_path.iterdir()] == ["summary.json"]


def test_the_log_has_times_and_is_appended_to(tmp_path: Path) -> None:
    RunLog(tmp_path / "log.txt").write("one\ntwo")
    RunLog(tmp_path / "log.txt").write("three")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["one", "two", "three"]
    assert all(line[:4].isdigit() for line in lines)


# -- counters ------------------------------------------------------------------------------------------------------


def rollout(valid: list[list[int]], versions: int = 0, version: int = 0, returns: list[float] | None = None) -> Rollout:
    mask = np.array(valid, bool)
    shape = mask.shape
    ended = np.array(returns or [], float)
    return Rollout(
        observations=np.arange(mask.size, dtype=np.float32).reshape(*shape, 1),
        next_observations=np.zeros((*shape, 1), np.float32),
        actions=np.zeros(shape, np.int64),
        behaviour_params=np.zeros((*shape, 2), np.float32),
        rewards=np.ones(shape),
        terminated=np.zeros(shape, bool),
        truncated=np.zeros(shape, bool),
        valid=mask,
        versions=np.full(shape, versions),
        rows=np.arange(shape[1]),
        ranks=np.ones(shape[1], np.int64),
        episodes=Episodes(ended, ended.astype(np.int64), np.zeros(len(ended), np.int64)),
        version=version,
    )


def test_a_tally_adds_up() -> None:
    stats, tally = Stats(), Tally(window=3, workers=2)
    stats.sent["weights"].add(100)
    stats.sent["weights"].add(100)
    stats.kl_sum, stats.kl_count = 0.2, 2
    first = tally.add(rollout([[1, 1], [1, 0]], returns=[1.0, 3.0]), stats, seconds=2.0)
    assert (first["update"], first["env_steps"], first["episodes"], first["steps_per_s"]) == (1, 3, 2, 1.5)
    assert (first["return_mean"], first["return_std"], first["kl_mean"]) == (2.0, 1.0, 0.1)
    assert (first["weight_messages"], first["weight_bytes"], first["weights_saved"]) == (2, 200, 0.0)
    stats.kl_sum, stats.kl_count = 0.6, 3
    second = tally.add(rollout([[1, 1], [1, 1]], versions=1, version=3, returns=[5.0, 7.0]), stats, seconds=2.0)
    assert (second["update"], second["env_steps"], second["episodes"]) == (2, 7, 4)
    assert second["return_mean"] == 5.0  # of the last three
    assert second["kl_mean"] == pytest.approx(0.4) and second["kl_readings"] == 1  # of this update's readings
    assert (second["lag_mean"], second["lag_max"]) == (2.0, 2)
    assert second["weights_saved"] == 0.5  # two messages where always sends four
    whole = tally.summary()
    assert whole["lag_mean"] == pytest.approx(8 / 7) and whole["lag_max"] == 2  # over steps that were any
    assert whole["kl_mean"] == pytest.approx(0.2) and whole["wall_s"] == 4.0 and whole["steps_per_s"] == 7 / 4


def test_steps_that_only_reset_count_for_nothing() -> None:
    stats, tally = Stats(), Tally(window=3, workers=1)
    only = rollout([[1, 0], [0, 0]], versions=0, version=5)
    only.versions[0, 1] = -100  # a lag of 105, on a step that was none
    told = tally.add(only, stats, seconds=1.0)
    assert (told["env_steps"], told["lag_mean"], told["lag_max"]) == (1, 5.0, 5)


def test_before_the_first_episode_there_is_no_return() -> None:
    told = Tally(window=3, workers=1).add(rollout([[1]]), Stats(), seconds=1.0)
    assert math.isnan(told["return_mean"]) and math.isnan(told["kl_mean"])
    assert finite(told)["return_mean"] is None


def test_counters_go_on_over_a_resume() -> None:
    def stats(messages: int) -> Stats:
        made = Stats()
        for _ in range(messages):
            made.sent["weights"].add(10)
        made.requests[1] = messages
        made.kl_sum, made.kl_count = 0.5 * messages, messages
        return made

    once = Tally(window=2, workers=2)
    for messages in (2, 3, 5):
        once.add(rollout([[1, 1]], version=1, returns=[float(messages)]), stats(messages), seconds=1.0)
    first = Tally(window=2, workers=2)
    for messages in (2, 3):
        first.add(rollout([[1, 1]], version=1, returns=[float(messages)]), stats(messages), seconds=1.0)
    saved = json.loads(json.dumps(first.state_dict()))
    second = Tally(window=2, workers=2)
    second.load_state_dict(saved)
    assert second.summary() == first.summary()
    second.add(rollout([[1, 1]], version=1, returns=[5.0]), stats(2), seconds=1.0)  # the wire counts from 0 again
    assert second.summary() == once.summary()
    assert set(Tally.WIRE) <= set(once.summary())


# -- the last update -----------------------------------------------------------------------------------------------


def test_the_last_rollout_is_cut_to_the_steps_that_are_left() -> None:
    whole = rollout([[1, 1, 1], [1, 0, 1], [1, 1, 1]])
    for steps, expected in (
        (1, [[1, 0, 0], [0, 0, 0], [0, 0, 0]]),
        (4, [[1, 1, 1], [1, 0, 0], [0, 0, 0]]),
        (5, [[1, 1, 1], [1, 0, 1], [0, 0, 0]]),
        (7, [[1, 1, 1], [1, 0, 1], [1, 1, 0]]),
    ):
        cut = trim(whole, steps)
        assert cut.valid.astype(int).tolist() == expected and cut.env_steps == steps
        assert cut.observations is whole.observations
    assert trim(whole, 8) is whole and trim(whole, 100) is whole
    assert whole.env_steps == 8


def test_what_is_cut_off_does_not_touch_the_gradient() -> None:
    import gymnasium
    import torch

    from clusterenv_hpc.run.build import build_learner, build_policy
    from clusterenv_hpc.run.config import compose

    config = compose(["env=custom", "env.id=CartPole-v1", "policy.hidden=[4]", "algo.minibatch_size=4"])
    box, two = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)
    weights = []
    for junk in (0.0, 1e3):
        data = rollout([[1, 1], [1, 1], [1, 1]])
        data.rewards[2], data.observations[2] = junk, junk
        policy = build_policy(config.policy, box, two, seed=1)
        learner = build_learner(config.algo, policy, two, torch.device("cpu"), seed=1)
        # What follows the third row is only looked at as the successor of the second.
        data = dataclasses.replace(data, next_observations=np.zeros_like(data.next_observations))
        learner.update(trim(data, 4), progress=0.5)
        weights.append(torch.cat([tensor.detach().reshape(-1) for tensor in policy.parameters()]))
    assert torch.equal(weights[0], weights[1])
