"""TensorBoard's event files, written by the one who has something to say rather than by a thread.

``SummaryWriter`` writes from a thread of its own, which on a full disk ends in a traceback that nobody asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO


class EventFile:
    """One event file in ``directory``; TensorBoard leaves out what earlier files hold from ``purge_step`` on.

    Raises:
        OSError: here and from ``write``: the file cannot be written.
    """

    def __init__(self, directory: Path, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # slow to import
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self.path, self._file = _new_file(directory)
        self._records = RecordWriter(self._file)
        began = SessionLog(status=SessionLog.START)
        for event in (
            Event(wall_time=time.time(), step=purge_step, file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=purge_step, session_log=began),
        ):
            self._records.write(event.SerializeToString())
        self._file.flush()

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds all of ``scalars`` at ``step``."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """No more scalars."""
        with contextlib.suppress(OSError):  # what could not be written was told when it was
            self._file.close()


def _new_file(directory: Path) -> tuple[Path, BinaryIO]:
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    for number in itertools.count():  # a process may go on with a run within the second
        path = directory / f"{name}.{number}"
        with contextlib.suppress(FileExistsError):
            return path, open(path, "xb")
    raise AssertionError
