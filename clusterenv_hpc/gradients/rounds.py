"""What every aggregation rule shares: one round after the other, offers, refusals and counts."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clusterenv_hpc.gradients.checks import positive_int

log = logging.getLogger(__name__)


class Verdict(Enum):
    """What became of an offer."""

    ACCEPTED = "accepted"
    STALE = "stale"  # its round is over: an older version, or the rule was met before it came
    REJECTED = "rejected"  # not finite, beyond the worker's share, or from a worker that is absent


@dataclass(frozen=True)
class Tally:
    """Gradients by what became of them, in trajectories."""

    used: int = 0
    stale: int = 0
    rejected: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.used + other.used, self.stale + other.stale, self.rejected + other.rejected)


@dataclass(frozen=True)
class Aggregate:
    """The outcome of a round.

    gradient: ``[P]`` float64, the estimate.  version: of the policy it was taken at (of the oldest gradient in it).
    counts: ``[n]`` int64, gradients used of each worker.  tally: of this round.  lag: rounds begun since ``version``.
    """

    gradient: NDArray[np.float64]
    version: int
    counts: NDArray[np.int64]
    tally: Tally
    lag: int = 0


class Aggregator(ABC):
    """What every rule shares: versions, refusals, counts.  ``M``: the gradients a round needs."""

    fixed_share = False
    """Whether a worker knows beforehand how much it will be asked for, and rests after that."""
    needs_everyone = False
    """Whether a worker that is gone would change what is estimated, so that going on without it is no choice here."""

    def __init__(self, M: int) -> None:
        self.M = positive_int("M", M)
        self.not_finite: dict[int, int] = {}
        """Worker -> how many of its gradients were refused because they held NaN or infinity."""
        self.name_of: Callable[[int], str] = lambda worker: f"worker {worker}"
        """How messages name a worker."""
        self._past = Tally()
        self._used = self._stale = self._rejected = 0
        self._started = self._open = False
        self.version = -1
        """Of the round that is open, or was last."""

    @property
    def present(self) -> int:
        """How many workers the round counts on."""
        return self._present

    @property
    def round(self) -> Tally:
        """What has become of what was offered since the last :meth:`start`."""
        return Tally(self._used, self._stale, self._rejected)

    @property
    def total(self) -> Tally:
        """The same over all rounds."""
        return self._past + self.round

    # -- a round ------------------------------------------------------------------------------------------------

    def start(self, version: int, n_workers: int, *, target: int | None = None, absent: Iterable[int] = ()) -> None:
        """Open the round of ``version``; drops whatever the round before it holds.

        target: M of this round only (M_init).  absent: workers that are gone, of whom nothing is awaited.
        """
        n = positive_int("n_workers", n_workers)
        gone = np.zeros(n, dtype=bool)
        for worker in absent:
            gone[_index(worker, n)] = True
        if gone.all():
            raise ValueError(f"all {n} workers are absent: nobody is left to compute a gradient")
        if version <= self.version:
            raise ValueError(f"versions start at 0 and must increase, got {version} after {self.version}")
        if self._started and self._open:  # given up: what it had taken is never used
            self._stale, self._used = self._stale + self._used, 0
        self.target = self.M if target is None else positive_int("target", target)
        self.version, self.n_workers = int(version), n
        self.counts = np.zeros(n, dtype=np.int64)
        self._gone = gone
        self._present = n - int(gone.sum())
        self._past = self.total
        self._used = self._stale = self._rejected = 0
        self._open = self._started = True
        self._counting: bool | None = None
        self._fresh = True  # the sum still holds the last round's
        self._lag = 0
        self._begin()

    def offer(self, worker: int, version: int, gradient: ArrayLike | None = None, count: int = 1) -> Verdict:
        """Take the sum of ``count`` gradients ``[P]`` that ``worker`` took at ``version``, or only their number.

        Raises ``ValueError`` on what no sound transport delivers: an unknown worker, a version never started, a count
        below 1, a gradient of another size than the others.
        """
        if not self._started:
            raise ValueError("no round is open: call start() first")
        worker = _index(worker, self.n_workers)
        count = positive_int(f"the count that worker {worker} offers", count)
        if version > self.version:
            raise ValueError(f"worker {worker} offered version {version}, but the newest is {self.version}")
        if not self._open or self._is_stale(version):
            self._stale += count
            return Verdict.STALE
        if self._gone[worker] or self.wanted(worker) < 1:
            self._rejected += count
            return Verdict.REJECTED
        if self._counting is not None and self._counting is not (gradient is None):
            raise ValueError("a round takes either gradients or bare counts, not both")
        if gradient is not None:
            vector = np.asarray(gradient)
            if vector.ndim != 1 or not self._fits(vector.size):
                raise ValueError(
                    f"worker {worker} offered a gradient of shape {vector.shape}; expected {self._expected()}"
                )
            if not np.isfinite(vector).all():
                bad = int(np.count_nonzero(~np.isfinite(vector)))
                return self.refuse(worker, version, count, f"with {bad} of {vector.size} entries not finite")
            self._add(worker, vector, count)
        self._counting = gradient is None
        self.counts[worker] += count
        self._lag = self.version - version
        self._used += count
        self._open = not self._met(worker, count)
        return Verdict.ACCEPTED

    def refuse(self, worker: int, version: int, count: int = 1, what: str = "that is not finite") -> Verdict:
        """Drop ``count`` gradients of ``worker`` that are not finite, and say so.

        ``offer`` does it by itself; this is for transports whose workers keep their gradients.
        """
        worker = _index(worker, self.n_workers)
        times = self.not_finite[worker] = self.not_finite.get(worker, 0) + count
        # A worker that is broken for good would fill the log: speak when the number doubles.
        doubled = times.bit_length() > (times - count).bit_length()
        log.log(
            logging.WARNING if doubled else logging.DEBUG,
            "%s has a gradient %s at version %d: dropped (%d so far)", self.name_of(worker), what, version, times,
        )  # fmt: skip
        self._rejected += count
        return Verdict.REJECTED

    def ready(self) -> bool:
        """Whether the rule is met; from then on everything offered for this round is stale."""
        return self._started and not self._open

    def result(self, reduced: ArrayLike | None = None) -> Aggregate:
        """The estimate, once :meth:`ready`.  reduced: the sum of all :meth:`pack`, where only counts were offered."""
        if not self.ready():
            names = ", ".join(map(str, self.waiting_for() if self._started else ())) or "any worker"
            raise ValueError(f"{type(self).__name__} is not ready: it waits for gradients of {names}")
        if bool(self._counting) is (reduced is None):
            raise ValueError("the reduced vector must be given exactly where only counts were offered")
        gradient = self._mean() if reduced is None else self.unpack(np.asarray(reduced, dtype=np.float64))
        return Aggregate(gradient, self.version - self._lag, self.accepted_counts(), self.round, self._lag)

    # -- what a worker needs to know ----------------------------------------------------------------------------

    @abstractmethod
    def wanted(self, worker: int) -> int:
        """How many gradients ``worker`` should still compute in this round if nobody else did; 0: it may rest."""

    @abstractmethod
    def waiting_for(self) -> tuple[int, ...]:
        """The workers the rule cannot be met without, as things stand; empty where any will do, or none is needed."""

    def accepted(self, worker: int) -> int:
        """How many of ``worker``'s gradients enter the estimate."""
        return int(self.counts[_index(worker, self.n_workers)])

    def accepted_counts(self) -> NDArray[np.int64]:
        """``[n]`` :meth:`accepted` of every worker, a copy."""
        return self.counts.copy()

    def pack(self, total: ArrayLike, count: int, n_workers: int) -> NDArray[np.float64]:
        """``[P + 1]`` a worker's share of the all-reduce: its sum ``[P]`` of ``count`` gradients, and ``count``.

        ``n_workers``: how many are present.
        """
        vector = np.asarray(total, dtype=np.float64)
        return np.append(vector, float(count)) if count else np.zeros(vector.size + 1)

    def unpack(self, reduced: NDArray[np.float64]) -> NDArray[np.float64]:
        """``[P]`` the estimate from the sum of all workers' :meth:`pack`."""
        if not reduced[-1] > 0:
            raise ValueError(f"the reduced vector must hold a positive count in its last place, got {reduced[-1]}")
        return reduced[:-1] / reduced[-1]

    # -- what a rule says ---------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _met(self, worker: int, count: int) -> bool:
        """Whether the rule is met now that ``counts[worker]`` has grown by ``count``."""

    def _is_stale(self, version: int) -> bool:
        return version < self.version

    # Sums are kept in one float64 vector, allocated once; rules that weight workers apart keep more.
    _sum: NDArray[np.float64] | None = None

    def _add(self, worker: int, gradient: NDArray[Any], count: int) -> None:
        self._accumulate(gradient)

    def _accumulate(self, gradient: NDArray[Any]) -> None:
        if self._sum is None:
            self._sum = np.zeros(gradient.size)
        elif self._fresh:
            self._sum[:] = 0.0
        self._fresh = False
        self._sum += gradient

    def _mean(self) -> NDArray[np.float64]:
        assert self._sum is not None
        return self._sum / float(self.accepted_counts().sum())

    def _size(self) -> int | None:
        return None if self._sum is None else int(self._sum.size)

    def _fits(self, size: int) -> bool:
        return self._size() in (None, size)

    def _expected(self) -> str:
        return "a flat vector" if self._size() is None else f"({self._size()},)"


def _index(worker: int, n_workers: int) -> int:
    if not isinstance(worker, (int, np.integer)) or not 0 <= worker < n_workers:
        raise ValueError(f"workers are numbered 0 to {n_workers - 1}, got {worker!r}")
    return int(worker)
