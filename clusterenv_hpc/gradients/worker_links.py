"""The worker's end of the two transports: where its points come from, and where its gradients go.

``links`` has the learner's end.  Nothing here waits: the worker asks ``point`` and ``room`` again and again.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from clusterenv_hpc.comm.channel import Channel, ClusterError, Deadline, Port
from clusterenv_hpc.comm.codec import decode
from clusterenv_hpc.gradients.aggregators import Aggregator
from clusterenv_hpc.gradients.nigt import Optimizer
from clusterenv_hpc.gradients.tree_sum import TreeSum
from clusterenv_hpc.gradients.wire import Order, Tag, gradient_layout, point_layout

UNACKNOWLEDGED = 8
"""allreduce: gradients a worker keeps apart until it knows that they count."""


@dataclass(frozen=True)
class Point:
    """What to do next: ``share`` more gradients of ``version``; ``theta`` None: the worker has that point already.

    given_up: messages with gradients of the version before that were not sent yet, and are not sent any more.
    """

    version: int
    share: int
    theta: NDArray[np.float32] | None
    given_up: int = 0


class WorkerLink(Protocol):
    """One transport.  A gradient is written into ``buffer()`` and goes by ``deliver``."""

    def obey(self, order: int, body: bytes) -> None:
        """Take an ``Order`` of the learner's."""

    def disturbs(self) -> bool:
        """Whether the unit in hand is of no use any more; asked between any two steps, so it also sends what is due."""

    def point(self) -> Point | None:
        """What to do next, if that has changed.  A worker at rest asks for nothing else, so this sends what is due."""

    def room(self) -> bool:
        """Whether there is room for one more gradient."""

    def buffer(self) -> NDArray[np.float32]:
        """``[P]`` where the next gradient is to be written; only while there is room."""

    def deliver(self, header: NDArray[Any]) -> None:
        """Hand over the gradient in ``buffer()`` with its unit's header."""

    def free(self) -> None:
        """Give the ports up."""


@dataclass
class _Slot:
    """A gradient on its way to the learner."""

    header: NDArray[Any]
    gradient: NDArray[np.float32]
    port: Port
    due: float | None = None  # when its injected delay is over; None: not waiting


class PointsIn:
    """transport=p2p: points come typed, and every gradient goes to the learner; both ``communication_s`` late."""

    def __init__(self, channel: Channel, size: int, communication_s: float) -> None:
        self._channel, self._size, self._communication_s = channel, size, communication_s
        layout = point_layout(size)
        buffer = layout.allocate()
        self._views = layout.views(buffer)
        self._port = channel.incoming(buffer, 0, Tag.POINT)
        self._port.start()
        self._came: float | None = None
        self._slots: list[_Slot] = []
        self._filling: _Slot | None = None  # kept from buffer() to deliver(): meanwhile another may become free
        self._queue: deque[_Slot] = deque()
        self._link_free = 0.0

    def obey(self, order: int, body: bytes) -> None:
        return None

    def disturbs(self) -> bool:
        self._send_due()
        return self._arrived()

    def _arrived(self) -> bool:
        """Whether a point has come and its injected delay is over."""
        if not self._port.done():
            return False
        if self._communication_s == 0.0:
            return True
        if self._came is None:
            self._came = time.monotonic()
        return time.monotonic() >= self._came + self._communication_s

    def point(self) -> Point | None:
        self._send_due()
        if not self._arrived():
            return None
        header = self._views["header"][0]
        version = int(header["version"])
        found = Point(version, int(header["share"]), self._views["theta"].copy(), self._give_up(version))
        self._came = None
        self._port.start()
        return found

    def _give_up(self, version: int) -> int:
        """Drop what an injected delay still holds back of another version: a worker that computes faster than it sends
        would never get to its newest gradients."""
        if not self._queue or int(self._queue[0].header["version"][0]) == version:
            return 0
        late = len(self._queue)
        for slot in self._queue:
            slot.due = None
        self._queue.clear()
        self._link_free = 0.0
        return late

    def room(self) -> bool:
        self._send_due()
        return self._slot() is not None

    def _slot(self) -> _Slot | None:
        """The slot that the gradient in hand is for; None if all are taken."""
        if self._filling is None:
            self._filling = self._free_slot()
        return self._filling

    def _free_slot(self) -> _Slot | None:
        """One of two, or of as many as an injected delay keeps busy."""
        for slot in self._slots:
            if slot.due is None and slot.port.done():
                return slot
        if len(self._slots) >= 2 and self._communication_s == 0.0:
            return None
        layout = gradient_layout(self._size)
        buffer = layout.allocate()
        views, port = layout.views(buffer), self._channel.outgoing(buffer, 0, Tag.GRADIENT)
        self._slots.append(_Slot(views["header"], views["gradient"], port))
        return self._slots[-1]

    def buffer(self) -> NDArray[np.float32]:
        slot = self._slot()
        assert slot is not None
        return slot.gradient

    def deliver(self, header: NDArray[Any]) -> None:
        slot, self._filling = self._slot(), None
        assert slot is not None
        slot.header[:] = header
        # Sends of one worker do not overlap: the next waits until the link is free.
        self._link_free = slot.due = max(time.monotonic(), self._link_free) + self._communication_s
        self._queue.append(slot)
        self._send_due()

    def _send_due(self) -> None:
        while self._queue and (due := self._queue[0].due) is not None and due <= time.monotonic():
            slot = self._queue.popleft()
            slot.due = None
            slot.port.start()

    def free(self) -> None:
        for port in (self._port, *(slot.port for slot in self._slots)):
            port.free()


class SumsStay:
    """transport=allreduce: only counts are told; a round ends with one sum, and every rank makes the same update.

    aggregator, optimizer: as the learner has them; the optimizer's state comes with the first order.
    """

    def __init__(
        self,
        channel: Channel,
        aggregator: Aggregator,
        optimizer: Optimizer,
        communication_s: float,
        timeout_s: float,
    ) -> None:
        self._channel, self._aggregator, self._optimizer = channel, aggregator, optimizer
        self._communication_s, self._timeout_s = communication_s, timeout_s
        self._sum = TreeSum(channel, optimizer.size + 1)
        self._gradient = np.empty(optimizer.size, dtype=np.float32)
        self._total, self._count = np.zeros(optimizer.size), 0  # what counts for sure
        self._open: deque[tuple[int, NDArray[np.float32]]] = deque()  # units of which that is not known yet
        self._theta: NDArray[np.float32] | None = None  # a point that the worker has not been given yet
        self._begun: tuple[int, int] | None = None  # version and share of a round that is open
        self._over: list[Any] | None = None  # version, workers present, gradients of this one that count
        self._sum_from = 0.0
        self._deadline: Deadline | None = None  # of the sum under way

    def obey(self, order: int, body: bytes) -> None:
        version = self._optimizer.updates
        if order == Order.STATE:
            state = {name: torch.from_numpy(np.array(array)) for name, array in decode(body).items()}
            self._optimizer.load_state_dict(state)
            self._theta = self._optimizer.point
        elif order == Order.ACKNOWLEDGED:
            of, count = decode(body)
            if of == version:
                self._settle(count)
        elif order == Order.MET:
            self._over = decode(body)
            if self._over[0] != version:
                raise ClusterError(
                    f"rank {self._channel.rank}: round {self._over[0]} is over, but this rank is at {version}"
                )
            self._settle(self._over[2])
            if not self._over[2]:  # m-synchronous: the share was not finished
                self._forget()
            self._sum_from = time.monotonic() + self._communication_s
        elif order == Order.BEGIN:
            of, share = decode(body)
            self._begun = (of, share)  # perhaps of the round after the sum that is under way

    def _settle(self, count: int) -> None:
        """The first ``count`` gradients count."""
        while self._open and self._count < count:
            gradients, vector = self._open.popleft()
            self._total += vector
            self._count += gradients

    def _forget(self) -> None:
        self._total[:] = 0.0
        self._count = 0
        self._open.clear()

    def disturbs(self) -> bool:
        return self._over is not None

    def point(self) -> Point | None:
        if self._over is not None and self._summed(self._over):
            self._optimizer.step(self._aggregator.unpack(self._sum.total))
            self._forget()
            self._over = self._deadline = None
            self._theta = self._optimizer.point
        if self._over is not None:
            return None
        version = self._optimizer.updates
        share = 0
        if self._begun is not None and self._begun[0] == version:
            share, self._begun = self._begun[1], None
        elif self._theta is None:
            return None
        found, self._theta = Point(version, share, self._theta), None
        return found

    def _summed(self, over: list[Any]) -> bool:
        """Contribute what counts, once the injected delay is over; whether the sum is there."""
        if self._deadline is None:
            if time.monotonic() < self._sum_from:
                return False
            self._sum.begin(self._aggregator.pack(self._total, self._count, over[1]))
            # The learner, who knows whose part is missing, is to speak first.
            self._deadline = Deadline(2 * self._timeout_s)
        if self._sum.done():
            return True
        if self._deadline.passed:
            raise ClusterError(f"the sum of round {over[0]} did not come within {self._deadline.seconds:g} s")
        return False

    def room(self) -> bool:
        return self._over is None and len(self._open) < UNACKNOWLEDGED

    def buffer(self) -> NDArray[np.float32]:
        return self._gradient

    def deliver(self, header: NDArray[Any]) -> None:
        header["finite"] = np.isfinite(self._gradient).all()
        if header["finite"][0]:
            self._open.append((int(header["count"][0]), self._gradient))
            self._gradient = np.empty_like(self._gradient)
        self._channel.send_note(0, Tag.COUNT, header.tobytes())

    def free(self) -> None:
        self._sum.free()
