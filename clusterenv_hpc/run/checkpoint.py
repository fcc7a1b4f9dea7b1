"""Checkpoints that survive a crash at any moment, and are known when they did not.

A checkpoint is a file that ``torch.load(..., weights_only=True)`` reads: tensors, numbers, strings, and dicts, lists
and tuples of them; nothing that runs code.  It is written aside, synced and moved into place; the archive's own
checksums are compared before it is believed.
"""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clusterenv_hpc.files import write_atomically

State = dict[str, Any]
"""A nested dict of tensors, ints, floats, bools, strings, None, and lists and tuples of them."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and the cause."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's contents, the file they came from, and a line for each newer file that was damaged."""

    state: State
    path: Path
    damaged: tuple[str, ...] = field(default=())


class CheckpointStore:
    """The checkpoints of one run, named by their update; the newest ``keep`` stay.

    Args:
        directory: made at the first save.
        keep: how many checkpoints to leave, at least 1.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory, self.keep = Path(directory), keep

    def paths(self) -> list[Path]:
        """The files of complete checkpoints, oldest first."""
        return sorted(path for path in self.directory.glob("*.pt") if re.fullmatch(r"update-\d{9}\.pt", path.name))

    def save(self, state: State, update: int) -> Path:
        """Writes ``state`` as the checkpoint of ``update`` and removes the oldest beyond ``keep``.

        Raises:
            CheckpointError: the disk is full, the folder cannot be written, ...; older checkpoints are untouched.
            TypeError: ``state`` holds something that is not plain; the message says where.
        """
        _check_plain(state, "state")
        buffer = io.BytesIO()
        torch.save(state, buffer)
        path = self.directory / f"update-{update:09d}.pt"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for left in self.directory.glob(".update-*.part"):  # of a process that was killed while it wrote
                left.unlink(missing_ok=True)
            write_atomically(path, buffer.getvalue())
        except OSError as error:
            older = self.paths()
            kept = f"the last one is {older[-1]}" if older else "there is no earlier one"
            raise CheckpointError(f"{path}: cannot write the checkpoint: {error.strerror or error}; {kept}") from error
        for old in self.paths()[: -self.keep]:
            with contextlib.suppress(OSError):  # one too many is no reason to end a run
                old.unlink()
        return path

    def load_latest(self, accept: Callable[[State], object] = bool) -> Loaded | None:
        """The newest checkpoint that is whole; None where there are no checkpoints.

        Args:
            accept: takes over what it needs of a state.  One that it raises an exception on lacks something, or has
                it in another shape: that checkpoint counts as damaged, and ``accept`` gets the one before.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        damaged: list[str] = []
        for path in reversed(self.paths()):
            try:
                state = read(path)
                try:
                    accept(state)
                except Exception as error:
                    raise CheckpointError(f"{path}: damaged: {_misfit(error)}") from error
                return Loaded(state, path, tuple(damaged))
            except CheckpointError as error:
                damaged.append(str(error))
        if damaged:
            raise CheckpointError(f"every checkpoint in {self.directory} is damaged: {'; '.join(damaged)}")
        return None


def read(path: Path) -> State:
    """The state in one file.  Raises CheckpointError where it is not a whole checkpoint."""
    try:
        data = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if (broken := archive.testzip()) is not None:
                raise CheckpointError(f"{path}: damaged: the checksum of {broken} is wrong")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path}: damaged: truncated, or no checkpoint ({len(data)} bytes)") from error
    except Exception as error:  # whatever a reader makes of broken bytes
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"{path}: damaged: {reason}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: damaged: holds a {type(state).__name__}, expected a dict")
    return state


def _misfit(error: Exception) -> str:
    """What is wrong with a state that can be read but not be used."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        return f"{text} is missing"
    return f"it does not fit this run: {text[:300] or type(error).__name__}"


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str | int):
                raise TypeError(f"{where}: a checkpoint's keys are strings or ints, got {name!r}")
            _check_plain(item, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif not (value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor)):
        raise TypeError(f"{where}: a checkpoint holds tensors, numbers and strings, got {type(value).__name__}")
