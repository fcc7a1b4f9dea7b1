"""The methods by name: which aggregation rule goes with which optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from clusterenv_hpc.gradients.aggregators import Aggregator, Malenia, MSynchronous, PerArrival, Rennala, Synchronous
from clusterenv_hpc.gradients.checks import one_of, positive_int
from clusterenv_hpc.gradients.nigt import NIGT, Ascent, Optimizer, Schedule

METHODS = ("rennala_nigt", "malenia_nigt", "sync_nigt", "m_sync_nigt", "rennala_pg", "afedpg")


@dataclass(frozen=True)
class Method:
    """A method and its parameters; ``aggregator`` and ``optimizer`` build its two halves.

    M: gradients a round (afedpg takes one).  M_init: of the first round, None: M.  m: workers m_sync_nigt waits for,
    None: half of them.  eta: of NIGT.  alpha: the step; of rennala_pg it multiplies the gradient as it is.
    """

    name: str
    M: int = 20
    M_init: int | None = None
    m: int | None = None
    eta: Schedule = 0.1
    alpha: Schedule = field(default=2.0**-5)

    def __post_init__(self) -> None:
        one_of("method", self.name, METHODS)
        positive_int("M", self.M)
        if self.M_init is not None:
            positive_int("M_init", self.M_init)
        self.optimizer(np.zeros(1))

    def aggregator(self, n_workers: int) -> Aggregator:
        """A fresh aggregation rule for ``n_workers``."""
        if self.name in ("rennala_nigt", "rennala_pg"):
            return Rennala(self.M)
        if self.name == "malenia_nigt":
            return Malenia(self.M)
        if self.name == "sync_nigt":
            return Synchronous(self.M, even=True)
        if self.name == "afedpg":
            return PerArrival()
        return MSynchronous(self.m if self.m is not None else max(1, n_workers // 2), self.M)

    def optimizer(self, theta: ArrayLike, dtype: DTypeLike = np.float32) -> Optimizer:
        """A fresh optimizer that starts at ``theta`` ``[P]``."""
        if self.name == "rennala_pg":
            return Ascent(theta, alpha=self.alpha, dtype=dtype)
        return NIGT(theta, alpha=self.alpha, eta=self.eta, dtype=dtype)

    def target(self, updates: int) -> int:
        """M of the round after ``updates`` updates."""
        return self.M_init if updates == 0 and self.M_init is not None and self.name != "afedpg" else self.M
