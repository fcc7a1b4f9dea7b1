"""Files that are whole or not there: written aside, synced, moved into place.  Imports nothing of this package."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Writes ``path`` aside, syncs it and moves it into place: a reader, or a crash, meets the old file or the new one.

    Two processes that write the same file at once each write a whole one, and the later stays.  Raises OSError; what
    stood at ``path`` is then still there.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the name itself is not on the disk before this
    finally:
        os.close(directory)
