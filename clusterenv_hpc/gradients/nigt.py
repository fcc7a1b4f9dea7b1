"""Normalised ascent with implicit gradient transport (NIGT), on flat vectors.

Formulas: "Asynchronous Policy Gradient Aggregation for Efficient Distributed Reinforcement Learning"
(arXiv 2509.24305); implicit gradient transport itself is due to Arnold et al. 2019 and, with normalised steps,
Cutkosky and Mehta 2020.

An optimizer is asked for two points.  ``point`` is where the next gradient must be sampled *and* differentiated;
``iterate`` is the solution so far.  They differ: NIGT extrapolates.  All optimizers here *ascend*.

    optimizer = NIGT(theta, alpha=0.01, eta=0.1)
    while ...:
        optimizer.step(gradient_estimate_at(optimizer.point))
    solution = optimizer.iterate

Points are float32 (``dtype``) for the wire; what accumulates over the run is kept in float64: a step of norm ``alpha``
spread over a million parameters is smaller than a float32 ulp of many of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray

from clusterenv_hpc.gradients.checks import positive_float, unit_fraction

Schedule = float | Callable[[int], float]
"""A constant, or a function of the number of updates done before (0, 1, ...)."""


class DivergedError(ValueError):
    """The weights have left the range of their floating-point type."""


@dataclass(frozen=True)
class Step:
    """What one update did: its index, ||gradient||, ||direction||, and whether the iterate moved at all."""

    update: int
    gradient_norm: float
    direction_norm: float
    moved: bool


def norm(vector: NDArray[np.float64]) -> float:
    """Euclidean norm whose squares neither overflow nor underflow."""
    with np.errstate(over="ignore", under="ignore"):
        plain = math.sqrt(float(np.dot(vector, vector)))
    if 1e-140 < plain < 1e150:
        return plain
    largest = float(np.max(np.abs(vector)))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    scaled = vector / largest
    return largest * math.sqrt(float(np.dot(scaled, scaled)))


def normalise(vector: NDArray[np.float64], out: NDArray[np.float64]) -> float:
    """Write ``vector / ||vector||`` (zeros for zeros) into ``out``; return ``||vector||``, possibly infinite."""
    length = norm(vector)
    if length == 0.0:
        out[:] = 0.0
    elif 1e-140 < length < math.inf:
        np.divide(vector, length, out=out)
    else:  # 1 / length is not representable well, or length is not: take the largest entry out first
        np.divide(vector, np.max(np.abs(vector)), out=out)
        out /= norm(out)
    return length


def polynomial(initial: float, power: float, offset: int = 1) -> Callable[[int], float]:
    """Schedule ``initial / (t + offset)^power``, as AFedPG's analysis uses for its step and its momentum."""
    positive_float("initial", initial)
    positive_float("offset", offset)

    def value(update: int) -> float:
        return float(initial / (update + offset) ** power)

    return value


def linear(initial: float, final: float, updates: int) -> Callable[[int], float]:
    """Schedule from ``initial`` to ``final`` over ``updates``, constant afterwards."""
    positive_float("updates", updates)

    def value(update: int) -> float:
        return initial + (final - initial) * min(1.0, update / updates)

    return value


class Optimizer(ABC):
    """Common ground of the update rules: the iterate, the point to sample at, and what is checked.

    theta: ``[P]``, finite, the first iterate.  alpha: step length > 0, a constant or a schedule.
    dtype: of ``point`` and ``iterate``; float64 where a reference wants all digits.
    """

    def __init__(self, theta: ArrayLike, *, alpha: Schedule, dtype: DTypeLike = np.float32) -> None:
        start = _flat("theta", theta)
        if start.size == 0:
            raise ValueError("theta must have at least one parameter, got none")
        if not np.isfinite(start).all():
            raise ValueError(f"theta must be finite, {np.count_nonzero(~np.isfinite(start))} of {start.size} are not")
        self._theta = start
        self._alpha = alpha
        self._dtype = np.dtype(dtype)
        self._updates = 0
        positive_float("alpha", _at(alpha, 0))
        self._point: NDArray[Any] | None = None

    @property
    def updates(self) -> int:
        """How many updates have been made."""
        return self._updates

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return int(self._theta.size)

    @property
    def alpha(self) -> float:
        """The step length of the next update."""
        return positive_float(f"alpha (at update {self._updates})", _at(self._alpha, self._updates))

    @property
    def iterate(self) -> NDArray[Any]:
        """``[P]`` theta_t, a copy."""
        return self._theta.astype(self._dtype)

    @property
    def point(self) -> NDArray[Any]:
        """``[P]`` where the next gradient is to be taken.  Read-only, and never changed by later updates.

        Raises ``DivergedError`` where it does not fit into ``dtype``.
        """
        if self._point is None:
            with np.errstate(over="ignore"):
                exact = self._next_point()
                point = exact.astype(self._dtype)
            if not np.isfinite(point).all():
                raise DivergedError(
                    f"the point after {self._updates} updates does not fit into {self._dtype}: its largest entry is "
                    f"{np.max(np.abs(exact)):.3g}; choose {self._remedy}"
                )
            self._point = point
            self._point.flags.writeable = False
        return self._point

    def step(self, gradient: ArrayLike) -> Step:
        """Make one update with ``gradient`` ``[P]``, an estimate of the gradient at ``point``.

        Raises ``ValueError``, and changes nothing, if it has another size or is not finite.
        """
        g = _flat("gradient", gradient)
        if g.size != self.size:
            raise ValueError(f"gradient must have {self.size} entries as theta has, got {g.size}")
        size = norm(g)
        if not math.isfinite(size) and not np.isfinite(g).all():
            bad = int(np.count_nonzero(~np.isfinite(g)))
            raise ValueError(
                f"gradient must be finite, {bad} of {g.size} entries are not; update {self._updates} was not made"
            )
        direction_norm, moved = self._apply(g, size)
        self._point = None
        self._updates += 1
        return Step(self._updates - 1, size, direction_norm, moved)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything a later ``load_state_dict`` needs, as plain tensors; no hyper-parameters."""
        state = {"theta": self._theta, **self._memory()}
        tensors = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
        return {**tensors, "updates": torch.tensor(self._updates, dtype=torch.int64)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from ``state``; raises ``ValueError``, and changes nothing, if it does not fit."""
        wanted = {"theta", "updates", *self._memory()}
        if set(state) != wanted:
            raise ValueError(f"a {type(self).__name__} state has the entries {sorted(wanted)}, got {sorted(state)}")
        loaded = {name: _flat(name, state[name]) for name in wanted - {"updates"}}
        for name, array in loaded.items():
            if array.size != self.size or not np.isfinite(array).all():
                raise ValueError(f"{name} must have {self.size} finite entries, got {array.size}")
        updates = int(state["updates"])
        if updates < 0:
            raise ValueError(f"updates must not be negative, got {updates}")
        self._theta, self._updates, self._point = loaded.pop("theta"), updates, None
        self._remember(loaded)

    _remedy = "a smaller alpha"

    @abstractmethod
    def _next_point(self) -> NDArray[np.float64]: ...

    @abstractmethod
    def _apply(self, gradient: NDArray[np.float64], size: float) -> tuple[float, bool]:
        """Move ``self._theta`` in place; return the norm of the direction and whether it moved."""

    def _memory(self) -> dict[str, NDArray[np.float64]]:
        return {}

    def _remember(self, memory: dict[str, NDArray[np.float64]]) -> None:
        return None


class NIGT(Optimizer):
    """The outer loop of Rennala NIGT and Malenia NIGT (arXiv 2509.24305).

        theta~_t = theta_t + ((1 - eta) / eta) (theta_t - theta_{t-1})
        d_t = (1 - eta) d_{t-1} + eta g_t,   d_0 = g_0,   g_t taken at theta~_t
        theta_{t+1} = theta_t + alpha d_t / ||d_t||,   theta_{t+1} = theta_t where ||d_t|| = 0

    ``eta`` in (0, 1]; 1 is normalised ascent without momentum.  With one gradient per arrival instead of an aggregate,
    and schedules for ``alpha`` and ``eta``, this is also the server's rule of AFedPG (arXiv 2404.08003).
    """

    _remedy = "a smaller alpha, or a larger eta"

    def __init__(
        self, theta: ArrayLike, *, alpha: Schedule, eta: Schedule = 0.1, dtype: DTypeLike = np.float32
    ) -> None:
        super().__init__(theta, alpha=alpha, dtype=dtype)
        self._eta = eta
        _extrapolation(_at(eta, 0), 0)
        self._direction = np.zeros(self.size)
        self._move = np.zeros(self.size)  # theta_t - theta_{t-1}, as it was made

    @property
    def eta(self) -> float:
        """The momentum weight of the next update."""
        return unit_fraction(f"eta (at update {self._updates})", _at(self._eta, self._updates))

    @property
    def direction(self) -> NDArray[np.float64]:
        """``[P]`` d_t of the last update, a copy; zeros before the first."""
        return self._direction.copy()

    def _next_point(self) -> NDArray[np.float64]:
        return self._theta + _extrapolation(self.eta, self._updates) * self._move

    def _apply(self, gradient: NDArray[np.float64], size: float) -> tuple[float, bool]:
        alpha, eta = self.alpha, self.eta
        if self._updates == 0:
            self._direction[:] = gradient
        else:
            self._direction *= 1.0 - eta
            self._direction += eta * gradient
        length = normalise(self._direction, out=self._move)
        self._move *= alpha
        self._theta += self._move
        return length, length > 0.0

    def _memory(self) -> dict[str, NDArray[np.float64]]:
        return {"direction": self._direction, "move": self._move}

    def _remember(self, memory: dict[str, NDArray[np.float64]]) -> None:
        self._direction, self._move = memory["direction"], memory["move"]


class Ascent(Optimizer):
    """Plain stochastic gradient ascent, theta_{t+1} = theta_t + alpha g_t: the outer loop of Rennala PG."""

    def _next_point(self) -> NDArray[np.float64]:
        return self._theta

    def _apply(self, gradient: NDArray[np.float64], size: float) -> tuple[float, bool]:
        with np.errstate(over="ignore"):
            moved = self._theta + self.alpha * gradient
        if not np.isfinite(moved).all():
            raise DivergedError(
                f"the iterate would overflow at update {self._updates} (||gradient|| = {size:.3g}, "
                f"alpha = {self.alpha:.3g}); choose a smaller alpha"
            )
        self._theta = moved
        return size, size > 0.0


def _at(schedule: Schedule, update: int) -> float:
    return schedule(update) if callable(schedule) else schedule


def _extrapolation(eta: float, update: int) -> float:
    value = unit_fraction("eta" if update == 0 else f"eta (at update {update})", eta)
    factor = (1.0 - value) / value
    if not math.isfinite(factor):
        raise ValueError(f"eta must not be so small that (1 - eta) / eta overflows, got {value!r}")
    return factor


def _flat(name: str, values: ArrayLike | torch.Tensor) -> NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    array = np.array(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a flat vector, got shape {array.shape}")
    return array
