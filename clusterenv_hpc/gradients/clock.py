"""Virtual time: which of very many workers delivers next."""

from __future__ import annotations

import heapq
import math
import random

import numpy as np
from numpy.typing import NDArray


class Arrivals:
    """A queue of one next arrival per worker, cheap to fill anew for all workers at once.

    A round of Rennala takes M arrivals of n workers, often with M far below n, and then all n begin again.  So the
    first arrivals after a restart are sorted only as far as they are asked for, and only later ones go through a heap.
    Arrivals at the same time come in random order: by number, the first workers would always win.
    """

    def __init__(self, seed: int) -> None:
        self._ties = random.Random(seed)
        self._rng = np.random.default_rng(seed)
        self._later: list[tuple[float, float, int]] = []
        self._first: list[tuple[float, int]] = []  # sorted, latest first, so that pop() takes the next one
        self._unsorted: NDArray[np.float64] = np.zeros(0)
        self._workers: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._chunk = 0

    def restart(self, when: NDArray[np.float64], expected: int) -> None:
        """Forget everything; worker i arrives at ``when[i]``, infinity: never.  expected: how many may be asked for."""
        self._later.clear()
        self._first.clear()
        self._workers = self._rng.permutation(len(when))
        self._unsorted = when[self._workers]
        self._chunk = max(64, expected)

    def push(self, when: float, worker: int) -> None:
        """``worker``, which has no arrival pending, arrives at ``when``."""
        if when < math.inf:
            heapq.heappush(self._later, (when, self._ties.random(), worker))

    def pop(self) -> tuple[float, int] | None:
        """The next arrival ``(when, worker)``, or None if there is none."""
        if not self._first and len(self._unsorted):
            self._sort_more()
        if not self._later:
            return self._first.pop() if self._first else None
        gap = self._first[-1][0] - self._later[0][0] if self._first else 1.0
        if gap < 0 or (gap == 0 and self._ties.random() < 0.5):
            return self._first.pop()
        when, _, worker = heapq.heappop(self._later)
        return when, worker

    def _sort_more(self) -> None:
        count = min(self._chunk, len(self._unsorted))
        self._chunk *= 2
        if count < len(self._unsorted):
            order = np.argpartition(self._unsorted, count - 1)
            chosen, rest = order[:count], order[count:]
        else:
            chosen, rest = np.arange(count), np.zeros(0, dtype=np.int64)
        when, workers = self._unsorted[chosen], self._workers[chosen]
        order = np.argsort(-when, kind="stable")
        self._first = [
            (t, w) for t, w in zip(when[order].tolist(), workers[order].tolist(), strict=True) if t < math.inf
        ]
        self._unsorted, self._workers = self._unsorted[rest], self._workers[rest]
