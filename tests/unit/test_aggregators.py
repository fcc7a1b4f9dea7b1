"""Stopping rules at the boundary, what is refused, and that both transports' forms give one estimate."""

from __future__ import annotations

import logging
import math
from fractions import Fraction

import numpy as np
import pytest

from clusterenv_hpc.gradients.aggregators import (
    Malenia,
    MSynchronous,
    PerArrival,
    Rennala,
    Synchronous,
    Verdict,
)
from clusterenv_hpc.gradients.harmonic import HarmonicRule

ACCEPTED, STALE, REJECTED = Verdict.ACCEPTED, Verdict.STALE, Verdict.REJECTED


def started(rule, n_workers, version=0, **more):
    rule.start(version, n_workers, **more)
    return rule


def vector(*values):
    return np.array(values, dtype=np.float32)


# -- Rennala ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("M", "n"), [(1, 1), (5, 1), (1, 4), (3, 8), (20, 4)])
def test_rennala_stops_at_exactly_M(M, n):
    rule = started(Rennala(M), n)
    rng = np.random.default_rng(M)
    for k in range(M):
        assert not rule.ready()
        assert rule.wanted(0) == M - k
        assert rule.offer(int(rng.integers(n)), 0, vector(k, 1)) is ACCEPTED
    assert rule.ready() and rule.wanted(0) == 0
    assert rule.offer(0, 0, vector(1e9, 1e9)) is STALE
    done = rule.result()
    np.testing.assert_allclose(done.gradient, [(M - 1) / 2, 1.0])
    assert done.counts.sum() == M and done.tally.used == M and done.tally.stale == 1


def test_rennala_goes_on_without_a_silent_worker_and_waits_for_nobody():
    rule = started(Rennala(3), 3)
    assert rule.waiting_for() == ()
    for _ in range(3):
        rule.offer(1, 0, vector(1))
    assert rule.ready() and list(rule.result().counts) == [0, 3, 0]


def test_the_last_worker_left_is_waited_for():
    rule = started(Rennala(2), 3, absent=[0, 2])
    assert rule.waiting_for() == (1,)
    assert rule.offer(0, 0, vector(1)) is REJECTED


# -- Malenia ----------------------------------------------------------------------------------------------------


def harmonic_rule_holds(counts, M):
    if min(counts) == 0:
        return False
    return Fraction(len(counts)) / sum(Fraction(1, c) for c in counts) >= Fraction(M, len(counts))


def test_malenia_rule_agrees_with_rational_arithmetic_at_every_event():
    rng = np.random.default_rng(0)
    boundaries = 0
    for _ in range(400):
        n, M = int(rng.integers(1, 7)), int(rng.integers(1, 40))
        rule, counts = started(Malenia(M), n), [0] * n
        speeds = rng.random(n) ** 2 + 0.05
        speeds /= speeds.sum()
        for _ in range(5000):
            worker, c = int(rng.choice(n, p=speeds)), int(rng.integers(1, 4))
            rule.offer(worker, 0, vector(1.0), c)
            counts[worker] += c
            assert rule.ready() == harmonic_rule_holds(counts, M), (n, M, counts)
            if rule.ready():
                boundaries += Fraction(n * n) == M * sum(Fraction(1, k) for k in counts)
                break
        else:
            pytest.fail("the rule was never met")
    assert boundaries > 20  # equality, where floating point errs, was among the cases


@pytest.mark.parametrize("counts", [[3, 3, 3], [2, 6, 6, 3], [10, 15, 6], [49, 49], [2, 3, 7, 42, 43 * 42]])
def test_malenia_stops_at_equality_and_not_one_below(counts):
    """M is chosen as the least whole number for which the rule holds with equality, where there is one."""
    total = sum(Fraction(1, c) for c in counts)
    limit = Fraction(len(counts) ** 2) / total
    for M in (math.floor(limit), math.floor(limit) + 1):
        rule = started(Malenia(M), len(counts))
        for worker, c in enumerate(counts):
            assert not rule.ready()
            rule.offer(worker, 0, vector(c), c)
        assert rule.ready() == (limit >= M)


def test_harmonic_rule_where_float64_is_wrong():
    # n = 49 workers with 49 gradients each: sum of 1/49 in float64 is not 1.
    assert sum([1 / 49] * 49) != 1.0
    for n, count in [(49, 49), (3, 10), (10, 3), (6, 7), (1000, 77)]:
        equal = HarmonicRule(n, n * count)
        above = HarmonicRule(n, n * count + 1)
        for _ in range(n):
            met, met_above = equal.change(0, count), above.change(0, count)
        assert met and not met_above


def test_harmonic_rule_within_128_bits_of_the_boundary():
    big = 10**45
    # (1/2)(1/a + 1/b) against 2/M: a = b = big is equality for M = 2 big; one more gradient asked is one too many.
    for extra, expected in [(0, True), (1, False)]:
        rule = HarmonicRule(2, 2 * big + extra)
        rule.change(0, big)
        assert rule.change(0, big) is expected


@pytest.mark.parametrize(("n", "M"), [(4, 1), (4, 3), (4, 4), (5, 2)])
def test_malenia_with_no_more_than_n_needs_one_of_each(n, M):
    rule = started(Malenia(M), n)
    for _ in range(50):
        rule.offer(0, 0, vector(1))
    for worker in range(1, n):
        assert not rule.ready()
        assert rule.waiting_for() == tuple(range(worker, n))
        rule.offer(worker, 0, vector(1))
    assert rule.ready()


def test_malenia_averages_workers_not_gradients():
    rule = started(Malenia(4), 2)
    for value in (1.0, 2.0, 3.0, 6.0):
        rule.offer(0, 0, vector(value, 0.0))
    assert rule.waiting_for() == (1,)
    rule.offer(1, 0, vector(10.0, 4.0))
    assert rule.waiting_for() == (1,)  # harmonic mean 1.6 < 2
    rule.offer(1, 0, vector(20.0, 8.0))
    assert rule.ready() and rule.waiting_for() == ()
    np.testing.assert_allclose(rule.result().gradient, [(3.0 + 15.0) / 2, 3.0])


def test_malenia_with_one_worker_is_a_plain_average_of_M():
    rule = started(Malenia(3), 1)
    for value in (1.0, 2.0, 6.0):
        assert not rule.ready()
        rule.offer(0, 0, vector(value))
    assert rule.result().gradient == pytest.approx([3.0])


def test_malenia_leaves_an_absent_worker_out_of_the_objective():
    rule = started(Malenia(2), 3, absent=[1])
    rule.offer(0, 0, vector(1.0))
    assert rule.waiting_for() == (2,)
    rule.offer(2, 0, vector(5.0))
    assert rule.result().gradient == pytest.approx([3.0])


# -- Synchronous, m-synchronous, per arrival ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("M", "n", "even", "shares"),
    [(8, 4, False, [2, 2, 2, 2]), (10, 4, False, [3, 3, 2, 2]), (10, 4, True, [3, 3, 3, 3]),
     (3, 5, False, [1, 1, 1, 0, 0]), (3, 5, True, [1] * 5), (7, 1, False, [7])],
)  # fmt: skip
def test_synchronous_shares(M, n, even, shares):
    rule = started(Synchronous(M, even=even), n)
    assert list(rule.shares) == [rule.wanted(w) for w in range(n)] == shares
    assert rule.waiting_for() == tuple(w for w in range(n) if shares[w])
    order = [w for w in range(n) for _ in range(shares[w])]
    for w in order:
        assert not rule.ready()
        assert rule.offer(w, 0, vector(w)) is ACCEPTED
    assert rule.ready() and rule.waiting_for() == ()
    assert rule.result().gradient == pytest.approx([np.mean(order)])


def test_synchronous_refuses_more_than_a_share():
    rule = started(Synchronous(4), 2)
    for _ in range(2):
        rule.offer(0, 0, vector(1.0))
    assert rule.offer(0, 0, vector(99.0)) is REJECTED
    assert rule.waiting_for() == (1,)
    rule.offer(1, 0, vector(3.0), 2)
    done = rule.result()
    assert done.gradient == pytest.approx([5 / 4]) and done.tally.rejected == 1


def test_synchronous_deals_an_absent_workers_share_to_the_others():
    rule = started(Synchronous(5), 3, absent=[0])
    assert list(rule.shares) == [0, 3, 2]


def test_m_synchronous_takes_the_first_m_and_drops_what_the_others_began():
    rule = started(MSynchronous(2, 4), 4)
    assert rule.wanted(3) == 2
    buffer = vector(1.0)
    for worker, value in [(3, 1.0), (0, 50.0), (3, 2.0), (1, 5.0)]:
        buffer[:] = value  # the caller's buffer is its own again after the call
        assert rule.offer(worker, 0, buffer) is ACCEPTED
    assert rule.offer(3, 0, vector(7.0)) is REJECTED
    assert not rule.ready()
    rule.offer(1, 0, vector(6.0))
    done = rule.result()
    assert done.gradient == pytest.approx([(1 + 2 + 5 + 6) / 4])
    assert list(done.counts) == [0, 2, 0, 2]
    assert (done.tally.used, done.tally.stale, done.tally.rejected) == (4, 1, 1)
    assert rule.accepted(0) == 0 and rule.accepted(1) == 2


def test_m_synchronous_boundaries():
    with pytest.raises(ValueError, match="m must be at most"):
        MSynchronous(3, 4).start(0, 2)
    rule = started(MSynchronous(1, 3), 1)
    for _ in range(3):
        assert not rule.ready() and rule.waiting_for() == (0,)
        rule.offer(0, 0, vector(1.0))
    assert rule.ready()
    rule = started(MSynchronous(3, 2), 3)  # M < m: one each
    assert rule.wanted(0) == 1


def test_per_arrival_takes_every_gradient_with_its_lag():
    rule = started(PerArrival(), 3, version=5)
    assert rule.offer(2, 1, vector(4.0), 2) is ACCEPTED
    done = rule.result()
    assert done.gradient == pytest.approx([2.0]) and (done.version, done.lag) == (1, 4)
    rule = started(PerArrival(max_lag=3), 3, version=5)
    assert rule.offer(2, 1, vector(4.0)) is STALE
    assert rule.offer(2, 2, vector(4.0)) is ACCEPTED


# -- what every rule does -----------------------------------------------------------------------------------------

ROUND_RULES = {
    "rennala": lambda: Rennala(6),
    "malenia": lambda: Malenia(6),
    "synchronous": lambda: Synchronous(6),
    "synchronous_even": lambda: Synchronous(5, even=True),
    "m_synchronous": lambda: MSynchronous(2, 6),
}


def play(rule, version, n, rng, bare=False):
    """One round of unit gradients in a random order; returns the gradients each worker computed, in its order."""
    rule.start(version, n)
    computed = [[] for _ in range(n)]
    while not rule.ready():
        worker = int(rng.integers(n))
        if rule.wanted(worker):
            gradient = rng.normal(size=5).astype(np.float32)
            computed[worker].append(gradient)
            rule.offer(worker, version, None if bare else gradient)
    return computed


@pytest.mark.parametrize("name", ROUND_RULES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_counts_and_one_reduction_give_what_single_gradients_give(name, n):
    single, counting = ROUND_RULES[name](), ROUND_RULES[name]()
    for version in range(20):
        computed = play(single, version, n, np.random.default_rng(version))
        play(counting, version, n, np.random.default_rng(version), bare=True)
        reduced = np.zeros(6)
        for worker in range(n):
            kept = computed[worker][: counting.accepted(worker)]
            total = np.sum(kept, axis=0, dtype=np.float64) if kept else np.zeros(5)
            reduced += counting.pack(total, len(kept), n)
        a, b = single.result(), counting.result(reduced)
        np.testing.assert_allclose(b.gradient, a.gradient, rtol=1e-12)
        np.testing.assert_array_equal(a.counts, b.counts)
        assert a.tally == b.tally


@pytest.mark.parametrize("name", ROUND_RULES)
def test_a_stale_gradient_never_enters(name):
    """The same arrivals with and without stale and broken gradients between them: one result, bit for bit."""
    clean, dirty = ROUND_RULES[name](), ROUND_RULES[name]()
    rng = np.random.default_rng(1)
    stale = broken = 0
    for version in range(1, 10):
        clean.start(version, 3)
        dirty.start(version, 3)
        while not clean.ready():
            worker, gradient = int(rng.integers(3)), rng.normal(size=5).astype(np.float32)
            assert dirty.offer(worker, version - 1, 1e6 * gradient) is STALE
            stale += 1
            if dirty.wanted(worker):
                assert dirty.offer(worker, version, gradient * np.float32(np.nan)) is REJECTED
                broken += 1
            clean.offer(worker, version, gradient)
            dirty.offer(worker, version, gradient)
        assert dirty.ready()
        np.testing.assert_array_equal(clean.result().gradient, dirty.result().gradient)
    assert dirty.total.stale - clean.total.stale == stale
    assert sum(dirty.not_finite.values()) == broken


@pytest.mark.parametrize("name", ROUND_RULES)
def test_a_gradient_that_is_not_finite_is_named_dropped_and_counted(name, caplog):
    rule = started(ROUND_RULES[name](), 2, version=7)
    with caplog.at_level(logging.WARNING):
        for bad in (math.nan, math.inf, -math.inf):
            assert rule.offer(1, 7, vector(0.0, bad, 1.0), 2) is REJECTED
    assert rule.not_finite == {1: 6} and rule.round.rejected == 6 and rule.round.used == 0
    assert "worker 1" in caplog.text and "1 of 3 entries" in caplog.text and "version 7" in caplog.text
    while not rule.ready():
        for worker in (0, 1):
            rule.offer(worker, 7, vector(1.0, 2.0, 3.0))
    np.testing.assert_allclose(rule.result().gradient, [1.0, 2.0, 3.0])


def test_a_worker_that_only_sends_nan_is_the_one_waited_for():
    rule = started(Malenia(4), 2)
    for _ in range(5):
        rule.offer(0, 0, vector(1.0))
        rule.offer(1, 0, vector(math.nan))
    assert not rule.ready() and rule.waiting_for() == (1,) and rule.not_finite == {1: 5}


def test_a_batch_past_M_is_used_whole():
    rule = started(Rennala(5), 2)
    rule.offer(0, 0, vector(4.0), 4)
    rule.offer(1, 0, vector(8.0), 4)
    done = rule.result()
    assert done.gradient == pytest.approx([12 / 8]) and done.tally.used == 8


def test_first_round_with_its_own_M():
    rule = started(Rennala(2), 1, target=4)
    for k in range(4):
        assert rule.ready() == (k >= 4)
        rule.offer(0, 0, vector(1.0))
    assert rule.ready()
    rule.start(1, 1)
    rule.offer(0, 1, vector(1.0))
    rule.offer(0, 1, vector(3.0))
    assert rule.result().gradient == pytest.approx([2.0])


@pytest.mark.parametrize("name", ROUND_RULES)
def test_a_round_given_up_is_not_used(name):
    rule = started(ROUND_RULES[name](), 2)
    rule.offer(0, 0, vector(100.0))
    rule.start(1, 2)
    while not rule.ready():
        for worker in (0, 1):
            rule.offer(worker, 1, vector(1.0))
    assert rule.result().gradient == pytest.approx([1.0])
    assert rule.total.stale >= 1 and rule.total.used == rule.round.used


def test_sums_do_not_lose_small_float32_gradients():
    assert np.float32(1e8) + np.float32(1.0) == np.float32(1e8)
    rule = started(Rennala(1001), 1)
    rule.offer(0, 0, vector(1e8))
    for _ in range(1000):
        rule.offer(0, 0, vector(1.0))
    assert rule.result().gradient[0] * 1001 == pytest.approx(1e8 + 1e3, abs=1e-3)


@pytest.mark.parametrize("kind", [Rennala, Malenia, Synchronous, lambda M: MSynchronous(1, M)])
@pytest.mark.parametrize("M", [0, -1, 1.5, "3", None, True, math.nan])
def test_M_that_is_not_a_positive_whole_number_is_refused(kind, M):
    with pytest.raises(ValueError, match="M must be"):
        kind(M)


def test_what_no_sound_transport_delivers_is_an_error():
    rule = Rennala(3)
    with pytest.raises(ValueError, match="start"):
        rule.offer(0, 0, vector(1.0))
    with pytest.raises(ValueError, match="not ready"):
        rule.result()
    rule.start(2, 2)
    cases = [
        (lambda: rule.offer(2, 2, vector(1.0)), "numbered 0 to 1"),
        (lambda: rule.offer(-1, 2, vector(1.0)), "numbered 0 to 1"),
        (lambda: rule.offer(0, 3, vector(1.0)), "newest is 2"),
        (lambda: rule.offer(0, 2, vector(1.0), 0), "at least 1"),
        (lambda: rule.offer(0, 2, vector(1.0), 1.5), "whole number"),
        (lambda: rule.offer(0.5, 2, vector(1.0)), "numbered 0 to 1"),
        (lambda: rule.offer(0, 2, np.ones((2, 2))), r"shape \(2, 2\)"),
        (lambda: rule.start(2, 2), "must increase"),
        (lambda: rule.start(3, 0), "n_workers"),
        (lambda: rule.start(3, 2, absent=[0, 1]), "absent"),
        (lambda: rule.start(3, 2, target=0), "target"),
        (lambda: PerArrival().offer(0, 0), "all-reduce"),
        (lambda: MSynchronous(0, 3), "m must be"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    rule.offer(0, 2, vector(1.0, 2.0))
    with pytest.raises(ValueError, match=r"shape \(3,\); expected \(2,\)"):
        rule.offer(0, 2, vector(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="not both"):
        rule.offer(0, 2)
    with pytest.raises(ValueError, match="not ready"):
        rule.result()
    rule.offer(0, 2, vector(1.0, 2.0), 2)
    with pytest.raises(ValueError, match="reduced"):
        rule.result(np.ones(3))
    np.testing.assert_allclose(rule.result().gradient, [2 / 3, 4 / 3])
