"""The simulator against event lists made by hand and against the theory; with it, the statistics of the estimators.

Statistical tests use fixed seeds, and bounds that a correct estimator would miss once in about 10^6 seeds.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from clusterenv_hpc.gradients import theory
from clusterenv_hpc.gradients.aggregators import Malenia, MSynchronous, PerArrival, Rennala, Synchronous
from clusterenv_hpc.gradients.clock import Arrivals
from clusterenv_hpc.gradients.methods import METHODS, Method
from clusterenv_hpc.gradients.nigt import NIGT, Optimizer
from clusterenv_hpc.gradients.problems import Quadratic, ShortOrLong, Wells, quadratic, two_tasks
from clusterenv_hpc.gradients.simulator import JITTERS, Cluster, Stop, compute_times, run, simulate

Z = 4.76  # one-sided normal quantile of 1 - 1e-6


def chi_square_bound(degrees, z=Z):
    """Quantile of the chi-square distribution (Wilson and Hilferty 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


class Standstill(Optimizer):
    """Never moves, and keeps every estimate it is given."""

    def __init__(self, theta):
        super().__init__(theta, alpha=1.0, dtype=np.float64)
        self.estimates = []

    def _next_point(self):
        return self._theta

    def _apply(self, gradient, size):
        self.estimates.append(gradient)
        return size, False


def estimates(problem, rule, cluster, rounds, seed=0):
    optimizer = Standstill(problem.start)
    trace = run(problem, rule, optimizer, cluster, Stop(updates=rounds), seed=seed)
    assert trace.end == "updates"
    return np.array(optimizer.estimates), trace


# -- the clock ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expected", [1, 100, 1000])
def test_arrivals_come_in_order_and_none_is_lost(expected):
    rng = np.random.default_rng(0)
    queue = Arrivals(0)
    for _ in range(3):
        when = rng.integers(0, 300, 700) / 7.0
        when[rng.random(700) < 0.1] = math.inf
        queue.restart(when, expected)
        reference = [(t, w) for w, t in enumerate(when) if t < math.inf]
        heapq.heapify(reference)
        seen = set()
        for _ in range(1500):
            got = queue.pop()
            wanted = heapq.heappop(reference) if reference else None
            assert (got is None) == (wanted is None)
            if got is None:
                break
            assert got[0] == wanted[0]  # the time; among equal times any worker
            seen.add(got)
            if rng.random() < 0.5:
                later = got[0] + rng.integers(0, 50) / 7.0
                queue.push(later, got[1])
                heapq.heappush(reference, (later, got[1]))
        assert {w for _, w in seen} >= set(np.flatnonzero(when < math.inf))


def test_ties_favour_nobody():
    queue, first = Arrivals(1), []
    for _ in range(2000):
        queue.restart(np.ones(4), 1)
        first.append(queue.pop()[1])
    counts = np.bincount(first, minlength=4)
    assert ((counts - 500) ** 2 / 500).sum() < chi_square_bound(3)
    second = []
    for _ in range(2000):  # a worker's second arrival beside another's first
        queue.restart(np.array([1.0, 2.0]), 1)
        queue.push(2.0, queue.pop()[1])
        second.append(queue.pop()[1])
    assert abs(sum(second) - 1000) < Z * math.sqrt(500)


# -- event lists by hand --------------------------------------------------------------------------------------------


def times_of(rule, cluster, updates, **more):
    return run(quadratic(), rule, NIGT(np.zeros(10), alpha=0.1), cluster, Stop(updates=updates), **more).times


def test_communication_by_hand():
    one = Cluster([1.0], 0.5)
    assert times_of(Rennala(1), one, 2) == pytest.approx([0, 2, 4])  # there 0.5, work 1, back 0.5
    assert times_of(Rennala(2), one, 2) == pytest.approx([0, 3, 6])  # the second is computed while the first is sent
    slow_link = Cluster([0.1], 1.0)
    assert times_of(Rennala(2), slow_link, 1) == pytest.approx([0, 3.1])  # sends do not overlap
    reduce = Cluster([1.0, 2.0], [0.5, 0.25], transport="allreduce")
    assert times_of(Rennala(3), reduce, 2) == pytest.approx([0, 2.5, 5])  # 1, 2, 2, then the slowest link
    assert times_of(PerArrival(), one, 2) == pytest.approx([0, 2, 4])


def test_dropped_work_by_hand():
    """Workers of 1 and 1.5 s, one gradient a round, nobody cancels: 0 delivers each second, 1 is always too late."""
    trace = run(
        quadratic(), Rennala(1), NIGT(np.zeros(10), alpha=0.1), Cluster([1.0, 1.5], cancel=False), Stop(time=10.2)
    )
    assert trace.times == pytest.approx(list(range(11)))
    assert list(trace.counts) == [10, 0] and trace.tally.stale == 6 and trace.tally.used == 10
    cancelled = run(quadratic(), Rennala(1), NIGT(np.zeros(10), alpha=0.1), Cluster([1.0, 1.5]), Stop(time=10.2))
    assert cancelled.times == pytest.approx(list(range(11))) and cancelled.tally.stale == 0


def test_dropped_work_delays_its_worker_by_hand():
    """Two gradients a round, workers of 1 s and 2.5 s.  When all are waited for, worker 0 rests and is woken.  When the
    first alone is, worker 1 delivers what it began at 0 at 2.5, and what it began then at 5: both too late."""
    cluster = Cluster([1.0, 2.5], cancel=False)
    trace = run(quadratic(), Synchronous(2), NIGT(np.zeros(10), alpha=0.1), cluster, Stop(updates=3))
    assert trace.times == pytest.approx([0, 2.5, 5, 7.5]) and trace.tally.stale == 0
    trace = run(quadratic(), MSynchronous(1, 2), NIGT(np.zeros(10), alpha=0.1), cluster, Stop(updates=3))
    assert trace.times == pytest.approx([0, 2, 4, 6])
    assert trace.tally.stale == 2 and list(trace.counts) == [6, 0]


def test_afedpg_by_hand():
    """Workers of 1 s and 3.5 s: 0 is always fresh, 1 comes after 3 updates."""
    rule, lags = PerArrival(), []

    class Watching(Standstill):
        def _apply(self, gradient, size):
            lags.append(rule.result().lag)
            return size, False

    trace = run(quadratic(), rule, Watching(np.zeros(10)), Cluster([1.0, 3.5]), Stop(time=7.2))
    assert trace.times == pytest.approx([0, 1, 2, 3, 3.5, 4, 5, 6, 7, 7]) and list(trace.counts) == [7, 2]
    # worker 0 began at 3 and is met at 4 by the update of 3.5: lag 1
    assert lags[:7] == [0, 0, 0, 3, 1, 0, 0] and sorted(lags[7:]) in ([0, 4], [1, 3], [0, 5], [1, 4])


def test_work_begun_before_the_new_point_arrives_is_stale_by_hand():
    """One worker of 1 s, a link of 0.5 s, one gradient a round.  It has its point at 0.5 and delivers at 2; the next
    unit was begun at 1.5, is stale on arrival at 3, and the one after it, begun at 2.5 at the new point, comes at 4."""
    cluster = Cluster([1.0], 0.5, cancel=False)
    trace = run(quadratic(), Rennala(1), NIGT(np.zeros(10), alpha=0.1), cluster, Stop(updates=3))
    assert trace.times == pytest.approx([0, 2, 4, 6]) and trace.tally.stale == 2


def test_per_arrival_gradients_are_taken_where_the_worker_began():
    class Recording(Quadratic):
        def sample(self, worker, theta, rng):
            taken.append((worker, theta.copy()))
            return super().sample(worker, theta, rng)

    class Remembering(NIGT):
        def step(self, gradient):
            points.append(self.point.copy())
            return super().step(gradient)

    taken, points = [], []
    optimizer = Remembering(np.zeros(3), alpha=0.1, dtype=np.float64)
    run(Recording(np.ones(3), np.ones(3), 1.0), PerArrival(), optimizer, Cluster([1.0, 2.5]), Stop(time=5.1))
    assert [worker for worker, _ in taken] in ([0, 0, 1, 0, 0, 0, 1], [0, 0, 1, 0, 0, 1, 0])
    begun = {0: 0, 1: 0}
    for update, (worker, theta) in enumerate(taken):
        np.testing.assert_array_equal(theta, points[begun[worker]])
        begun[worker] = update + 1


def test_first_round_has_its_own_M():
    method = Method("rennala_nigt", M=2, M_init=6)
    trace = simulate(quadratic(), method, Cluster([1.0]), Stop(updates=3))
    assert trace.times == pytest.approx([0, 6, 8, 10])


def test_the_iterates_are_those_of_the_formulas():
    """Gradients are recorded as they are drawn; NIGT is redone by hand from their averages."""

    class Recording(Quadratic):
        def sample(self, worker, theta, rng):
            gradient, work = super().sample(worker, theta, rng)
            drawn.append((theta.copy(), gradient.copy()))
            return gradient, work

    drawn = []

    problem = Recording(np.ones(3), np.ones(3), 1.0)
    optimizer = NIGT(np.zeros(3), alpha=0.1, eta=0.2, dtype=np.float64)
    run(problem, Rennala(4), optimizer, Cluster([1.0, 1.7, 2.9]), Stop(updates=15))
    theta = previous = d = np.zeros(3)
    for t in range(15):
        point = theta + (1 - 0.2) / 0.2 * (theta - previous)
        batch = drawn[4 * t : 4 * t + 4]
        for at, _ in batch:
            np.testing.assert_allclose(at, point, rtol=1e-9, atol=1e-12)
        g = np.mean([g for _, g in batch], axis=0)
        d = g if t == 0 else 0.8 * d + 0.2 * g
        theta, previous = theta + 0.1 * d / np.linalg.norm(d), theta
    np.testing.assert_allclose(optimizer.iterate, theta, rtol=1e-9)


# -- the theory's times ---------------------------------------------------------------------------------------------

SCHEMES = ("equal", "sqrt", "linear", "straggler", "random")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "M"), [(1, 1), (1, 7), (10, 20), (10, 200), (30, 7)])
def test_simulated_rounds_take_the_exact_time(scheme, n, M):
    h = compute_times(scheme, n, factor=30.0)
    cluster = Cluster(h)
    cases = [
        (Rennala(M), theory.rennala_round_exact(h, M)),
        (Malenia(M), theory.malenia_round_exact(h, M)),
        (Synchronous(M, even=True), theory.synchronous_round(h, M)),
        (MSynchronous(max(1, n // 2), M), theory.m_synchronous_round(h, max(1, n // 2), M)),
    ]
    for rule, expected in cases:
        assert times_of(rule, cluster, 2) == pytest.approx([0, expected, 2 * expected], rel=1e-9), type(rule)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_closed_round_times_bound_the_exact_ones(scheme):
    for n in (1, 3, 10, 100):
        h = compute_times(scheme, n)
        for M in (1, 5, 20, 1000):
            exact, bound = theory.rennala_round_exact(h, M), theory.rennala_round(h, M)
            assert exact <= bound * (1 + 1e-9) and bound <= 2 * exact + 2 * h.min()
            assert theory.malenia_round_exact(h, M) <= 2 * theory.malenia_round(h, M)
            assert theory.malenia_round_exact(h, M) >= h.max()


def test_rounds_of_other_lengths_average_to_the_theory_with_random_times():
    """Exponential times: Rennala's round is a race of Poisson processes, whose mean is M / sum_i 1/h_i exactly."""
    h, M, rounds = np.array([1.0, 2.0, 5.0]), 20, 2000
    times = np.diff(times_of(Rennala(M), Cluster(h, jitter="exponential"), rounds))
    mean = M / (1 / h).sum()
    assert abs(times.mean() - mean) < Z * mean / math.sqrt(M * rounds)


@pytest.mark.parametrize("jitter", JITTERS)
def test_jitter_keeps_the_mean(jitter):
    """The spread of one time is at most its mean, so of 4,000 the mean is within Z / sqrt(4000)."""
    times = times_of(Rennala(4000), Cluster([0.5], jitter=jitter), 1)
    assert times[1] / 2000 == pytest.approx(1.0, abs=Z / math.sqrt(4000))


def test_complexities_rank_as_the_paper_says():
    table = theory.COMPLEXITIES
    eps = 0.01
    for n in (10, 100):
        h = compute_times("sqrt", n)
        rennala = table["rennala_nigt"].computation(h, eps)
        assert rennala < table["sync_nigt"].computation(h, eps) and rennala < table["rennala_pg"].computation(h, eps)
        assert table["rennala_nigt"].rounds(n, eps) < table["afedpg"].rounds(n, eps)
    # One infinitely slow worker: only Rennala's times stay finite.
    h = np.array([1.0, 1.0, math.inf])
    assert (
        math.isfinite(table["rennala_nigt"].computation(h, eps)) and table["sync_nigt"].computation(h, eps) == math.inf
    )
    # Equal times: the leading terms agree.
    h, eps = np.ones(10), 1e-6
    assert table["rennala_nigt"].computation(h, eps) == pytest.approx(table["sync_nigt"].computation(h, eps), rel=0.02)
    assert table["malenia_nigt"].computation(h, eps) == pytest.approx(table["sync_nigt"].computation(h, eps), rel=0.02)


def test_parameters_of_the_analysis():
    chosen = theory.parameters(eps=0.01, sigma=2.0, smoothness=4.0, hessian_smoothness=1.0)
    assert chosen.eta == pytest.approx(0.1 / 4) and chosen.alpha == pytest.approx(min(0.0025, 0.025 * 0.1))
    assert chosen.M_init == 40_000 and chosen.M == 1000
    assert theory.parameters(0.5, 0.0, 1.0, 100.0).M == 1


# -- estimators -----------------------------------------------------------------------------------------------------

RULES = {
    "rennala": lambda: Rennala(12),
    "malenia": lambda: Malenia(12),
    "synchronous": lambda: Synchronous(12),
    "synchronous_even": lambda: Synchronous(11, even=True),
    "m_synchronous": lambda: MSynchronous(2, 12),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("jitter", "cancel"), [("fixed", True), ("exponential", True), ("lognormal", False)])
def test_estimates_are_unbiased_with_variance_at_most_sigma2_over_M(name, jitter, cancel):
    problem = quadratic(size=10, sigma=2.0)
    cluster = Cluster([1.0, 1.3, 3.1, 7.7], jitter=jitter, cancel=cancel)
    rounds = 600
    got, _ = estimates(problem, RULES[name](), cluster, rounds, seed=3)
    errors = got - problem.gradient(problem.start)
    per_entry = 2.0**2 / 12 / 10  # of the largest variance allowed
    # If the variance were exactly sigma^2 / M these were chi-square; if it is less they are smaller still.
    assert rounds * (errors.mean(axis=0) ** 2).sum() / per_entry < chi_square_bound(10)
    scaled = (errors**2).sum() / per_entry
    assert scaled < chi_square_bound(10 * rounds)
    if name in ("rennala", "synchronous", "m_synchronous"):  # exactly M gradients: the variance is met, not only kept
        assert scaled > chi_square_bound(10 * rounds, -Z)


def test_malenia_is_unbiased_and_rennala_biased_by_what_theory_gives():
    problem = two_tasks(2, sigma=0.5)
    h, M, rounds = [1.0, 10.0], 22, 400
    each = np.array([problem.worker_gradient(w, problem.start) for w in (0, 1)])
    true = problem.gradient(problem.start)
    np.testing.assert_allclose(each.mean(axis=0), true)
    bias = theory.rennala_bias(h, M, each)
    assert np.linalg.norm(bias) > 0.5
    np.testing.assert_allclose(theory.rennala_counts(h, M), [20, 2])
    for rule, expected in [(Malenia(M), true), (Rennala(M), true + bias)]:
        got, trace = estimates(problem, rule, Cluster(h), rounds, seed=1)
        per_entry = 0.5**2 / M / 4
        assert rounds * ((got.mean(axis=0) - expected) ** 2).sum() / per_entry < chi_square_bound(4)
        wrong = true + bias if isinstance(rule, Malenia) else true
        assert rounds * ((got.mean(axis=0) - wrong) ** 2).sum() / per_entry > 100 * chi_square_bound(4)
        assert (got.var(axis=0).sum() < 4 * per_entry * chi_square_bound(4 * rounds) / (4 * rounds)) and trace.updates


@pytest.mark.parametrize("n", [2, 5])
def test_first_come_bias_with_variable_units_and_none_with_fixed_ones(n):
    """M = 1 of n workers that begin together: the first to finish."""
    rounds = 4000
    for fixed in (False, True):
        problem = ShortOrLong(fixed_length=fixed, short=0.5, long=1.0, start=0.4)
        got, _ = estimates(problem, Rennala(1), Cluster(np.ones(n)), rounds, seed=2)
        theta = problem.start
        true, first_come = problem.gradient(theta)[0], problem.first_come_mean(theta, n)
        error = got.std() / math.sqrt(rounds)
        expected, other = (true, first_come) if fixed else (first_come, true)
        assert abs(got.mean() - expected) < Z * error
        assert abs(got.mean() - other) > 2 * Z * error
    assert true > 0 > first_come  # so biased that it climbs down


# -- time to a solution ---------------------------------------------------------------------------------------------


def time_to(problem, method, cluster, epsilon, seeds=range(5), limit=20_000.0):
    found = [
        simulate(problem, method, cluster, Stop(epsilon=epsilon, time=limit, updates=20_000), seed=s).reached
        for s in seeds
    ]
    return float(np.median([math.inf if t is None else t for t in found]))


def test_with_equal_times_all_methods_take_the_same_time():
    """Each with the best of three steps; single runs spread by about 10 %."""
    problem, cluster = quadratic(sigma=1.0), Cluster(np.ones(10))
    took = {
        name: min(
            time_to(problem, Method(name, M=20, m=10, alpha=alpha), cluster, 0.05, limit=100.0)
            for alpha in (2.0**-1, 2.0**-4, 2.0**-7)
        )
        for name in METHODS
    }
    assert max(took.values()) <= 1.25 * min(took.values()), took


@pytest.mark.parametrize("problem", [quadratic(sigma=1.0), Wells(sigma=1.0)], ids=["quadratic", "wells"])
@pytest.mark.parametrize("scheme", ["sqrt", "straggler"])
def test_rennala_beats_synchronous_by_the_ratio_of_round_times(problem, scheme):
    h, M = compute_times(scheme, 10), 100
    cluster = Cluster(h)
    sync = time_to(problem, Method("sync_nigt", M=M, alpha=2.0**-4), cluster, 0.05, range(5), limit=1e7)
    rennala = time_to(problem, Method("rennala_nigt", M=M, alpha=2.0**-4), cluster, 0.05, range(5, 10), limit=1e7)
    ratio = theory.synchronous_round(h, M) / theory.rennala_round(h, M)
    assert ratio > 1.4
    assert sync / rennala == pytest.approx(ratio, rel=0.25)


def test_two_tasks_malenia_solves_sooner_than_synchronous_and_others_do_not():
    problem, h, M, epsilon = two_tasks(2, sigma=0.5), np.array([1.0, 10.0]), 20, 0.05
    cluster = Cluster(h)
    malenia = time_to(problem, Method("malenia_nigt", M=M, alpha=2.0**-5), cluster, epsilon)
    sync = time_to(problem, Method("sync_nigt", M=M, alpha=2.0**-5), cluster, epsilon)
    assert sync / malenia == pytest.approx(theory.synchronous_round(h, M) / theory.malenia_round_exact(h, M), rel=0.25)
    assert sync > 1.3 * malenia
    # First-come methods climb (10 J_1 + J_2) / 11, whose top is where ||grad J|| = spread (10/11 - 1/2).
    stuck_at = 2.0 * (10 / 11 - 1 / 2)
    for name, alpha in [("afedpg", 2.0**-8), ("afedpg", 2.0**-11), ("rennala_nigt", 2.0**-5)]:
        trace = simulate(problem, Method(name, M=M, alpha=alpha), cluster, Stop(epsilon=epsilon, time=3 * sync), seed=0)
        assert trace.reached is None
        assert np.mean(trace.norms[-len(trace.norms) // 4 :]) == pytest.approx(stuck_at, rel=0.25)


def test_ten_thousand_workers():
    """100,000 gradients of 10,000 workers; pytest's time limit is the only clock here."""
    n, M = 10_000, 1000
    h = compute_times("sqrt", n)
    trace = simulate(quadratic(), Method("rennala_nigt", M=M), Cluster(h), Stop(gradients=100_000))
    assert trace.arrivals[-1] == 100_000 and trace.updates == 100
    assert trace.times[-1] == pytest.approx(100 * theory.rennala_round_exact(h, M))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", [Method("rennala_pg", alpha=800.0), Method("malenia_nigt", alpha=1e300, eta=1e-200)])
def test_a_step_that_diverges_ends_its_run_and_no_other(method):
    trace = simulate(quadratic(), method, Cluster([1.0, 2.0]), Stop(epsilon=0.1, gradients=100_000))
    assert trace.end == "diverged" and trace.reached is None and np.isfinite(trace.norms).all()


# -- hazards --------------------------------------------------------------------------------------------------------


def test_a_worker_that_never_answers():
    cluster = Cluster([1.0, math.inf, 2.0])
    stop = Stop(updates=5)
    assert simulate(quadratic(), Method("rennala_nigt", M=6), cluster, stop).end == "updates"
    assert simulate(quadratic(), Method("afedpg"), cluster, stop).end == "updates"
    assert simulate(quadratic(), Method("m_sync_nigt", M=6, m=2), cluster, stop).end == "updates"
    for name in ("malenia_nigt", "sync_nigt"):
        trace = simulate(quadratic(), Method(name, M=6), cluster, Stop(updates=5, time=1e3))
        assert trace.waiting_for == (1,) and trace.updates == 0
        assert trace.end == ("time" if name == "malenia_nigt" else "stuck")


def test_a_worker_whose_gradients_are_nan_never_enters():
    class Broken(Quadratic):
        def sample(self, worker, theta, rng):
            gradient, work = super().sample(worker, theta, rng)
            return (gradient * np.nan if worker == 1 else gradient), work

    problem = Broken(np.ones(3), np.ones(3), 0.1)
    rule = Rennala(6)
    trace = run(problem, rule, NIGT(np.zeros(3), alpha=0.05), Cluster([1.0, 1.0, 2.0]), Stop(updates=60))
    assert trace.norms[-1] < 0.2 and trace.counts[1] == 0
    assert trace.tally.rejected == rule.not_finite[1] > 60
    trace = run(problem, PerArrival(), NIGT(np.zeros(3), alpha=0.05), Cluster([1.0, 1.0, 2.0]), Stop(updates=60))
    assert trace.counts[1] == 0 and trace.updates == 60


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cancel", [True, False])
def test_the_same_seed_gives_the_same_trace(name, cancel):
    def trace(seed):
        cluster = Cluster(compute_times("sqrt", 7), 0.1, jitter="exponential", cancel=cancel)
        return simulate(quadratic(), Method(name, M=10), cluster, Stop(updates=20), seed=seed)

    a, b, c = trace(1), trace(1), trace(2)
    assert (a.times, a.norms) == (b.times, b.norms) and a.times != c.times


def test_bad_input_is_named():
    cases = [
        (lambda: Cluster([]), "compute"),
        (lambda: Cluster([1.0, 0.0]), "compute"),
        (lambda: Cluster([1.0, math.nan]), "compute"),
        (lambda: Cluster([1.0], -1.0), "communication"),
        (lambda: Cluster([1.0], jitter="gamma"), "jitter"),
        (lambda: Cluster([1.0], transport="tcp"), "transport"),
        (lambda: Stop(), "limit"),
        (lambda: Stop(epsilon=0.1), "limit"),
        (lambda: Stop(updates=0), "updates"),
        (lambda: Method("sgd"), "method"),
        (lambda: Method("rennala_nigt", M=0), "M must"),
        (lambda: Method("rennala_nigt", M_init=-1), "M_init"),
        (lambda: Method("rennala_nigt", eta=1.5), "eta"),
        (lambda: Method("rennala_pg", alpha=0.0), "alpha"),
        (
            lambda: simulate(quadratic(), Method("afedpg"), Cluster([1.0], transport="allreduce"), Stop(updates=1)),
            "p2p",
        ),
        (lambda: compute_times("cubic", 3), "compute times"),
        (lambda: compute_times("equal", 0), "n must"),
        (lambda: theory.rennala_round([1.0, -1.0], 3), "positive"),
        (lambda: theory.rennala_round([1.0], 0), "M must"),
        (lambda: theory.m_synchronous_round([1.0], 2, 3), "m must be at most"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
