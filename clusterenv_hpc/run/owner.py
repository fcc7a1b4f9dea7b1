"""Which process works on a run: ``owner.json`` in its directory, so that no two write into one run.

Made without locks, which shared filesystems do not always keep.  A process on the same machine is looked up; one
elsewhere counts as alive while it renews its record, or while Slurm says that its job runs.  A job that Slurm has
requeued takes over at once: nothing that a dead node left behind keeps a run from going on.  Where two begin at the
same moment the later record counts, and whoever finds another's in place of its own stops before it writes again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from clusterenv_hpc.jobs.environment import SlurmEnvironmentError, read_slurm
from clusterenv_hpc.jobs.slurm import SlurmError, look
from clusterenv_hpc.run.config import ConfigError

FILE = "owner.json"

RENEW_S = 20.0
"""Seconds between two renewals of a record."""

STALE_S = 180.0
"""Seconds after which a record that is not renewed counts for nothing: many renewals; NFS may tell late."""


class TakenOverError(RuntimeError):
    """Another process has taken the run from this one, which must not write into it any more."""


@dataclass(frozen=True)
class Owner:
    """A process that works on a run.

    machine: what the process number counts in: this boot of the host, and the container.  began: when the process did,
    in the kernel's ticks, since numbers are used again.  job: as Slurm's commands take it.  since: for people.
    """

    host: str
    machine: str
    pid: int
    began: int
    job: str | None
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}{f', job {self.job},' if self.job else ''} (since {self.since})"

    def same_process(self, other: Owner | None) -> bool:
        """Whether ``other`` is this very process."""
        return other is not None and (self.machine, self.pid, self.began) == (other.machine, other.pid, other.began)


def this_process() -> Owner:
    """This process as an owner."""
    try:
        job = read_slurm()
    except SlurmEnvironmentError:
        job = None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    now = time.strftime("%Y-%m-%d %H:%M:%S%z")
    label = job.label if job is not None else None
    return Owner(socket.gethostname(), machine, os.getpid(), _began(os.getpid()) or 0, label, now)


def _began(pid: int) -> int | None:
    """When a live process of this machine began; None where there is none such."""
    try:
        fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def read(directory: Path) -> Owner | None:
    """Who is written down as the owner; None where nobody is, or the record cannot be read."""
    try:
        told: Any = json.loads((directory / FILE).read_text())
        owner = Owner(**told)
    except (OSError, ValueError, TypeError):
        return None
    kinds = (str, str, int, int, str | None, str)
    fits = all(isinstance(value, kind) for value, kind in zip(told.values(), kinds, strict=True))
    return owner if fits else None


def forget_the_dead(directory: Path) -> None:
    """Removes the record of a process of this machine that is no more."""
    owner = read(directory)
    if owner is not None and owner.machine == this_process().machine and _began(owner.pid) != owner.began:
        with contextlib.suppress(OSError):
            (directory / FILE).unlink(missing_ok=True)


def why_alive(owner: Owner, here: Owner, age_s: float) -> str | None:
    """Why ``owner``'s run is not to be had, as what to do about it; None if ``owner`` is dead or gives way.

    Args:
        here: who wants the run.
        age_s: since the record was renewed.
    """
    if owner.machine == here.machine:
        alive = _began(owner.pid) == owner.began and not owner.same_process(here)
        return "wait until it has ended, or end it" if alive else None
    if owner.job is not None:
        if owner.job == here.job:  # requeued, or started again within its allocation
            return None
        with contextlib.suppress(SlurmError):
            if not (info := look(owner.job)).active and info.state != "UNKNOWN":
                return None
    if age_s < STALE_S:
        return f"wait until it has ended; if it was killed, try again in {STALE_S - age_s:.0f} s"
    return None


class Ownership:
    """This process's hold on a run's directory, renewed by a thread until it is released.

    ``before`` is the owner that was found dead, if one was.
    """

    def __init__(self, directory: Path) -> None:
        """Takes the run.

        Raises:
            ConfigError: another live process has it, or the directory cannot be written to.
        """
        self._path, self._directory = directory / FILE, directory
        self._here = this_process()
        self._over = threading.Event()
        self._aside = directory / f".{FILE}.{self._here.host}.{self._here.pid}"
        self._looked = time.monotonic()
        self.before = self._take()
        self._thread = threading.Thread(target=self._renew, name="owner", daemon=True)
        self._thread.start()

    def _take(self) -> Owner | None:
        before = read(self._directory)
        try:
            with open(self._aside, "w", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(self._here), indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if before is not None:
                with contextlib.suppress(FileNotFoundError):  # both times are of the filesystem's own clock
                    age_s = self._aside.stat().st_mtime - self._path.stat().st_mtime
                    if (told := why_alive(before, self._here, age_s)) is not None:
                        busy = f"run_dir={self._directory}: {before} works on this run"
                        raise ConfigError(f"{busy}; allowed: another run_dir, or {told}")
            os.replace(self._aside, self._path)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"run_dir={self._directory}: {FILE} cannot be written: {why}") from error
        finally:
            with contextlib.suppress(OSError):
                self._aside.unlink(missing_ok=True)
        return None if self._here.same_process(before) else before

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            with contextlib.suppress(OSError):
                if self._here.same_process(read(self._directory)):
                    os.utime(self._path)

    def demand(self, every_s: float = 0.0) -> None:
        """Raises TakenOverError where another process has taken the run; looks at most every ``every_s`` seconds."""
        if time.monotonic() - self._looked < every_s:
            return
        self._looked = time.monotonic()
        owner = read(self._directory)
        if owner is not None and not self._here.same_process(owner):
            raise TakenOverError(
                f"run_dir={self._directory}: {owner} has taken this run over; this process stops, and leaves it as is"
            )

    def release(self) -> None:
        """Gives the run back, if it is still this process's."""
        self._over.set()
        with contextlib.suppress(OSError):
            if self._here.same_process(read(self._directory)):
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> Ownership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
