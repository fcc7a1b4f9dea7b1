"""When a worker asks for weights: the rules, as tables."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from clusterenv_hpc.sync import APS, Always, EveryK, Never, SyncRule

NAN = math.nan


@pytest.mark.parametrize(
    ("rule", "lag", "kl", "asks"),
    [
        (APS(0.1), 1, 0.05, False),
        (APS(0.1), 1, 0.1, False),  # greater, not equal
        (APS(0.1), 1, math.nextafter(0.1, 1), True),
        (APS(0.1), 0, 5.0, False),  # the newest already
        (APS(0.1), -1, 5.0, False),
        (APS(0.1), 1, None, False),  # not measured
        (APS(0.1), 100, None, False),
        (APS(0.1), 101, None, True),  # the default max_lag
        (APS(0.1), 101, 0.0, True),
        (APS(0.1, max_lag=3), 3, 0.0, False),
        (APS(0.1, max_lag=3), 4, 0.0, True),
        (APS(0.1, max_lag=None), 10**9, 0.1, False),
        (APS(0.0), 1, 0.0, False),
        (APS(0.0), 1, 1e-12, True),
        (APS(0.1), 1, NAN, True),
        (APS(0.1), 1, math.inf, True),
        (APS(1e9), 1, 1e8, False),
        (Always(), 0, None, False),
        (Always(), 1, None, True),
        (Always(), 7, 0.0, True),
        (EveryK(3), 2, 9.0, False),
        (EveryK(3), 3, None, True),
        (EveryK(3), 4, None, True),
        (EveryK(1), 0, None, False),
        (Never(), 10**9, 10.0, False),
    ],
)
def test_whether_a_rule_asks(rule: SyncRule, lag: int, kl: float | None, asks: bool) -> None:
    assert rule.wants_weights(lag, kl) is asks


def test_only_aps_needs_probes() -> None:
    assert [rule.needs_divergence for rule in (APS(), Always(), EveryK(), Never())] == [True, False, False, False]


def test_rules_describe_themselves_in_plain_values() -> None:
    assert APS(0.2, max_lag=None).describe() == {"name": "aps", "delta": 0.2, "max_lag": None}
    assert Always().describe() == {"name": "always"}
    assert EveryK(4).describe() == {"name": "every_k", "k": 4}
    assert Never().describe() == {"name": "never"}


def test_rules_are_values() -> None:
    assert APS(0.1, 5) == APS(0.1, 5) != APS(0.1, 6)
    assert len({Always(), Always(), Never()}) == 2
    with pytest.raises(FrozenInstanceError):
        APS().delta = 3.0  # type: ignore[misc]


@pytest.mark.parametrize("delta", [-0.1, NAN, math.inf, "0.1", None, True, 1j])
def test_a_bad_delta_is_refused(delta: Any) -> None:
    with pytest.raises(ValueError, match="delta must be a finite number of nats, at least 0; got"):
        APS(delta)


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", True])
def test_bad_counts_of_versions_are_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="max_lag must be a whole number"):
        APS(0.1, count)
    with pytest.raises(ValueError, match="k must be a whole number"):
        EveryK(count)
