"""Sampling in proportion to priorities that change, in O(log n)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class SumTree:
    """``size`` numbers of at least 0, all 0 at first; every inner node holds the sum of the two below it.

    A number is changed, and one is found by a point on the line of their running sums, by walking one path of the
    tree; here a whole batch walks level by level, each level a few NumPy operations.  Sums are computed anew from the
    level below and never by adding differences, so no rounding error builds up.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._depth = max(1, (size - 1).bit_length())
        self._first = 1 << self._depth
        self._nodes = np.zeros(2 * self._first)  # the root is node 1, the children of node i are 2i and 2i + 1

    @property
    def total(self) -> float:
        """The sum of all."""
        return float(self._nodes[1])

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self._nodes.nbytes

    @property
    def leaves(self) -> NDArray[np.float64]:
        """The numbers ``[size]``; a view, not to be written to."""
        return self._nodes[self._first : self._first + self.size]

    def set(self, index: NDArray[np.int64], values: NDArray[Any] | float) -> None:
        """Set the numbers at ``index [B]``; where it names one several times, the last value counts."""
        if not len(index):
            return
        nodes, node = self._nodes, index + self._first
        nodes[node] = values
        for _ in range(self._depth):
            node = node >> 1
            # Neighbours have the same parent: in an ascending batch, such as a rollout, half of each level is enough.
            node = node[np.concatenate(([True], node[1:] != node[:-1]))]
            left = node << 1
            nodes[node] = nodes[left] + nodes[left + 1]

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """For each point ``[B]`` in [0, total): the number in whose stretch of the line it lies, never one of 0."""
        nodes, node, points = self._nodes, np.ones(len(points), np.int64), points.copy()
        for _ in range(self._depth):
            left = node << 1
            below = nodes[left]
            # A point that rounding has put at the very end must not walk into an empty subtree.
            right = (points >= below) & (nodes[left + 1] > 0)
            points -= np.where(right, below, 0.0)
            node = left + right
        return node - self._first

    def sample(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """``uniform [B]`` in [0, 1): one draw from each of B equal stretches of the line (stratified).

        Number i is drawn ``B * value_i / total`` times in expectation.  Raises ``ValueError`` where all are 0.
        """
        if not self.total > 0:
            raise ValueError("nothing can be drawn: every priority is 0")
        count = len(uniform)
        return self.find((np.arange(count) + uniform) * (self.total / count))
