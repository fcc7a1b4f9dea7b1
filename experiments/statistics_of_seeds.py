"""Interquartile means with bootstrap intervals: how results over few seeds are told (Agarwal et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean of the middle half; values at its edges count in part, so that every number of seeds works."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    edges = np.arange(n + 1) / n
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0.0, None)
    return float(weights @ ordered / weights.sum())


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, samples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the interquartile mean over seeds."""
    array = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(array), (samples, len(array)))
    means = [interquartile_mean(row) for row in array[picks]]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
