"""The statistics that experiments report, against SciPy-free references."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

from statistics_of_seeds import bootstrap_interval, interquartile_mean


@pytest.mark.parametrize("n", [4, 8, 20])
def test_where_quarters_are_whole_it_is_the_mean_of_the_middle(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    middle = np.sort(values)[n // 4 : n - n // 4]
    assert interquartile_mean(values.tolist()) == pytest.approx(middle.mean())


def test_edges_count_in_part() -> None:
    # Of five values each is a fifth: the middle half takes three quarters of the second and of the fourth.
    assert interquartile_mean([1, 2, 3, 4, 100]) == pytest.approx((0.75 * 2 + 3 + 0.75 * 4) / 2.5)
    assert interquartile_mean([7.0]) == 7.0


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        low, high = bootstrap_interval(rng.normal(size=30).tolist(), samples=300, seed=trial)
        covered += low <= 0.0 <= high
    assert covered >= 48  # 95 % nominal; fewer than 48 of 60 has probability below 1e-5 at 92 %
