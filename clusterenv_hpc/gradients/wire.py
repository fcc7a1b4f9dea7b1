"""Every fact of the wire between gradient workers and the learner.

    learner  --POINT(version, share, float32 theta)-->        worker       typed; the newest only
    worker   --GRADIENT(version, count, ..., float32 sum)-->  learner      typed; transport p2p
    worker   --COUNT(version, count, ...)-->                  learner      transport allreduce: the header alone
    learner  --MET(version, present, accepted)-->             worker       then one TreeSum over all ranks
    learner  --BEGIN(version, share)-->                       worker       allreduce: the next round is open

Tags lie above those of ``comm.messages``, reports and commands below are notes on its COMMAND and REPORT streams.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from clusterenv_hpc.comm.messages import Layout

ENDLESS = -1
"""A share without limit: sample until another point comes."""


class Tag(IntEnum):
    """Streams."""

    POINT = 33
    GRADIENT = 34
    COUNT = 35
    SUM_UP = 36
    SUM_DOWN = 37


class Order(IntEnum):
    """First byte of a note to a worker, on ``comm.messages.Tag.COMMAND``."""

    STATE = 65  # allreduce: the optimizer's state at the start
    MET = 66  # allreduce: the round is over; what of yours counts
    ACKNOWLEDGED = 67  # allreduce: so many of your gradients are in
    BEGIN = 68  # allreduce: sample at this version, so many


POINT_HEADER = np.dtype([("version", "<i8"), ("share", "<i8")])

UNIT_HEADER = np.dtype(
    [
        ("version", "<i8"),
        ("count", "<i8"),  # trajectories
        ("env_steps", "<i8"),
        ("episodes", "<i8"),
        ("return_sum", "<f8"),
        ("return_square_sum", "<f8"),
        ("length_sum", "<i8"),
        ("cancelled", "<i8"),  # units given up since the last header
        ("seconds", "<f8"),  # of this unit, waiting excluded
        ("finite", "<i8"),  # COUNT only: 0 if the gradient was not, and was dropped
    ]
)


def point_layout(size: int) -> Layout:
    """A point to sample at: its version, how many gradients are wanted, and the flat float32 parameters."""
    return Layout([("header", POINT_HEADER, (1,)), ("theta", np.dtype("<f4"), (size,))])


def gradient_layout(size: int) -> Layout:
    """The sum of a unit's gradients."""
    return Layout([("header", UNIT_HEADER, (1,)), ("gradient", np.dtype("<f4"), (size,))])
