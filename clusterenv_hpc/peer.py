"""The learner's view of one worker: its rows, its ports, and the buffers its rollouts arrive in."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .comm.channel import Arriving, Channel
from .comm.messages import Buffer, Layout, Leaf, RolloutShape, Tag, actions_layout, pick, step_layout
from .handshake import Hello

RING = 2
"""Receives posted for each worker: one fills while the other is looked at."""


class Store:
    """A buffer that a rollout's arrays are made of."""

    __slots__ = ("_baseline", "buffer")

    def __init__(self, layout: Layout) -> None:
        self.buffer: Buffer = layout.allocate()
        self._baseline = self._references()

    def _references(self) -> int:
        # Every array made of the buffer, and every tensor made of those, refers to it.
        return sys.getrefcount(self.buffer)

    @property
    def in_use(self) -> bool:
        """Whether somebody still holds arrays that were made of the buffer."""
        return self._references() > self._baseline


class Arrival(Store):
    """A buffer that a rollout arrives in, and its port."""

    __slots__ = ("port",)

    def __init__(self, channel: Channel, layout: Layout, rank: int) -> None:
        super().__init__(layout)
        self.port: Arriving = channel.arrival(self.buffer, rank, Tag.ROLLOUT)
        self._baseline = self._references()


class Peer:
    """One worker as the learner knows it."""

    def __init__(self, channel: Channel, hello: Hello) -> None:
        self.rank, self.host, self.pid = hello.rank, hello.host, hello.pid
        self.world_rank = channel.world_rank(hello.rank)
        self.rows = slice(*hello.rows)
        self.num_envs = hello.rows[1] - hello.rows[0]
        self.row_numbers = np.arange(*hello.rows)
        self.rank_numbers = np.full(self.num_envs, self.world_rank)
        for shared in (self.row_numbers, self.rank_numbers):  # by every rollout of this worker
            shared.flags.writeable = False
        self.replies: list[tuple[bool, bytes]] = []
        self.heard = 0.0
        self.infos: list[bytes] = []
        self.wants_weights = False
        self.stopped = self.left = False
        self.probe: tuple[int, list[NDArray[Any]]] | None = None
        self._channel = channel
        self._layout: Layout | None = None
        self._num_steps, self._count = 0, 0
        self._posted: list[Arrival] = []  # in the order they were posted: MPI fills them in that order
        self._spare: list[Arrival] = []

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.world_rank} (worker, {self.host})"

    def prepare_steps(self, observation_leaves: tuple[Leaf, ...], action_leaves: tuple[Leaf, ...]) -> None:
        """Make the ports for ``reset`` and ``step``."""
        outward, inward = actions_layout(action_leaves, self.num_envs), step_layout(observation_leaves, self.num_envs)
        actions_buffer, step_buffer = outward.allocate(), inward.allocate()
        views = outward.views(actions_buffer)
        self.sequence = views["sequence"]
        self.actions = [views[f"action{i}"] for i in range(len(action_leaves))]
        self.actions_port = self._channel.outgoing(actions_buffer, self.rank, Tag.ACTIONS)
        self.actions_bytes = outward.nbytes
        self.step = inward.views(step_buffer)
        self.observation = [self.step[f"observation{i}"] for i in range(len(observation_leaves))]
        self.step_port = self._channel.incoming(step_buffer, self.rank, Tag.STEP)
        self.step_bytes = inward.nbytes

    def step_came(self) -> bool:
        """Whether the result of a step has come, with its infos; and whether the actions' port is free again."""
        if not (self.step_port.done() and self.actions_port.done()):
            return False
        return bool(self.infos) or not self.step["header"]["has_infos"][0]

    def expect_rollouts(self, shape: RolloutShape, count: int) -> None:
        """Have ``count`` receives posted for rollouts of ``shape``, now and at each ``replenish``."""
        if self._num_steps != shape.num_steps:
            self.forget_rollouts()
            self._num_steps, self._layout = shape.num_steps, shape.layout()
        self._count = count
        self.replenish()

    def replenish(self) -> None:
        """Post receives until as many as expected are posted."""
        while len(self._posted) < self._count:
            arrival = next((spare for spare in self._spare if not spare.in_use), None)
            if arrival is None:
                arrival = Arrival(self._channel, self.layout, self.rank)
            else:
                self._spare.remove(arrival)
            arrival.port.start()
            self._posted.append(arrival)

    @property
    def expects_rollouts(self) -> bool:
        """Whether receives are posted."""
        return bool(self._posted)

    @property
    def layout(self) -> Layout:
        """Of the rollouts expected."""
        assert self._layout is not None
        return self._layout

    def arrived(self) -> bool:
        """Whether a rollout has come."""
        return bool(self._posted) and self._posted[0].port.done()

    @property
    def sending(self) -> bool:
        """Whether a rollout has begun to come and is not whole yet."""
        return bool(self._posted) and self._posted[0].port.under_way

    @property
    def waiting(self) -> int:
        """How many rollouts have come that were not taken yet."""
        return sum(bool(arrival.port.done()) for arrival in self._posted)

    def take(self) -> Buffer:
        """The rollout that has come.  Its buffer is filled again only when nobody holds arrays of it any more."""
        self.heard = time.monotonic()
        arrival = self._posted.pop(0)
        self._spare.append(arrival)
        while len(self._spare) > RING + 1:  # somebody kept rollouts; those live on without us
            self._spare.pop(0).port.free()
        return arrival.buffer

    def forget_rollouts(self) -> None:
        """Give up the receives and their buffers."""
        for arrival in (*self._posted, *self._spare):
            arrival.port.free()
        self._posted.clear()
        self._spare.clear()
        self._num_steps = self._count = 0

    def free(self) -> None:
        """Give every port up."""
        self.forget_rollouts()
        if hasattr(self, "step_port"):
            self.step_port.free()
            self.actions_port.free()


def copy_probe_states(views: dict[str, NDArray[Any]], leaves: tuple[Leaf, ...]) -> tuple[int, list[NDArray[Any]]]:
    """``(sequence, states)``: the observations that a rollout's probe index names, as leaf arrays ``[K, ...]``."""
    header = views["header"][0]
    index = views["probe_index"][: int(header["probes"])]
    return int(header["sequence"]), [pick(views[f"observation{i}"], index) for i in range(len(leaves))]
