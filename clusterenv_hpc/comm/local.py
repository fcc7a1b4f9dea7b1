"""The channel within one process: for one rank, and for tests.

Its semantics are MPI's: per stream messages arrive in order, a synchronous send is done when a receive
takes it, a plain send is buffered.  Workers are generators; the learner lets them run whenever it waits,
so a run in one process is deterministic and needs no threads.
"""

from __future__ import annotations

import socket
from collections import defaultdict, deque
from collections.abc import Iterator

import numpy as np

from .channel import ANY_PEER, Arriving, Channel, ClusterError, Deadline, Handle, Port
from .messages import Buffer

_NOTHING: Buffer = np.zeros(0, dtype=np.uint8)


class _Transfer:
    """One message: complete when sender and receiver have met."""

    __slots__ = ("buffer", "complete")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.complete = False

    def done(self) -> bool:
        return self.complete


class _Street:
    """Sends and receives that wait for each other, for one (source, destination, tag)."""

    __slots__ = ("receives", "sends")

    def __init__(self) -> None:
        self.sends: deque[_Transfer] = deque()
        self.receives: deque[_Transfer] = deque()

    def match(self) -> None:
        while self.sends and self.receives:
            sent, wanted = self.sends.popleft(), self.receives.popleft()
            if len(sent.buffer) > len(wanted.buffer):
                raise ClusterError(
                    f"a message of {len(sent.buffer)} bytes came where at most {len(wanted.buffer)} were expected"
                )
            wanted.buffer[: len(sent.buffer)] = sent.buffer
            sent.complete = wanted.complete = True
            sent.buffer = wanted.buffer = _NOTHING  # nobody is kept waiting for a buffer that we still hold


class LocalPort:
    """A reusable transfer; see ``channel.Port``."""

    def __init__(self, street: _Street, buffer: Buffer, receives: bool) -> None:
        self._street, self._buffer, self._receives = street, buffer, receives
        self._transfer: _Transfer | None = None

    def start(self) -> None:
        if self._receives:
            self._transfer = _Transfer(self._buffer)
            self._street.receives.append(self._transfer)
        else:
            self._transfer = _Transfer(self._buffer.copy())
            self._transfer.complete = True
            self._street.sends.append(self._transfer)
        self._street.match()

    def done(self) -> bool:
        return self._transfer is None or self._transfer.complete

    @property
    def under_way(self) -> bool:
        return False

    def free(self) -> None:
        if self._transfer is not None and not self._transfer.complete and self._receives:
            self._street.receives.remove(self._transfer)
        self._transfer = None


class LocalHub:
    """What all ranks of one process share: the streets between them, and the workers to run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.streets: defaultdict[tuple[int, int, int], _Street] = defaultdict(_Street)
        self.notes: defaultdict[tuple[int, int], deque[tuple[int, bytes]]] = defaultdict(deque)
        self._workers: dict[int, Iterator[bool]] = {}
        self._running = False

    def channel(self, rank: int) -> LocalChannel:
        """The channel of ``rank``."""
        return LocalChannel(self, rank)

    def add_worker(self, rank: int, worker: Iterator[bool]) -> None:
        """Let ``worker`` run whenever the learner waits; it yields True when it did something."""
        self._workers[rank] = worker

    def run_workers(self) -> bool:
        """Give each worker one turn; True if any did something."""
        if self._running:  # a worker waits: the others get their turn from the learner
            return False
        self._running = True
        try:
            busy = False
            for rank, worker in list(self._workers.items()):
                try:
                    busy = next(worker) or busy
                except StopIteration:
                    del self._workers[rank]
            return busy
        finally:
            self._running = False


class LocalChannel(Channel):
    """See ``channel.Channel``."""

    transport = "local"

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.rank, self.size, self.host = rank, hub.size, socket.gethostname()
        self._hub = hub
        self._outbox: list[_Transfer] = []

    def incoming(self, buffer: Buffer, peer: int, tag: int) -> Port:
        return LocalPort(self._hub.streets[peer, self.rank, tag], buffer, receives=True)

    def arrival(self, buffer: Buffer, peer: int, tag: int) -> Arriving:
        return LocalPort(self._hub.streets[peer, self.rank, tag], buffer, receives=True)

    def outgoing(self, buffer: Buffer, peer: int, tag: int) -> Port:
        return LocalPort(self._hub.streets[self.rank, peer, tag], buffer, receives=False)

    def post(self, buffer: Buffer, peer: int, tag: int, *, synchronous: bool = False) -> Handle:
        street = self._hub.streets[self.rank, peer, tag]
        transfer = _Transfer(buffer if synchronous else np.array(buffer))
        transfer.complete = not synchronous
        street.sends.append(transfer)
        street.match()
        self._outbox = [sent for sent in (*self._outbox, transfer) if not sent.complete]
        return transfer

    def send_note(self, peer: int, tag: int, data: bytes) -> None:
        self._hub.notes[peer, tag].append((self.rank, bytes(data)))

    def take_note(self, tag: int, peer: int = ANY_PEER) -> tuple[int, bytes] | None:
        waiting = self._hub.notes[self.rank, tag]
        for i, (source, data) in enumerate(waiting):
            if peer in (ANY_PEER, source):
                del waiting[i]
                return source, data
        return None

    def progress(self) -> bool:
        return self.rank == 0 and self._hub.run_workers()

    def flush(self, deadline: Deadline) -> bool:
        return all(sent.complete for sent in self._outbox)  # nobody else runs meanwhile: waiting would change nothing

    def abort(self, code: int) -> None:
        raise SystemExit(code)

    def close(self) -> None:
        self._hub._workers.clear()
