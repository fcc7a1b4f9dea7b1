"""What a run writes down about itself: metrics.jsonl, TensorBoard events, summary.json and log.txt.

All of it is continuous over resumes: what was written after the checkpoint that a run goes on from is cut off, so that
no step is counted twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from clusterenv_hpc.files import write_atomically
from clusterenv_hpc.run.events import EventFile


def finite(value: Any) -> Any:
    """``value`` as strict JSON can say it: numbers that are not finite become null, NumPy's become Python's."""
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item"):
        return finite(value.item())
    return float(value) if math.isfinite(value) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, oldest first; a last line that a crash cut short is left out."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("update"), int):
            records.append(record)
    return records


def cut_metrics(path: Path, update: int) -> None:
    """Removes from a metrics.jsonl what came after ``update``, and a line that was cut short."""
    if path.exists():
        kept = [record for record in read_metrics(path) if record["update"] <= update]
        write_atomically(path, "".join(_line(record) for record in kept).encode())


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """A JSON file, moved into place whole."""
    write_atomically(path, (json.dumps(finite(tree), indent=2, allow_nan=False) + "\n").encode())


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite(record), allow_nan=False) + "\n"


class RecordError(RuntimeError):
    """A run's records cannot be written; the message says which file and why."""


class MetricsWriter:
    """Appends one record for each update to metrics.jsonl and, where asked, to TensorBoard.

    Args:
        directory: the run's.
        update, env_steps: where the run stands; what is there of later updates is removed.
        tensorboard: whether to write events as well, over env_steps.
    """

    def __init__(self, directory: Path, update: int, env_steps: int, *, tensorboard: bool) -> None:
        self._path = path = directory / "metrics.jsonl"
        cut_metrics(path, update)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        self._events = EventFile(directory, purge_step=env_steps + 1) if tensorboard else None

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds ``record``, which has ``update`` and ``env_steps``; on disk, as far as a crash of this process goes."""
        path = self._path
        try:
            self._file.write(_line(record))
            self._file.flush()
            if self._events is not None:
                path = self._events.path
                numbers = {
                    name: value
                    for name, value in finite(record).items()
                    if isinstance(value, int | float) and name not in ("update", "env_steps")
                }
                self._events.write(numbers, record["env_steps"])
        except OSError as error:
            raise RecordError(
                f"{path}: cannot be written: {error.strerror or error}; the checkpoints are as they were. Make room, "
                "and go on with resume=true"
            ) from error

    def flush(self) -> None:
        """Everything onto the disk: a checkpoint that is saved next is never ahead of its metrics."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more records."""
        with contextlib.suppress(OSError):  # what could not be written was told when it was
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RunLog:
    """log.txt: what was said, each line with its time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> None:
        """Appends ``text``; opened anew each time, so that nothing is lost and nothing is held open."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(f"{stamp} {line}\n" for line in text.splitlines())
