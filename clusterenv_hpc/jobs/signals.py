"""When a job must stop, and what becomes of it.

Slurm signals a job before its time limit and before it preempts it; a person cancels it.  A handler only sets a flag.
The learner looks at the flags between two updates, saves, sends the workers home, and then :meth:`JobSignals.leave`
puts the job back into the queue, where the next start finds its own run directory and goes on.

In a training script of your own::

    with JobSignals() as stop, ClusterEnv(...) as envs:
        while not done and not stop.look():
            ...
        save()
    sys.exit(stop.leave().exit_code)
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from clusterenv_hpc.jobs.environment import SlurmJob, read_slurm
from clusterenv_hpc.jobs.slurm import SlurmError, end_time, look, requeue

NOTICE = "CLUSTERENV_HPC_NOTICE"
"""Environment variable with the path of a file that a batch script leaves where a signal cannot be passed on."""

REQUEUE_OFF = 75
"""Exit code: stopped before the end, all saved, and not requeued, because that was not wanted or not possible."""

REQUEUE_FAILED = 76
"""Exit code: stopped before the end, all saved, but Slurm did not take the job back."""

REQUEUE_S = 60.0
"""Deadline of ``scontrol requeue``, in seconds."""

NOTICE_EVERY_S = 0.5
AGAIN_S = 60.0


class Wish(enum.Flag):
    """What the outside asks of the learner."""

    NONE = 0
    SAVE = enum.auto()
    EXIT = enum.auto()
    REQUEUE = enum.auto()


STOP = Wish.SAVE | Wish.EXIT | Wish.REQUEUE


@dataclass(frozen=True)
class Departure:
    """How a job that was stopped ends.  ``requeued``: it is back in the queue.  ``said``: one line on it."""

    exit_code: int
    requeued: bool
    said: str


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.touch()


class JobSignals:
    """The flags that signals, a notice or the clock have set.

    Args:
        name: the signal that Slurm sends before the time is up (``slurm.signal``), without SIG; SIGTERM counts always.
        lead_s: seconds between that signal and the time limit (``slurm.signal_lead_s``).
        requeue: whether the job may go back to the queue.
        environ: of this process if None.
        say: is given one line on everything that happens.

    Raises:
        SlurmEnvironmentError: SLURM_* cannot be read.
    """

    def __init__(
        self,
        name: str = "USR2",
        *,
        lead_s: float = 120.0,
        requeue: bool = True,
        environ: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self.job: SlurmJob | None = read_slurm(environ)
        self.names = tuple(dict.fromkeys((name, "TERM")))
        self.wish = Wish.NONE
        self.reason: str | None = None
        self.end_time: float | None = None
        self._lead_s, self._requeue, self._say = lead_s, requeue, say
        notice = environ.get(NOTICE)
        self._notice = Path(notice) if notice else None
        if self._notice is not None:
            atexit.register(_touch, Path(f"{notice}.over"))  # tells the script that the learner has ended
        self._notice_at = self._asked_at = 0.0
        self._before: dict[int, object] = {}
        self.ask_end_time()

    def note(self, reason: str, wish: Wish = STOP) -> None:
        """Sets flags; ``reason`` is the first one's, such as SIGUSR2.  Safe in a signal handler."""
        self.wish |= wish
        self.reason = self.reason or reason

    def __enter__(self) -> JobSignals:
        """Handles the signals from here on; they only set flags."""
        for name in self.names:
            number = signal.Signals[f"SIG{name}"]
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note(signal.Signals(number).name)

    def look(self, update_s: float = 0.0) -> Wish:
        """What is asked for now; call between two updates.

        Args:
            update_s: how long the next update may take.  One that could not end before Slurm's signal is not begun:
                the job stops with the reason ``time_limit``.
        """
        now = time.time()
        if self._notice is not None and now - self._notice_at >= NOTICE_EVERY_S:
            self._notice_at = now
            with contextlib.suppress(OSError):
                self.note(f"SIG{self._notice.read_text().strip() or self.names[0]}")
        if not self.wish and not self.fits(update_s):
            self.ask_end_time()  # the limit may have been raised meanwhile
            if not self.fits(update_s):
                self._say(f"{self.time_left or 0:.0f} s are left: no further update fits in before the time limit")
                self.note("time_limit")
        return self.wish

    @property
    def time_left(self) -> float | None:
        """Seconds until the time limit; None where there is none, or it is not known."""
        return None if self.end_time is None else max(0.0, self.end_time - time.time())

    def fits(self, update_s: float) -> bool:
        """Whether something that takes ``update_s`` seconds ends before Slurm's signal comes."""
        return self.end_time is None or time.time() + update_s <= self.end_time - self._lead_s

    def ask_end_time(self) -> None:
        """Asks Slurm when the time is up; at most once a minute."""
        if self.job is None or (self._asked_at and time.monotonic() - self._asked_at < AGAIN_S):
            return
        first, self._asked_at = not self._asked_at, time.monotonic()
        try:
            self.end_time = self.job.end_time if first and self.job.end_time else end_time(self.job.label)
        except SlurmError as error:
            self._say(f"warning: the time limit is not known: {error}")
        if first and self.end_time is not None:
            # A lead that eats up the whole limit would leave no time for a single update.
            self._lead_s = min(self._lead_s, max(0.0, self.end_time - time.time()) / 2)

    def leave(self) -> Departure:
        """Ends the job, once everything is saved and the workers are gone: back to the queue if that is wanted.

        Asks Slurm first: a job that is being cancelled would come back as well, and shall not.
        """
        departure = self._leave()
        self._say(departure.said)
        return departure

    def _leave(self) -> Departure:
        saved = f"stopped by {self.reason or 'nothing'}; all is saved"
        if self.job is None:
            return Departure(REQUEUE_OFF, False, saved)
        job = self.job.label
        if not self._requeue:
            return Departure(REQUEUE_OFF, False, f"{saved}; requeue is off, so job {job} ends")
        try:
            info = look(job)
            if info.state not in ("RUNNING", "SUSPENDED") and info.reason != "TimeLimit":
                again = (info.restarts or 0) > self.job.restart_count
                why = "requeued by Slurm" if again else f"being ended by Slurm ({info.state})"
                return Departure(REQUEUE_OFF, again, f"{saved}; job {job} is {why}")
            try:
                requeue(job, timeout_s=REQUEUE_S)
            except SlurmError:
                time.sleep(2.0)
                requeue(job, timeout_s=REQUEUE_S)
        except SlurmError as error:
            return Departure(REQUEUE_FAILED, False, f"{saved}; job {job} could not be requeued: {error}")
        return Departure(0, True, f"{saved}; job {job} is back in the queue")
