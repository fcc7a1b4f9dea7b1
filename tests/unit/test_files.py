"""Files are whole, or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterenv_hpc.files import write_atomically


def test_a_file_is_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    seen = []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        seen.append((path.read_bytes(), Path(source).read_bytes()))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    write_atomically(path, b"new, and longer")
    assert seen == [(b"old", b"new, and longer")]
    assert path.read_bytes() == b"new, and longer" and os.listdir(tmp_path) == ["file"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
