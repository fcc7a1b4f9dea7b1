"""What is known of one update: the step, the estimate, and the trajectories behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterenv_hpc.gradients.aggregators import Aggregate
from clusterenv_hpc.gradients.nigt import Step

SUMMED = ("env_steps", "episodes", "return_sum", "return_square_sum", "length_sum")
"""Fields of a unit's header that add up to ``Units``."""


@dataclass(frozen=True)
class Units:
    """What the gradients of one update were made of; returns are of first episodes, undiscounted and cut at H."""

    env_steps: int
    episodes: int
    return_mean: float
    return_std: float
    length_mean: float


@dataclass(frozen=True)
class Update:
    """One update: what the optimizer did, the estimate it did it with, and the trajectories behind that."""

    step: Step
    aggregate: Aggregate
    units: Units
    by_worker: Sequence[Units] = ()


def units_of(sums: NDArray[np.float64]) -> Units:
    """``Units`` from the sums of SUMMED."""
    steps, episodes, total, squares, length = sums.tolist()
    if not episodes:
        return Units(int(steps), 0, math.nan, math.nan, math.nan)
    mean = total / episodes
    variance = squares / episodes - mean * mean  # not mean**2, which raises where it overflows
    deviation = math.sqrt(max(0.0, variance)) if math.isfinite(variance) else math.nan
    return Units(int(steps), int(episodes), mean, deviation, length / episodes)
