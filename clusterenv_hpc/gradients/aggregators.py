"""When to stop collecting gradients, and how to average them: state machines that know no clock and no wire.

A learner, or a simulator, drives one by events:

    rule = Rennala(20)
    rule.start(version, n_workers=8)            # theta of this version was broadcast
    while not rule.ready():
        rule.offer(worker, version, gradient)   # in the order gradients arrive
    estimate = rule.result().gradient

A *gradient* is the sum of ``count`` gradients of fixed-length trajectories, one by default.  A round never uses a
gradient of another version, or one that is not finite; both are dropped, counted and named.  An offer whose count goes
past M is used whole and the average taken over what was used: when a round ends depends on counts alone, so the
estimator stays unbiased, and with single gradients a round ends with exactly M.

All-reduce transport: the workers keep their sums to themselves and only counts are offered (``gradient=None``).  When
the rule is met every worker hands ``pack(sum, accepted(worker), n_workers)`` to one sum-reduction, and
``result(reduced)`` gives the estimate that the same gradients sent one by one would have given.

Formulas: Rennala and Malenia aggregation as in arXiv 2509.24305; per-arrival as in AFedPG (arXiv 2404.08003).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clusterenv_hpc.gradients.checks import positive_int
from clusterenv_hpc.gradients.harmonic import HarmonicRule
from clusterenv_hpc.gradients.rounds import Aggregate, Aggregator, Tally, Verdict

__all__ = [
    "Aggregate", "Aggregator", "MSynchronous", "Malenia", "PerArrival", "Rennala", "Synchronous", "Tally", "Verdict",
]  # fmt: skip


class Rennala(Aggregator):
    """Stop at sum_i M_i = M, whoever they come from; the average of all.  Biased towards fast workers if J_i differ:
    its mean is sum_i E[M_i / M] grad J_i."""

    def wanted(self, worker: int) -> int:
        return max(0, self.target - self._received) if self._open else 0

    def waiting_for(self) -> tuple[int, ...]:
        present = np.flatnonzero(~self._gone)
        return tuple(int(w) for w in present) if self._open and len(present) == 1 else ()

    def _begin(self) -> None:
        self._received = 0

    def _met(self, worker: int, count: int) -> bool:
        self._received += count
        return self._received >= self.target


class Malenia(Aggregator):
    """Stop when the harmonic mean of the counts reaches M / n: ((1/n) sum_i 1/M_i)^-1 >= M/n, 1/0 = infinity.

    The estimate is (1/n) sum_i (1/M_i) sum_j g_ij: unbiased for J = (1/n) sum_i J_i, with variance
    (sigma^2 / n^2) sum_i 1/M_i <= sigma^2 / M.  Compared in exact arithmetic.  Keeps one float64 vector per worker.
    An absent worker is left out of J, and of n.
    """

    needs_everyone = True

    def wanted(self, worker: int) -> int:
        share = -(-self.target // self._present)
        return max(1, share - int(self.counts[worker])) if self._open else 0

    def waiting_for(self) -> tuple[int, ...]:
        """Workers without a gradient; once all have one, those below M/n, who keep the harmonic mean down."""
        if not self._open:
            return ()
        missing = np.flatnonzero((self.counts == 0) & ~self._gone)
        if not len(missing):
            missing = np.flatnonzero((self.counts * self._present < self.target) & ~self._gone)
        return tuple(int(w) for w in missing)

    def pack(self, total: ArrayLike, count: int, n_workers: int) -> NDArray[np.float64]:
        packed = super().pack(total, count, n_workers)
        packed[:-1] /= float(max(count, 1)) * positive_int("n_workers", n_workers)
        return packed

    def unpack(self, reduced: NDArray[np.float64]) -> NDArray[np.float64]:
        return reduced[:-1].copy()

    def _begin(self) -> None:
        self._harmonic = HarmonicRule(self._present, self.target)

    def _met(self, worker: int, count: int) -> bool:
        now = int(self.counts[worker])
        return self._harmonic.change(now - count, now)

    _sums: NDArray[np.float64] | None = None

    def _add(self, worker: int, gradient: NDArray[Any], count: int) -> None:
        if self._sums is None or self._sums.shape != (self.n_workers, gradient.size):
            self._sums = np.zeros((self.n_workers, gradient.size))
        if self.counts[worker] == 0:
            self._sums[worker] = gradient
        else:
            self._sums[worker] += gradient

    def _mean(self) -> NDArray[np.float64]:
        assert self._sums is not None
        counted = self.counts * float(self._present)
        weights = np.divide(1.0, counted, out=np.zeros(self.n_workers), where=~self._gone)
        return np.asarray(weights @ self._sums)

    def _size(self) -> int | None:
        return None if self._sums is None else int(self._sums.shape[1])


class Synchronous(Aggregator):
    """Every worker computes a share fixed beforehand, and all are waited for.

    ``even=False``: exactly M; worker i computes M // n, and the first M mod n of them one more, so that with M < n the
    last n - M rest.  ``even=True``: every worker computes ceil(M / n), at least M in all, and nobody rests; where the
    J_i differ this is the unbiased one.
    """

    fixed_share = True
    needs_everyone = True

    def __init__(self, M: int, *, even: bool = False) -> None:
        super().__init__(M)
        self.even = bool(even)

    @property
    def shares(self) -> NDArray[np.int64]:
        """``[n]`` how many gradients each worker owes in this round, a copy."""
        return self._shares.copy()

    def wanted(self, worker: int) -> int:
        return max(0, int(self._shares[worker] - self.counts[worker])) if self._open else 0

    def waiting_for(self) -> tuple[int, ...]:
        return tuple(int(w) for w in np.flatnonzero(self.counts < self._shares))

    def _begin(self) -> None:
        here = np.flatnonzero(~self._gone)
        each, rest = divmod(self.target, self._present)
        self._shares = np.zeros(self.n_workers, dtype=np.int64)
        self._shares[here] = each
        if self.even:
            self._shares[here] += rest > 0
        else:
            self._shares[here[:rest]] += 1
        self._owing = int(np.count_nonzero(self._shares))

    def _met(self, worker: int, count: int) -> bool:
        now = int(self.counts[worker])
        self._owing -= now >= self._shares[worker] > now - count
        return self._owing == 0


class MSynchronous(Aggregator):
    """Wait for the first ``m`` workers to finish a share of ceil(M / m) gradients each; at least M in all.

    What the others have begun is dropped, as stale.  First-come, so biased towards fast workers if the J_i differ.
    """

    fixed_share = True

    def __init__(self, m: int, M: int) -> None:
        super().__init__(M)
        self.m = positive_int("m", m)

    def wanted(self, worker: int) -> int:
        return max(0, self._share - int(self.counts[worker])) if self._open else 0

    def waiting_for(self) -> tuple[int, ...]:
        unfinished = np.flatnonzero((self.counts < self._share) & ~self._gone)
        return tuple(int(w) for w in unfinished) if self._open and len(unfinished) == self._owing else ()

    def accepted_counts(self) -> NDArray[np.int64]:
        return np.where(self.counts >= self._share, self.counts, 0)

    def accepted(self, worker: int) -> int:
        return int(self.accepted_counts()[worker])

    def _begin(self) -> None:
        if self.m > self.n_workers:
            raise ValueError(f"m must be at most the number of workers, got m={self.m} with {self.n_workers} workers")
        self._owing = min(self.m, self._present)
        self._share = -(-self.target // self._owing)
        self._partial: dict[int, NDArray[np.float64]] = {}

    def _met(self, worker: int, count: int) -> bool:
        now = int(self.counts[worker])
        self._owing -= now >= self._share > now - count
        if self._owing:
            return False
        dropped = int(self.counts.sum() - self.accepted_counts().sum())
        self._used -= dropped
        self._stale += dropped
        return True

    def _add(self, worker: int, gradient: NDArray[Any], count: int) -> None:
        begun = self._partial.pop(worker, None)
        whole = gradient if begun is None else np.add(begun, gradient, out=begun)
        if self.counts[worker] + count >= self._share:
            self._accumulate(whole)
        else:
            self._partial[worker] = whole.astype(np.float64, copy=begun is None)


class PerArrival(Aggregator):
    """AFedPG's rule (arXiv 2404.08003): every gradient is an update, however stale; no round, and no all-reduce.

    max_lag: refuse, as stale, what is more than so many versions old; None refuses nothing.
    Biased towards fast workers if the J_i differ.
    """

    fixed_share = True

    def __init__(self, max_lag: int | None = None) -> None:
        super().__init__(1)
        self.max_lag = None if max_lag is None else positive_int("max_lag", max_lag)

    def wanted(self, worker: int) -> int:
        return 1

    def waiting_for(self) -> tuple[int, ...]:
        return ()

    def offer(self, worker: int, version: int, gradient: ArrayLike | None = None, count: int = 1) -> Verdict:
        if gradient is None:
            raise ValueError("per-arrival updates need every gradient: there is no all-reduce form")
        return super().offer(worker, version, gradient, count)

    def _begin(self) -> None:
        return None

    def _met(self, worker: int, count: int) -> bool:
        return True

    def _is_stale(self, version: int) -> bool:
        return self.max_lag is not None and version < self.version - self.max_lag
