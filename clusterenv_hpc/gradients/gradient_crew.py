"""All gradient workers, as the learner speaks to them: meeting, hearing, waiting under a deadline, sending home.

Workers are numbered 0 .. n - 1 here; worker w is rank w + 1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from clusterenv_hpc.comm.channel import (
    Backoff,
    Channel,
    ClusterError,
    Deadline,
    HandshakeError,
    SilenceError,
    WorkerError,
)
from clusterenv_hpc.comm.codec import decode
from clusterenv_hpc.comm.messages import Command, Report, note
from clusterenv_hpc.comm.messages import Tag as Stream
from clusterenv_hpc.gradients.gradient_settings import GradientSettings
from clusterenv_hpc.worker import GRACE_S

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05

Needed = Callable[[], Iterable[int]]
"""The workers without whom a wait cannot end; none: any of them can end it."""


class GradientCrew:
    """The workers of one learner.

    Args:
        channel: the learner's end.
        settings: what all ranks were told.
        backoff: how to wait.

    After any failure it is ``broken``: nothing is sent to any worker any more, except that it may leave.
    """

    def __init__(self, channel: Channel, settings: GradientSettings, backoff: Backoff) -> None:
        self.channel, self._settings, self._backoff = channel, settings, backoff
        self.size = channel.size - 1
        self.broken = False
        self.lost: set[int] = set()
        """Workers that are known to be dead."""
        self._hellos: dict[int, dict[str, Any]] = {}
        self._left: set[int] = set()
        self._dismissed = False
        self._heard = dict.fromkeys(range(self.size), time.monotonic())

    def meet(self, layout: str) -> None:
        """The handshake: hear every worker, check that all fit together.  ``layout``: of the learner's policy.

        Raises:
            HandshakeError: they do not.
        """
        self.wait(lambda: len(self._hellos) == self.size, self._not_met, "starting")
        first = self._hellos[0]
        for worker, hello in self._hellos.items():
            pairs = [("the policy's layout", layout, hello["layout"])]
            pairs += [(key, value, hello["agreed"].get(key)) for key, value in self._settings.agreed().items()]
            pairs += [(f"the {key}", first[key], hello[key]) for key in ("observation_space", "action_space")]
            for what, expected, got in pairs:
                if expected != got:
                    raise HandshakeError(
                        f"the ranks do not fit together: {what} is {str(expected)[:160]} here but {str(got)[:160]} on "
                        f"{self.names([worker])}; every rank must run the same script with the same arguments"
                    )

    def _not_met(self) -> list[int]:
        return [worker for worker in range(self.size) if worker not in self._hellos]

    def host(self, worker: int) -> str:
        """Where ``worker`` runs."""
        return str(self._hellos.get(worker, {}).get("host", "unknown host"))

    def names(self, workers: Iterable[int]) -> str:
        """How messages name them."""
        names = [f"rank {worker + 1} (worker, {self.host(worker)})" for worker in workers]
        return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")

    # -- waiting and hearing ------------------------------------------------------------------------------------------

    def alive(self, worker: int) -> None:
        """``worker`` has given a sign of life."""
        self._heard[worker] = time.monotonic()

    def wait(
        self, condition: Callable[[], bool], needed: Needed, what: str, busy: Callable[[], bool] = lambda: False
    ) -> None:
        """Poll until ``condition()``.  ``busy()``: whether it has found something, so that polling again may pay.

        Raises:
            SilenceError: workers that are ``needed``, or all of them, were silent for too long.
            WorkerError: a worker reported its failure, or died and is needed.
        """
        self._backoff.reset()
        began = look = time.monotonic()
        try:
            while self._bury(needed, what) or not condition():
                heard = self.listen()
                if (now := time.monotonic()) > look + LOOK_EVERY_S:
                    look = now
                    self._check_silence(began, needed(), what)
                if self.channel.progress() or heard or busy():
                    self._backoff.reset()
                else:
                    self._backoff.wait()
        except ClusterError:
            self.broken = True
            raise

    def _bury(self, needed: Needed, what: str) -> bool:
        """Part with workers that died; raises where that cannot be.  Always False."""
        if not self.channel.lost:
            return False
        dead = {rank - 1 for rank in self.channel.lost}
        for worker in sorted(dead - self.lost):
            log.warning("%s is dead", self.names([worker]))
        self.lost |= dead
        if len(dead) == self.size:
            raise ClusterError(f"every worker is dead; the last of them: {self.names([max(dead)])}")
        if self._settings.transport == "allreduce":
            missed = dead
            remedy = "transport=allreduce sums over every rank: go on from the last checkpoint, or use p2p"
        else:
            missed = dead.intersection(needed())
            remedy = "its gradients are needed: go on from the last checkpoint with other workers"
        if missed:
            worker = min(missed)
            message = f"{self.names([worker])} is dead while {what}, and {remedy}"
            raise WorkerError(message, worker + 1, self.host(worker))
        return False

    def _check_silence(self, began: float, needed: Iterable[int], what: str) -> None:
        """Silence is counted from ``began`` on: nobody listened before."""
        now, limit = time.monotonic(), self._settings.timeout_s
        silent = {w for w, heard in self._heard.items() if now - max(began, heard) > limit} - self.lost
        stuck = silent.intersection(needed) or (silent if len(silent) == self.size - len(self.lost) else ())
        if stuck:
            raise SilenceError(
                f"{self.names(sorted(stuck))} gave no sign of life for {limit:g} s while {what}: dead or stuck; raise "
                "timeout if it only needs longer"
            )

    def listen(self) -> bool:
        """Take every report that has come; whether there was one.

        Raises:
            WorkerError: a worker reported its failure.
        """
        busy = False
        while (arrived := self.channel.take_note(Stream.REPORT)) is not None:
            busy = True
            rank, kind, body = arrived[0], arrived[1][0], arrived[1][1:]
            self.alive(rank - 1)
            if kind == Report.HELLO:
                self._hellos[rank - 1] = decode(body)
            elif kind == Report.LEFT:
                self._left.add(rank)
            elif kind == Report.ERROR:
                report = decode(body)
                message = f"rank {rank} (worker, {report['host']}) failed: {report['cause']}"
                raise WorkerError(message, rank, report["host"], report["traceback"])
        return busy

    # -- the end ------------------------------------------------------------------------------------------------------

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.size + 1) if rank not in self._left | self.channel.lost]

    def dismiss(self) -> str:
        """Tell every worker to leave its process; the names of those that did not confirm it in time."""
        for rank in [] if self._dismissed else self._missing():
            self.channel.send_note(rank, Stream.COMMAND, note(Command.LEAVE))
        deadline, backoff = Deadline(0.0 if self._dismissed else GRACE_S), Backoff()
        self._dismissed = True
        while self._missing() and not deadline.passed:
            try:
                busy = self.listen()
            except WorkerError:  # the first failure is what counts; this one leaves by itself
                busy = True
            if not self.channel.progress() and not busy:
                backoff.wait()
        return self.names(rank - 1 for rank in self._missing())
