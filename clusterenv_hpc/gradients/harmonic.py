"""Malenia's stopping rule in exact arithmetic, at constant cost per gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

_BITS = 128
_ONE = 1 << _BITS


class HarmonicRule:
    """Whether ((1/n) sum_i 1/M_i)^-1 >= M/n, that is M sum_i 1/M_i <= n^2, as the counts M_i grow.

    The sum is kept in fixed point with 128 fractional bits, each term rounded down, so that

        fixed <= 2^128 sum_i 1/M_i <= fixed + n.

    Outside that gap the comparison of integers decides.  Inside it, which in practice means equality, the sum is taken
    in rational numbers over the distinct counts.  Either way the answer is the exact one.
    """

    def __init__(self, n_workers: int, target: int) -> None:
        self.n_workers = n_workers
        self.target = target
        self._missing = n_workers
        self._fixed = 0
        self._counts: Counter[int] = Counter()

    def change(self, before: int, now: int) -> bool:
        """A worker's count went from ``before`` to ``now`` > ``before``; whether the rule is met."""
        if before == 0:
            self._missing -= 1
        else:
            self._fixed -= _ONE // before
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
        self._fixed += _ONE // now
        self._counts[now] += 1
        return self.met()

    def met(self) -> bool:
        """The rule; a worker without a gradient counts as 1/0 = infinity."""
        if self._missing:
            return False
        bound = self.n_workers * self.n_workers * _ONE
        if self.target * self._fixed > bound:
            return False
        if self.target * (self._fixed + self.n_workers) <= bound:
            return True
        terms = [Fraction(workers, count) for count, workers in self._counts.items()]
        return self.target * _sum(terms) <= self.n_workers * self.n_workers


def _sum(terms: Sequence[Fraction]) -> Fraction:
    """By halves: keeps the denominators small for most of the way."""
    if len(terms) < 2:
        return sum(terms, Fraction(0))
    half = len(terms) // 2
    return _sum(terms[:half]) + _sum(terms[half:])
