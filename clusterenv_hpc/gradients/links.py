"""The learner's end of the two transports: how a round's points go out and its gradients come in.

Both do the same for ``GradientCluster``: ``announce`` a round to workers, ``poll`` for what has come, and ``estimate``
once the rule is met.  Workers are numbered 0 .. n - 1 here; worker w is rank w + 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clusterenv_hpc.comm.channel import Channel, Port
from clusterenv_hpc.comm.codec import encode
from clusterenv_hpc.comm.messages import Buffer, note
from clusterenv_hpc.comm.messages import Tag as Stream
from clusterenv_hpc.gradients.aggregators import Aggregate, Aggregator
from clusterenv_hpc.gradients.nigt import Optimizer
from clusterenv_hpc.gradients.tree_sum import TreeSum
from clusterenv_hpc.gradients.wire import ENDLESS, UNIT_HEADER, Order, Tag, gradient_layout, point_layout
from clusterenv_hpc.stats import Traffic

RING = 2
"""Receives posted for each worker: one fills while the other is looked at."""

Take = Callable[[int, Any, NDArray[np.float32] | None], None]
"""Called with worker, unit header and gradient (None: it stayed with the worker)."""


@dataclass
class GradientStats:
    """Counted on the learner: traffic by kind; by worker: units taken, the seconds they took, and units given up."""

    sent: defaultdict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    received: defaultdict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    units: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    cancelled: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


class Link(Protocol):
    """One transport."""

    def announce(self, workers: Iterable[int]) -> None:
        """The aggregator's round is open: have these workers sample at the optimizer's point."""

    def poll(self, take: Take) -> bool:
        """Hand what has come to ``take``, until the rule is met; whether there was anything."""

    def estimate(self, wait: Callable[[Callable[[], bool], str], None]) -> Aggregate:
        """The result, once the rule is met; ``wait(condition, what)`` polls."""

    def free(self) -> None:
        """Give the ports up."""


def share(rule: Aggregator, worker: int) -> int:
    """How many gradients ``worker`` is asked for in the open round."""
    return rule.wanted(worker) if rule.fixed_share else ENDLESS


@dataclass
class _Snapshot:
    """A point as it is sent, and by worker the ports that have sent it, kept for the next one in this buffer."""

    buffer: Buffer
    ports: dict[int, Port] = field(default_factory=dict)

    def idle(self) -> bool:
        return all(port.done() for port in self.ports.values())

    def send(self, channel: Channel, worker: int) -> Port:
        if worker not in self.ports:
            self.ports[worker] = channel.outgoing(self.buffer, worker + 1, Tag.POINT)
        self.ports[worker].start()
        return self.ports[worker]


class PointToPoint:
    """Every gradient comes here.  Of the points only the newest is sent to a worker that is slow to take them."""

    def __init__(self, channel: Channel, rule: Aggregator, optimizer: Optimizer, stats: GradientStats) -> None:
        self._channel, self._rule, self._optimizer, self._stats = channel, rule, optimizer, stats
        self._layout = point_layout(optimizer.size)
        self._snapshots: list[_Snapshot] = []
        self._sending: dict[int, Port] = {}
        self._owed: set[int] = set()  # workers that were not sent the newest point yet
        layout = gradient_layout(optimizer.size)
        self._nbytes = layout.nbytes
        self._rings: list[list[tuple[Port, dict[str, NDArray[Any]]]]] = []
        for rank in range(1, channel.size):
            buffers = [layout.allocate() for _ in range(RING)]
            ring = [(channel.incoming(buffer, rank, Tag.GRADIENT), layout.views(buffer)) for buffer in buffers]
            for port, _ in ring:
                port.start()
            self._rings.append(ring)
        self._turn = 0

    def announce(self, workers: Iterable[int]) -> None:
        self._owed.update(workers)
        self._send_points()

    def _send_points(self) -> None:
        ready = [w for w in self._owed if w not in self._sending or self._sending[w].done()]
        by_share: dict[int, _Snapshot] = {}
        for worker in sorted(ready):
            wanted = share(self._rule, worker)
            if wanted not in by_share:
                by_share[wanted] = self._snapshot(wanted)
            self._sending[worker] = by_share[wanted].send(self._channel, worker)
            self._owed.discard(worker)
            self._stats.sent["point"].add(self._layout.nbytes)

    def _snapshot(self, wanted: int) -> _Snapshot:
        """One that no send reads any more, filled with the newest point."""
        found = next((snapshot for snapshot in self._snapshots if snapshot.idle()), None)
        if found is None:
            found = _Snapshot(self._layout.allocate())
            self._snapshots.append(found)
        views = self._layout.views(found.buffer)
        views["header"][0] = (self._rule.version, wanted)
        views["theta"][:] = self._optimizer.point
        return found

    def poll(self, take: Take) -> bool:
        self._send_points()
        busy = False
        # Begin with another worker each time: where several wait, the first must not always win.
        self._turn = (self._turn + 1) % len(self._rings)
        for worker in (*range(self._turn, len(self._rings)), *range(self._turn)):
            ring = self._rings[worker]
            if not self._rule.ready() and ring[0][0].done():
                port, views = ring.pop(0)
                self._stats.received["gradient"].add(self._nbytes)
                take(worker, views["header"][0], views["gradient"])
                port.start()
                ring.append((port, views))
                busy = True
        return busy

    def estimate(self, wait: Callable[[Callable[[], bool], str], None]) -> Aggregate:
        return self._rule.result()

    def free(self) -> None:
        for ring in self._rings:
            for port, _ in ring:
                port.free()
        for snapshot in self._snapshots:
            for port in snapshot.ports.values():
                port.free()


class AllReduce:
    """Gradients stay with the workers, who report counts; state is replicated, and a round ends with one reduction."""

    def __init__(self, channel: Channel, rule: Aggregator, optimizer: Optimizer, stats: GradientStats) -> None:
        self._channel, self._rule, self._optimizer, self._stats = channel, rule, optimizer, stats
        self._sum = TreeSum(channel, optimizer.size + 1)
        state = {name: tensor.numpy() for name, tensor in optimizer.state_dict().items()}
        for rank in range(1, channel.size):
            self._order(rank, Order.STATE, encode(state))

    def _order(self, rank: int, order: Order, body: bytes) -> None:
        data = note(order, body)
        self._stats.sent["control"].add(len(data))
        self._channel.send_note(rank, Stream.COMMAND, data)

    def announce(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self._order(worker + 1, Order.BEGIN, encode([self._rule.version, share(self._rule, worker)]))

    def poll(self, take: Take) -> bool:
        busy = False
        while not self._rule.ready() and (arrived := self._channel.take_note(Tag.COUNT)) is not None:
            rank, data = arrived
            self._stats.received["count"].add(len(data))
            header = np.frombuffer(data, dtype=UNIT_HEADER)[0]
            take(rank - 1, header, None)
            if not self._rule.ready() and header["version"] == self._rule.version:
                count = int(self._rule.counts[rank - 1])
                self._order(rank, Order.ACKNOWLEDGED, encode([self._rule.version, count]))
            busy = True
        return busy

    def estimate(self, wait: Callable[[Callable[[], bool], str], None]) -> Aggregate:
        for worker in range(self._rule.n_workers):
            body = [self._rule.version, self._rule.present, self._rule.accepted(worker)]
            self._order(worker + 1, Order.MET, encode(body))
        self._sum.begin(np.zeros(self._optimizer.size + 1))
        wait(self._sum.done, f"contributing to the sum of version {self._rule.version}")
        self._stats.received["sum"].add(self._sum.total.nbytes)
        return self._rule.result(self._sum.total)

    def free(self) -> None:
        self._sum.free()
