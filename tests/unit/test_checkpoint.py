"""Checkpoints: what goes in comes out, damage is found, and a failed save costs nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from clusterenv_hpc import files
from clusterenv_hpc.run.checkpoint import CheckpointError, CheckpointStore, read


def state(value: float = 1.0) -> dict:
    return {
        "policy": {"weight": torch.full((64, 64), float(value)), "bias": torch.arange(3)},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]},
        "rng": 2**127 + 5,
        "name": "x",
        "none": None,
        "done": True,
    }


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.load_latest() is None
    path = store.save(state(), 12)
    loaded = store.load_latest()
    assert loaded is not None and loaded.path == path and loaded.damaged == () and same(state(), loaded.state)
    assert same(torch.load(path, weights_only=True), state())  # an ordinary file that needs no code of ours


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for update in (1, 2, 30, 100, 1000):
        store.save(state(update), update)
    assert [path.name for path in store.paths()] == [f"update-{u:09d}.pt" for u in (30, 100, 1000)]
    loaded = store.load_latest()
    assert loaded is not None and loaded.state["policy"]["weight"][0, 0] == 1000
    assert sorted(os.listdir(tmp_path)) == [path.name for path in store.paths()]


@pytest.mark.parametrize("damage", ["truncated", "empty", "one bit", "text", "another pickle"])
def test_a_damaged_newest_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    good, bad = store.save(state(1), 1), store.save(state(2), 2)
    data = bytearray(bad.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "empty":
        data = bytearray()
    elif damage == "one bit":
        weights = data.index(torch.full((64, 64), 2.0).numpy().tobytes())  # within the tensor's own bytes
        data[weights + 100] ^= 1
    elif damage == "text":
        data = bytearray(b"not a checkpoint")
    else:
        torch.save(torch.nn.Linear(2, 2), bad)  # code, which is not to be run
        data = bytearray(bad.read_bytes())
    bad.write_bytes(data)
    loaded = store.load_latest()
    assert loaded is not None and loaded.path == good and loaded.state["policy"]["weight"][0, 0] == 1
    assert len(loaded.damaged) == 1 and str(bad) in loaded.damaged[0] and "\n" not in loaded.damaged[0]


def test_all_damaged_is_an_error_that_names_them(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for update in (1, 2):
        store.save(state(), update).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"every checkpoint .*update-000000002.*update-000000001"):
        store.load_latest()


def test_files_half_written_by_a_dead_process_are_no_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(1), 1)
    whole = store.paths()[0].read_bytes()
    half = tmp_path / ".update-000000009.pt.12345.part"
    half.write_bytes(whole)
    (tmp_path / "update-000000009.pt.old").write_bytes(whole)
    loaded = store.load_latest()
    assert loaded is not None and loaded.path.name == "update-000000001.pt"
    store.save(state(2), 2)
    assert not half.exists(), "the run's next checkpoint makes room"


@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
def test_a_full_disk_at_any_step_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(state(1), 1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*args: object, **kwargs: object) -> object:
        raise full

    if step in {"fsync", "replace"}:
        monkeypatch.setattr(files.os, step, fail)
    else:
        real = open

        def opening(path: object, mode: str = "r") -> object:
            if step == "open":
                raise full
            file = real(path, mode)  # type: ignore[call-overload]
            return type("Full", (), {"__enter__": lambda s: s, "__exit__": lambda s, *a: file.close(), "write": fail})()

        monkeypatch.setattr(files, "open", opening, raising=False)
    with pytest.raises(CheckpointError, match=r"update-000000002\.pt.*No space left.*update-000000001\.pt"):
        store.save(state(2), 2)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["update-000000001.pt"]
    loaded = store.load_latest()
    assert loaded is not None and loaded.state["policy"]["weight"][0, 0] == 1
    store.save(state(3), 3)
    assert os.listdir(tmp_path) == ["update-000000003.pt"]


def test_a_folder_that_cannot_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint: .*no earlier one"):
        CheckpointStore(tmp_path / "checkpoints", keep=1).save(state(), 1)


@pytest.mark.parametrize("thing", [object(), {1, 2}, b"bytes", torch.nn.Linear(1, 1), 1j])
def test_only_plain_things_are_saved(tmp_path: Path, thing: object) -> None:
    with pytest.raises(TypeError, match=rf"state\.a\[1\].*{type(thing).__name__}"):
        CheckpointStore(tmp_path, keep=1).save({"a": [1, thing]}, 1)
    assert os.listdir(tmp_path) == []


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read(tmp_path / "update-000000001.pt")


def test_keep_must_leave_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        CheckpointStore(tmp_path, keep=0)
