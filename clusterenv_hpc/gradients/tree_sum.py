"""The sum of one vector over all ranks, known to all of them: an all-reduce made of nonblocking messages.

Up a binomial tree to rank 0 and down again, 2 log2(ranks) messages deep.  Each rank adds what its children send in the
order of their ranks, so the result depends on the contributions alone, and is the same bits everywhere.  Made of
messages, and not of MPI's own collective, so that it works over every channel and a dead rank stops nobody for ever.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterenv_hpc.comm.channel import Channel, Port
from clusterenv_hpc.gradients.wire import Tag


class TreeSum:
    """One rank's part.  ``begin(vector)``, then ``done()`` until it is True, then ``total``; again and again.

    size: entries of the float64 vector.
    """

    def __init__(self, channel: Channel, size: int) -> None:
        parent, children = _family(channel.rank, channel.size)
        self.total: NDArray[np.float64] = np.zeros(size)
        self._inbox = [np.zeros(size) for _ in children]
        raw = self.total.view(np.uint8)
        self._from_children = [
            channel.incoming(box.view(np.uint8), child, Tag.SUM_UP)
            for box, child in zip(self._inbox, children, strict=True)
        ]
        self._to_children = [channel.outgoing(raw, child, Tag.SUM_DOWN) for child in children]
        self._to_parent = None if parent is None else channel.outgoing(raw, parent, Tag.SUM_UP)
        self._from_parent = None if parent is None else channel.incoming(raw, parent, Tag.SUM_DOWN)
        self._stage = 4
        self._waiting: list[Port] = []

    def begin(self, vector: NDArray[np.float64]) -> None:
        """Contribute ``vector``; the sum before is forgotten."""
        self.total[:] = vector
        self._stage, self._waiting = 0, list(self._from_children)
        for port in self._waiting:
            port.start()

    def done(self) -> bool:
        """Move on as far as messages have come; True when ``total`` is the sum."""
        while all(port.done() for port in self._waiting):
            if self._stage == 4:
                return True
            self._waiting = self._next()
            self._stage += 1
            for port in self._waiting:
                port.start()
        return False

    def _next(self) -> list[Port]:
        if self._stage == 0:
            for box in self._inbox:
                self.total += box
            return [] if self._to_parent is None else [self._to_parent]
        if self._stage == 1:
            return [] if self._from_parent is None else [self._from_parent]
        return self._to_children if self._stage == 2 else []

    def free(self) -> None:
        """Give the ports up."""
        for port in (*self._from_children, *self._to_children, self._to_parent, self._from_parent):
            if port is not None:
                port.free()


def _family(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children in the binomial tree over ranks 0 .. size - 1."""
    children: list[int] = []
    bit = 1
    while bit < size:
        if rank & bit:
            return rank & ~bit, children
        if rank | bit < size:
            children.append(rank | bit)
        bit <<= 1
    return None, children
