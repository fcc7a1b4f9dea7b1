"""What the theory says a method costs: the complexities of arXiv 2509.24305, and the time of one round.

``h`` ``[n]`` is the time each worker takes for one trajectory; every function sorts it itself.  Complexities are
without constants: compare their shapes, not their values.  Round times come in two forms: the closed ones, and
``*_exact``, which count whole trajectories of workers that all start at time 0; communication comes on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clusterenv_hpc.gradients.checks import positive_float, positive_int

Floats = NDArray[np.float64]


def sorted_times(h: ArrayLike) -> Floats:
    """``h`` ascending; raises ``ValueError`` unless it is a vector of positive numbers (infinity: a worker that never
    answers)."""
    times = np.sort(np.atleast_1d(np.asarray(h, dtype=np.float64)))
    if times.ndim != 1 or times.size == 0 or not (times > 0).all():
        raise ValueError(f"compute times must be a vector of positive numbers, got {h!r}")
    return times


def harmonic_prefixes(h: ArrayLike) -> Floats:
    """``[n]`` the harmonic means of the m fastest times, m = 1 .. n."""
    times = sorted_times(h)
    return np.arange(1, times.size + 1) / np.cumsum(1.0 / times)


# -- complexities ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Complexity:
    """computation(h, eps): time; rounds(n, eps): communication rounds; all_reduce: whether one all-reduce serves."""

    computation: Callable[[ArrayLike, float], float]
    rounds: Callable[[int, float], float]
    all_reduce: bool


def _prefix_minimum(h: ArrayLike, iterations: float, samples: float) -> float:
    prefixes = harmonic_prefixes(h)
    return float(np.min(prefixes * (iterations + samples / np.arange(1, prefixes.size + 1))))


def _malenia(h: ArrayLike, eps: float) -> float:
    times = sorted_times(h)
    return float(times[-1] * (eps**-2 + eps**-1.5) + times.mean() * eps**-3.5 / times.size)


def _afedpg(h: ArrayLike, eps: float) -> float:
    times = sorted_times(h)
    n = times.size
    return float(harmonic_prefixes(times)[-1] * (n ** (4 / 3) * eps ** (-7 / 3) + eps**-3.5 / n))


def _synchronous(h: ArrayLike, iterations: float, samples: float) -> float:
    times = sorted_times(h)
    return float(times[-1] * (iterations + samples / times.size))


COMPLEXITIES: dict[str, Complexity] = {
    "sync_pg": Complexity(lambda h, eps: _synchronous(h, eps**-2, eps**-4), lambda n, eps: eps**-2 + eps**-4 / n, True),
    "sync_nigt": Complexity(lambda h, eps: _synchronous(h, 0.0, eps**-3.5), lambda n, eps: eps**-3.5, True),
    "rennala_pg": Complexity(lambda h, eps: _prefix_minimum(h, eps**-2, eps**-4), lambda n, eps: eps**-2, True),
    "afedpg": Complexity(_afedpg, lambda n, eps: eps**-3, False),
    "rennala_nigt": Complexity(lambda h, eps: _prefix_minimum(h, eps**-2, eps**-3.5), lambda n, eps: eps**-2, True),
    "malenia_nigt": Complexity(_malenia, lambda n, eps: eps**-2, True),
}
"""The table of arXiv 2509.24305, by method."""


@dataclass(frozen=True)
class Parameters:
    """The parameters the analysis chooses, constants dropped."""

    eta: float
    alpha: float
    M: int
    M_init: int


def parameters(eps: float, sigma: float, smoothness: float, hessian_smoothness: float) -> Parameters:
    """eta = min(1, sqrt(L_h eps) / L_g), alpha = min(eps / L_g, eta sqrt(eps / L_h)),
    M = max(1, ceil(eta sigma^2 / eps^2)), M_init = max(1, ceil(sigma^2 / eps^2)); L_h > 0."""
    positive_float("eps", eps)
    positive_float("smoothness", smoothness)
    positive_float("hessian_smoothness", hessian_smoothness)
    eta = min(1.0, sqrt(hessian_smoothness * eps) / smoothness)
    alpha = min(eps / smoothness, eta * sqrt(eps / hessian_smoothness))
    first = max(1, ceil(sigma**2 / eps**2))
    return Parameters(eta, alpha, max(1, ceil(eta * sigma**2 / eps**2)), first)


# -- one round ------------------------------------------------------------------------------------------------------


def rennala_round(h: ArrayLike, M: int) -> float:
    """min_m (1/m sum_{i<=m} 1/h_i)^-1 (1 + M/m): at least the exact time, at most about twice it."""
    return _prefix_minimum(h, 1.0, float(positive_int("M", M)))


def rennala_round_exact(h: ArrayLike, M: int) -> float:
    """The least T with sum_i floor(T / h_i) >= M."""
    times, target = sorted_times(h), positive_int("M", M)
    return _earliest(times, rennala_round(times, target), lambda counts: counts.sum() >= target)


def malenia_round(h: ArrayLike, M: int) -> float:
    """max h + (M/n) mean h."""
    times = sorted_times(h)
    return float(times[-1] + positive_int("M", M) / times.size * times.mean())


def malenia_round_exact(h: ArrayLike, M: int) -> float:
    """The least T at which the harmonic mean of floor(T / h_i) is at least M / n; infinite if one never answers."""
    times, target = sorted_times(h), positive_int("M", M)
    if times[-1] == inf:
        return inf
    limit = times.size**2 / target * (1 + 1e-12)
    return _earliest(times, malenia_round(times, target), lambda c: bool(c.min() >= 1) and (1.0 / c).sum() <= limit)


def synchronous_round(h: ArrayLike, M: int) -> float:
    """max h times ceil(M / n): everybody computes the same number."""
    times = sorted_times(h)
    return float(times[-1] * ceil(positive_int("M", M) / times.size))


def m_synchronous_round(h: ArrayLike, m: int, M: int) -> float:
    """The m-th smallest time, times ceil(M / m)."""
    times = sorted_times(h)
    if positive_int("m", m) > times.size:
        raise ValueError(f"m must be at most the number of workers, got m={m} with {times.size} workers")
    return float(times[m - 1] * ceil(positive_int("M", M) / m))


def rennala_counts(h: ArrayLike, M: int) -> NDArray[np.int64]:
    """``[n]`` how many gradients of each worker a round uses, in the order of ``h``, if no two end at the same time."""
    times = np.asarray(h, dtype=np.float64)
    return np.floor(rennala_round_exact(times, M) / times * (1 + 1e-12)).astype(np.int64)


def rennala_bias(h: ArrayLike, M: int, gradients: ArrayLike) -> Floats:
    """``[P]`` sum_i (M_i / M - 1/n) grad J_i, with ``gradients`` ``[n, P]``: what Rennala's mean is off by."""
    counts = rennala_counts(h, M)
    weights = counts / counts.sum() - 1.0 / counts.size
    return np.asarray(weights @ np.asarray(gradients, dtype=np.float64))


def _earliest(times: Floats, upper: float, met: Callable[[Floats], bool]) -> float:
    """The first T, a multiple of some h_i, at which ``met(floor(T / h))``, by bisection; ``met`` is monotone."""

    def counts(at: float) -> Floats:
        return np.floor(at / times * (1 + 1e-12))

    while not met(counts(upper)):
        upper *= 2.0
    lower = 0.0
    while upper - lower > 1e-10 * upper:
        middle = 0.5 * (lower + upper)
        if met(counts(middle)):
            upper = middle
        else:
            lower = middle
    # A worker's count changes within (lower, upper]: that event, exactly.
    finite = times[np.isfinite(times)]
    events = np.round(upper / finite) * finite
    return float(events[np.argmin(np.abs(events - upper))])
