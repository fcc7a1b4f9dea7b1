"""Signals that ask a run to stop.  A handler only sets a flag; the training loop looks at it between two updates."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 0, "SIGUSR2": 0}
"""What a run that was stopped by a signal ends with, once everything is saved."""

STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that always stop a run; the one that Slurm sends before the time is up (``slurm.signal``) joins them."""


class Interrupted(BaseException):
    """A signal that came when there was nothing to finish, or again: stop at once."""

    def __init__(self, name: str) -> None:
        super().__init__(f"stopped at once by {name}; the last checkpoint is what there is")
        self.name, self.exit_code = name, 128 + signal.Signals[name]


class StopSignals:
    """Which signal has asked the run to stop, if one has.

    Within :meth:`deferred` the first signal only sets :attr:`reason`, so that an update can be finished and saved; a
    second SIGINT, a second or more later, does not wait.  Outside of it a signal raises :class:`Interrupted` at once,
    but for ``save_signal``, which comes well before the end of the time and only ever sets the flag.
    """

    def __init__(self, save_signal: str = "USR2") -> None:
        self.names = dict.fromkeys((*STOPPING, f"SIG{save_signal}"))
        self._patient = {f"SIG{save_signal}"} - set(STOPPING)
        self.reason: str | None = None
        self._since = 0.0
        self._deferring = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        first, now = self.reason is None, time.monotonic()
        if first:
            self.reason, self._since = name, now
        # One press of Ctrl-C may arrive twice: from the terminal, and from the launcher that passes it on.
        at_once = not self._deferring and name not in self._patient
        if at_once or (name == "SIGINT" and now - self._since > 1.0):
            raise Interrupted(self.reason or name)

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopSignals]:
        """Handles the signals, SIGHUP not where nohup has it ignored; afterwards they do what they did before."""
        before = {
            signal.Signals[name]: signal.signal(signal.Signals[name], self._handle)
            for name in self.names
            if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        }
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A signal waits until whoever is within has looked at :attr:`reason`."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False


def ignore_stop_signals(save_signal: str = "USR2") -> None:
    """For a worker: signals reach every rank, but it is the learner that decides, saves and sends the workers home."""
    for name in (*STOPPING, f"SIG{save_signal}"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
