"""Every fact of the wire: tags, kinds, headers, and where each array lies in a message.

Two sorts of message exist.

*Notes* are short and of any size: one byte of kind, then a body.  They carry control (commands down,
reports up) and keep their order.

*Typed messages* (actions, steps, rollouts, weights) are one block of bytes whose ``Layout`` both sides
derive from the spaces agreed on at the handshake, so nothing describes itself and nothing is parsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]

ALIGNMENT = 64
"""Bytes; every field starts on a cache line."""


class Tag(IntEnum):
    """Which stream a message belongs to; order is kept within a stream."""

    COMMAND = 1  # notes, learner to worker
    REPORT = 2  # notes, worker to learner
    ACTIONS = 3
    STEP = 4
    ROLLOUT = 5
    WEIGHTS = 6
    ECHO = 7  # the transport benchmark


class Command(IntEnum):
    """What the learner asks of a worker: the first byte of a note on ``Tag.COMMAND``."""

    START = 1  # the handshake agreed
    RESET = 2
    CALL = 3
    SET = 4
    ACTIONS = 5  # actions that do not have the space's own dtype and shape, encoded
    ROLLOUT = 6  # collect one rollout
    STREAM = 7  # collect rollouts until STOP
    STOP = 8
    PROBE = 9  # a new policy version exists
    STATE = 10  # give back what a checkpoint needs
    RESTORE = 11
    CLOSE = 12  # close the environments
    LEAVE = 13  # end the process
    EVALUATE = 14  # to the rank set aside for that: play whole episodes with these weights


class Report(IntEnum):
    """What a worker tells the learner: the first byte of a note on ``Tag.REPORT``."""

    HELLO = 1
    REPLY = 2
    INFOS = 3
    REQUEST = 4  # send me weights
    STOPPED = 5
    ALIVE = 6
    ERROR = 7
    LEFT = 8
    REFUSAL = 10  # what was asked for failed, and nothing else did
    RESTART = 9  # an environment failed and was built anew


STEP_HEADER = np.dtype([("sequence", "<i8"), ("has_infos", "<i8")])

ROLLOUT_HEADER = np.dtype(
    [
        ("sequence", "<i8"),
        ("episodes", "<i8"),  # how many entries of the episode fields are used
        ("probes", "<i8"),  # how many entries of probe_index are used
        ("kl_count", "<i8"),  # readings since the previous rollout
        ("kl_sum", "<f8"),
        ("kl_last", "<f8"),
        ("seconds_env", "<f8"),
        ("seconds_policy", "<f8"),
        ("seconds_wait", "<f8"),
    ]
)

WEIGHTS_HEADER = np.dtype([("version", "<i8"), ("count", "<i8")])

PROBE_HEADER = np.dtype([("version", "<i8"), ("sequence", "<i8"), ("states", "<i8"), ("width", "<i8")])


@dataclass(frozen=True)
class Leaf:
    """One array of a (possibly nested) space: ``path`` names it, ``shape`` is that of a single environment."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Layout:
    """Where named arrays lie in one block of bytes."""

    def __init__(self, fields: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> None:
        self.fields: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        offset = 0
        for name, dtype, shape in fields:
            self.fields[name] = (offset, dtype, shape)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        self.nbytes = offset

    def allocate(self) -> Buffer:
        """A zeroed block.  Zeroed, because padding and unused entries travel too."""
        return np.zeros(self.nbytes, dtype=np.uint8)

    def view(self, buffer: Buffer, name: str) -> NDArray[Any]:
        """The array ``name`` inside ``buffer``, without a copy."""
        offset, dtype, shape = self.fields[name]
        return np.ndarray(shape, dtype, buffer, offset)

    def views(self, buffer: Buffer) -> dict[str, NDArray[Any]]:
        """All arrays inside ``buffer``, without copies."""
        return {name: self.view(buffer, name) for name in self.fields}


def _dtype(code: str) -> np.dtype[Any]:
    return np.dtype(code)


def _leaf_fields(
    prefix: str, leaves: Sequence[Leaf], lead: tuple[int, ...]
) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    return [(f"{prefix}{i}", leaf.dtype, (*lead, *leaf.shape)) for i, leaf in enumerate(leaves)]


def actions_layout(action_leaves: Sequence[Leaf], num_envs: int) -> Layout:
    """Actions for one step of a worker's ``num_envs`` environments."""
    return Layout([("sequence", _dtype("<i8"), (1,)), *_leaf_fields("action", action_leaves, (num_envs,))])


def step_layout(observation_leaves: Sequence[Leaf], num_envs: int) -> Layout:
    """What one step (or reset) of a worker's environments gives back."""
    return Layout(
        [
            ("header", STEP_HEADER, (1,)),
            *_leaf_fields("observation", observation_leaves, (num_envs,)),
            ("rewards", _dtype("<f8"), (num_envs,)),
            ("terminated", _dtype("?"), (num_envs,)),
            ("truncated", _dtype("?"), (num_envs,)),
        ]
    )


def weights_layout(count: int) -> Layout:
    """A policy's weights as one flat float32 array, with its version."""
    return Layout([("header", WEIGHTS_HEADER, (1,)), ("weights", _dtype("<f4"), (count,))])


@dataclass(frozen=True)
class RolloutShape:
    """What fixes a rollout's layout.

    ``separate_next`` says that successors travel as a field of their own, because the environment resets
    within the step that ends an episode; otherwise they are the observations shifted by one.
    """

    observation_leaves: tuple[Leaf, ...]
    action_leaf: Leaf
    num_params: int
    num_steps: int
    num_envs: int
    num_probes: int
    separate_next: bool

    def layout(self) -> Layout:
        """The layout; the episode fields come last, so that only their used part need be sent."""
        t, n = self.num_steps, self.num_envs
        observed = t if self.separate_next else t + 1
        fields = [
            ("header", ROLLOUT_HEADER, (1,)),
            *_leaf_fields("observation", self.observation_leaves, (observed, n)),
            ("actions", self.action_leaf.dtype, (t, n, *self.action_leaf.shape)),
            ("behaviour_params", _dtype("<f4"), (t, n, self.num_params)),
            ("rewards", _dtype("<f8"), (t, n)),
            ("terminated", _dtype("?"), (t, n)),
            ("truncated", _dtype("?"), (t, n)),
            ("valid", _dtype("?"), (t, n)),
            ("versions", _dtype("<i8"), (t,)),
            ("probe_index", _dtype("<i4"), (self.num_probes,)),
        ]
        if self.separate_next:
            fields += _leaf_fields("next_observation", self.observation_leaves, (t, n))
        fields.append(("episodes", EPISODE, (t * n,)))
        return Layout(fields)


def pick(block: NDArray[Any], index: NDArray[np.int32]) -> NDArray[Any]:
    """The states ``[K, ...]`` of a block ``[T, N, ...]`` that ``index`` (step * N + environment) names, copied."""
    return block.reshape(-1, *block.shape[2:]).take(index, axis=0)


EPISODE = np.dtype([("return", "<f8"), ("length", "<i8"), ("row", "<i8")])


def note(kind: int, body: bytes = b"") -> bytes:
    """A note of ``kind`` with ``body``."""
    return bytes((kind,)) + body


def probe_note(version: int, sequence: int, params: NDArray[np.float32] | None) -> bytes:
    """A probe: the new policy's distribution parameters ``[K, P]`` at the probe states of rollout ``sequence``.

    Without ``params`` it only says that ``version`` exists, for sync rules that need no divergence.
    """
    header = np.zeros(1, dtype=PROBE_HEADER)
    header["version"] = version
    header["sequence"] = sequence
    if params is None:
        return note(Command.PROBE, header.tobytes())
    header["states"], header["width"] = params.shape
    return note(Command.PROBE, header.tobytes() + np.ascontiguousarray(params, dtype="<f4").tobytes())


def read_probe(body: bytes) -> tuple[int, int, NDArray[np.float32] | None]:
    """``(version, sequence, params or None)`` of a probe's body."""
    size = PROBE_HEADER.itemsize
    header = np.frombuffer(body, dtype=PROBE_HEADER, count=1)[0]
    states, width = int(header["states"]), int(header["width"])
    params = None
    if width:
        params = np.frombuffer(body, dtype="<f4", offset=size, count=states * width).reshape(states, width)
    return int(header["version"]), int(header["sequence"]), params
