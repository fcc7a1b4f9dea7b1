"""The interface both sides speak, whatever carries the bytes.

    port = channel.incoming(buffer, peer, tag); port.start() ... port.done()     typed, fixed size, reused
    port = channel.arrival(buffer, peer, tag); ... port.under_way                the same, for what takes a while
    handle = channel.post(buffer, peer, tag)                                     typed, once; the outbox owns it
    channel.send_note(peer, tag, data); channel.take_note(tag, peer)             short, any size, in order

Nothing here blocks: a caller polls, and sleeps through ``Backoff`` under a ``Deadline``.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from .messages import Buffer

ANY_PEER = -1

LAST_WORDS_S = 0.5
"""How long a launcher has to pass on what a rank has said before that rank aborts the job, in seconds."""


class ClusterError(RuntimeError):
    """Something went wrong on a rank; the message names rank, host and cause."""


class HandshakeError(ClusterError):
    """The ranks do not fit together: versions, spaces, policies or their number differ."""


class WorkerError(ClusterError):
    """A worker failed: ``rank`` and ``host`` say where, ``remote_traceback`` how, ``place`` where in user code."""

    def __init__(self, message: str, rank: int, host: str, remote_traceback: str = "", place: str = "") -> None:
        super().__init__(message)
        self.rank, self.host, self.remote_traceback, self.place = rank, host, remote_traceback, place


class SilenceError(ClusterError):
    """A rank was not heard of for longer than the deadline allows."""


class Port(Protocol):
    """A typed message between fixed buffers, sent or received again and again."""

    def start(self) -> None:
        """Begin one transfer; the buffer belongs to it until ``done``."""

    def done(self) -> bool:
        """True when no transfer is under way."""

    def free(self) -> None:
        """Give the port up, cancelling a receive that nothing matched."""


class Arriving(Port, Protocol):
    """A port for large messages, that knows when one has begun to come."""

    @property
    def under_way(self) -> bool:
        """Whether a message has begun to come and is not whole yet: it may move only while somebody polls."""


class Handle(Protocol):
    """A message on its way."""

    def done(self) -> bool:
        """True once the buffer may be used again (for synchronous sends: once the peer takes it)."""


class Channel(ABC):
    """One rank's end of the wire.  Rank 0 is the learner."""

    rank: int
    size: int
    host: str
    transport: str
    """The word for what carries the bytes: ``"local"``, or the MPI library's name."""
    oversubscribed: bool = False
    """Whether this machine's ranks outnumber the cores they may use."""
    lost: frozenset[int] = frozenset()
    """Ranks known to be dead, where the transport survives that."""

    def world_rank(self, rank: int) -> int:
        """The rank in the whole job of this channel's ``rank``; what messages to people name."""
        return rank

    @abstractmethod
    def incoming(self, buffer: Buffer, peer: int, tag: int) -> Port:
        """A port that receives into ``buffer``; messages may be shorter than it."""

    @abstractmethod
    def arrival(self, buffer: Buffer, peer: int, tag: int) -> Arriving:
        """The same for large messages.  Of several with one peer and tag, those started first are polled first."""

    @abstractmethod
    def outgoing(self, buffer: Buffer, peer: int, tag: int) -> Port:
        """A port that sends ``buffer``."""

    @abstractmethod
    def post(self, buffer: Buffer, peer: int, tag: int, *, synchronous: bool = False) -> Handle:
        """Send ``buffer`` once.  It must not change until done; ``synchronous``: done only when the peer takes it."""

    @abstractmethod
    def send_note(self, peer: int, tag: int, data: bytes) -> None:
        """Send a short message; the outbox keeps ``data`` until it is gone."""

    @abstractmethod
    def take_note(self, tag: int, peer: int = ANY_PEER) -> tuple[int, bytes] | None:
        """The next note on ``tag``, as ``(peer, data)``, if one has arrived."""

    def progress(self) -> bool:
        """Let the transport work; True if something happened, so that polling again at once may pay."""
        return False

    @abstractmethod
    def flush(self, deadline: Deadline) -> bool:
        """Poll until the outbox is empty; False if the deadline passed first."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank of the job now."""

    @abstractmethod
    def close(self) -> None:
        """Release what the channel holds.  The other ranks are not waited for."""


class Deadline:
    """A moment after which waiting is an error; ``renew`` pushes it back when the peer shows signs of life."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Count from now again."""
        self._end = time.monotonic() + self.seconds

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic() > self._end


class Backoff:
    """How a rank waits: polls for a few microseconds, then sleeps longer and longer, so that no core is burnt.

    MPI libraries busy-wait; where ranks share cores, that takes the core from the one that has work to do.

    Args:
        spin_s: seconds of polling before the first sleep.
        first_s, longest_s: the first and the longest sleep, doubling in between.
    """

    def __init__(self, spin_s: float = 50e-6, first_s: float = 20e-6, longest_s: float = 500e-6) -> None:
        if not (spin_s >= 0 and 0 < first_s <= longest_s):
            raise ValueError(
                f"a backoff needs spin_s >= 0 and 0 < first_s <= longest_s, got {spin_s}, {first_s}, {longest_s}"
            )
        self.spin_s, self.first_s, self.longest_s = spin_s, first_s, longest_s
        self._sleep_s = first_s
        self._spin_until = 0.0

    def expect(self, seconds: float) -> None:
        """From the next ``reset`` on, the first sleep is this long (at most the longest)."""
        self.first_s = min(seconds, self.longest_s)

    def hurry(self, longest_s: float) -> None:
        """Sleep no longer than this until the next ``reset``."""
        self._sleep_s = min(self._sleep_s, longest_s)

    def reset(self) -> None:
        """Something happened: poll eagerly again."""
        self._spin_until = 0.0
        self._sleep_s = self.first_s

    def wait(self) -> None:
        """Nothing happened: spin or sleep a little."""
        now = time.perf_counter()
        if self.spin_s and not self._spin_until:
            self._spin_until = now + self.spin_s
        if now < self._spin_until:
            os.sched_yield()
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, self.longest_s)


def wait_for(
    condition: Callable[[], Any], channel: Channel, backoff: Backoff, deadline: Deadline, complaint: Callable[[], str]
) -> None:
    """Poll until ``condition()`` holds.

    Raises:
        SilenceError: with ``complaint()``, when the deadline passed first.
    """
    backoff.reset()
    while not condition():
        if channel.progress():
            backoff.reset()
            continue
        if deadline.passed:
            raise SilenceError(complaint())
        backoff.wait()
