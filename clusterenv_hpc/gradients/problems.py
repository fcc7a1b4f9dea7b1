"""Stochastic gradients whose exact mean is known, to measure methods by.  All are to be maximised."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clusterenv_hpc.gradients.checks import positive_float, positive_int

Floats = NDArray[np.float64]


class Problem(Protocol):
    """J = (1/n) sum_i J_i, seen through noisy gradients of worker i's own J_i.

    variable_work: whether the time of a sample depends on it; if so it is drawn when the work begins.
    """

    start: Floats
    variable_work: bool

    def sample(self, worker: int, theta: Floats, rng: np.random.Generator) -> tuple[Floats, float]:
        """A gradient ``[P]`` of J_worker at ``theta``, and the work it was, in units of h_worker."""
        ...

    def gradient(self, theta: Floats) -> Floats:
        """``[P]`` grad J, exact."""
        ...


class Quadratic:
    """J_i = -1/2 sum_j a_ij (theta_j - b_ij)^2, with isotropic noise of variance sigma^2 in all.

    curvature, optimum: ``[P]`` for all workers alike, or ``[n, P]``.
    """

    variable_work = False

    def __init__(self, curvature: ArrayLike, optimum: ArrayLike, sigma: float, start: ArrayLike | None = None) -> None:
        a, b = np.broadcast_arrays(np.atleast_2d(curvature), np.atleast_2d(optimum))
        self.curvature, self.optimum = a.astype(np.float64), b.astype(np.float64)
        self.sigma = float(sigma)
        size = a.shape[1]
        self.start = np.zeros(size) if start is None else np.asarray(start, dtype=np.float64)
        self._scale = self.sigma / np.sqrt(size)
        self._slope = self.curvature.mean(axis=0)
        self._pull = (self.curvature * self.optimum).mean(axis=0)
        self._tasks = len(self.curvature)

    def sample(self, worker: int, theta: Floats, rng: np.random.Generator) -> tuple[Floats, float]:
        noise = rng.standard_normal(theta.size)
        noise *= self._scale
        noise += self.worker_gradient(worker, theta)
        return noise, 1.0

    def worker_gradient(self, worker: int, theta: Floats) -> Floats:
        """``[P]`` grad J_worker, exact."""
        row = worker if self._tasks > 1 else 0
        return self.curvature[row] * (self.optimum[row] - theta)

    def gradient(self, theta: Floats) -> Floats:
        return self._pull - self._slope * theta


def quadratic(size: int = 10, sigma: float = 1.0, condition: float = 10.0, distance: float = 1.0) -> Quadratic:
    """Curvatures from 1 down to 1 / condition; the start is ``distance`` away, equally in all coordinates."""
    positive_int("size", size)
    curvature = np.geomspace(1.0, 1.0 / positive_float("condition", condition), size)
    return Quadratic(curvature, np.full(size, positive_float("distance", distance) / np.sqrt(size)), sigma)


def two_tasks(n: int = 2, sigma: float = 0.5, spread: float = 2.0) -> Quadratic:
    """Two kinds of J_i in turn, whose optima are ``spread`` apart on either side of the best of their mean.

    A method that gives them weights w and 1 - w ends where ||grad J|| = spread |w - 1/2|, and does not pass by the best
    of the mean on its way there.
    """
    optimum = np.zeros((positive_int("n", n), 4))
    optimum[::2, 0], optimum[1::2, 0], optimum[:, 1] = spread / 2, -spread / 2, 1.0
    return Quadratic(np.ones(4), optimum, sigma)


class Wells:
    """J = -sum_j x_j^2 / (1 + x_j^2), x = theta - best: smooth, bounded and, beyond |x_j| = 1/sqrt(3), not concave.

    L_g = 2, L_h < 4.7.  Isotropic noise of variance sigma^2 in all.
    """

    variable_work = False

    def __init__(self, size: int = 10, sigma: float = 1.0, distance: float = 4.0) -> None:
        self.start = np.zeros(positive_int("size", size))
        self.best = np.full(size, distance / np.sqrt(size))
        self.sigma = float(sigma)
        self._scale = self.sigma / np.sqrt(size)

    def sample(self, worker: int, theta: Floats, rng: np.random.Generator) -> tuple[Floats, float]:
        return self.gradient(theta) + self._scale * rng.standard_normal(theta.size), 1.0

    def gradient(self, theta: Floats) -> Floats:
        x = theta - self.best
        return np.asarray(-2.0 * x / (1.0 + x * x) ** 2)


class ShortOrLong:
    """The smallest environment in which episodes end early: why work units need a fixed length.

    One decision with probability p = sigmoid(theta) of the long episode of ``horizon`` steps and return ``long``, else
    one step and return ``short``.  The gradient is the REINFORCE one.  fixed_length=False: a unit takes as long as its
    episode, so that first-come aggregation sees short episodes too often; True: every unit takes ``horizon`` steps.
    """

    def __init__(
        self, *, fixed_length: bool, short: float = 0.0, long: float = 1.0, horizon: int = 10, start: float = 0.0
    ) -> None:
        self.start = np.array([float(start)])
        self.variable_work = not fixed_length
        self.short, self.long, self.horizon = short, long, positive_int("horizon", horizon)

    def sample(self, worker: int, theta: Floats, rng: np.random.Generator) -> tuple[Floats, float]:
        p = self.probability(theta)
        chose_long = rng.random() < p
        gradient = np.array([self.long * (1.0 - p) if chose_long else -self.short * p])
        return gradient, 1.0 if chose_long or not self.variable_work else 1.0 / self.horizon

    def probability(self, theta: Floats) -> float:
        """Of the long episode."""
        return float(1.0 / (1.0 + np.exp(-theta[0])))

    def gradient(self, theta: Floats) -> Floats:
        p = self.probability(theta)
        return np.array([p * (1.0 - p) * (self.long - self.short)])

    def first_come_mean(self, theta: Floats, n: int) -> float:
        """The mean of the first of n units, all begun together, where a unit takes as long as its episode."""
        p = self.probability(theta)
        return p**n * self.long * (1.0 - p) - (1.0 - p**n) * self.short * p
