"""A cluster on virtual time: the aggregators and optimizers themselves, driven by simulated workers.

A worker i computes a gradient in h_i (times its jitter), and sends it in k_i while it computes the next; its sends do
not overlap.  Once the rule is met the new point reaches worker i after k_i more.  With ``transport="allreduce"``
gradients stay with the workers, counts travel free, and a round ends with one reduction of max_i k_i, after which all
have the new point.  With ``cancel`` a worker gives up its work when a new point reaches it; without, it finishes, and
the gradient is dropped by its version.  Per-arrival updates (AFedPG): only the worker whose gradient came gets the new
point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clusterenv_hpc.gradients.aggregators import Aggregator, PerArrival, Synchronous, Tally
from clusterenv_hpc.gradients.checks import one_of, positive_int
from clusterenv_hpc.gradients.clock import Arrivals
from clusterenv_hpc.gradients.methods import Method
from clusterenv_hpc.gradients.nigt import DivergedError, Optimizer, norm
from clusterenv_hpc.gradients.problems import Floats, Problem

JITTERS = ("fixed", "uniform", "exponential", "lognormal")


@dataclass(frozen=True)
class Cluster:
    """Workers by their compute times h ``[n]`` > 0 (infinity: never answers) and communication times k ``[n]`` >= 0.

    jitter: the distribution of one gradient's time around h_i, with mean h_i: fixed; uniform on [h/2, 3h/2];
    exponential; lognormal with a standard deviation of h.
    """

    compute: ArrayLike
    communication: ArrayLike = 0.0
    jitter: str = "fixed"
    transport: str = "p2p"
    cancel: bool = True

    def __post_init__(self) -> None:
        h = np.array(self.compute, dtype=np.float64)
        if h.ndim != 1 or h.size == 0 or not (h > 0).all():
            raise ValueError(f"compute must be a vector of positive times, one a worker, got {self.compute!r}")
        k = np.array(np.broadcast_to(np.asarray(self.communication, dtype=np.float64), h.shape))
        if not ((k >= 0) & np.isfinite(k)).all():
            raise ValueError(f"communication must be finite times of at least 0, got {self.communication!r}")
        one_of("jitter", self.jitter, JITTERS)
        one_of("transport", self.transport, ("p2p", "allreduce"))
        object.__setattr__(self, "compute", h)
        object.__setattr__(self, "communication", k)

    @property
    def h(self) -> Floats:
        """``[n]`` the mean compute times."""
        return np.asarray(self.compute)

    @property
    def k(self) -> Floats:
        """``[n]`` the communication times."""
        return np.asarray(self.communication)

    def __len__(self) -> int:
        return int(self.h.size)


def compute_times(kind: str, n: int, *, factor: float = 100.0, seed: int = 0) -> Floats:
    """``[n]`` by scheme: equal (1), sqrt (sqrt(i), i = 1 .. n), linear (i), straggler (1, and one ``factor``), random
    (uniform on (0.02, 2))."""
    positive_int("n", n)
    i = np.arange(1.0, n + 1.0)
    schemes: dict[str, Callable[[], Floats]] = {
        "equal": lambda: np.ones(n),
        "sqrt": lambda: np.sqrt(i),
        "linear": lambda: i,
        "straggler": lambda: np.where(i == n, float(factor), 1.0),
        "random": lambda: np.random.default_rng(seed).uniform(0.02, 2.0, n),
    }
    return schemes[one_of("compute times", kind, tuple(schemes))]()


@dataclass(frozen=True)
class Stop:
    """When a simulation ends: at ||grad J(theta)|| <= epsilon, or after so much; at least one must be given."""

    epsilon: float | None = None
    time: float = math.inf
    gradients: float = math.inf
    updates: float = math.inf

    def __post_init__(self) -> None:
        for name in ("epsilon", "time", "gradients", "updates"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"stop.{name} must be above 0, got {value!r}")
        if self.time == self.gradients == self.updates == math.inf:
            raise ValueError("a limit is needed on time, gradients or updates: epsilon may never be reached")


@dataclass
class Trace:
    """What happened.  Lists have one entry per update, and one for the start.

    reached: the virtual time at which epsilon was, or None.  end: epsilon, time, gradients, updates, stuck (nothing
    will arrive any more), or diverged (out of float64's range).  waiting_for: the workers the open round needs.
    counts: ``[n]`` gradients used of each.
    """

    times: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    reached: float | None = None
    end: str = ""
    waiting_for: tuple[int, ...] = ()
    tally: Tally = field(default_factory=Tally)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def updates(self) -> int:
        """How many updates were made."""
        return len(self.times) - 1


def simulate(problem: Problem, method: Method, cluster: Cluster, stop: Stop, seed: int = 0) -> Trace:
    """``method`` on ``problem`` with ``cluster``'s workers, from ``problem.start``.  Same arguments, same trace."""
    return run(
        problem,
        method.aggregator(len(cluster)),
        method.optimizer(problem.start, dtype=np.float64),
        cluster,
        stop,
        seed=seed,
        target=method.target,
    )


def run(
    problem: Problem,
    aggregator: Aggregator,
    optimizer: Optimizer,
    cluster: Cluster,
    stop: Stop,
    *,
    seed: int = 0,
    target: Callable[[int], int] | None = None,
) -> Trace:
    """The same with an aggregator and an optimizer of one's own.  target: updates made -> M of the next round."""
    if isinstance(aggregator, PerArrival) and cluster.transport != "p2p":
        raise ValueError("per-arrival updates have no all-reduce form: use transport=p2p")
    return _Run(problem, aggregator, optimizer, cluster, stop, seed, target).go()


class _Run:
    def __init__(
        self,
        problem: Problem,
        aggregator: Aggregator,
        optimizer: Optimizer,
        cluster: Cluster,
        stop: Stop,
        seed: int,
        target: Callable[[int], int] | None,
    ) -> None:
        self.problem, self.rule, self.optimizer, self.stop = problem, aggregator, optimizer, stop
        self.target = target
        self.n = len(cluster)
        self.h = cluster.h
        self.jitter = cluster.jitter
        self.reduces = cluster.transport == "allreduce"
        self.uplink = np.zeros(self.n) if self.reduces else cluster.k
        self.round_cost = float(cluster.k.max()) if self.reduces else 0.0
        self.single = isinstance(aggregator, PerArrival)
        self.cancel = cluster.cancel and not self.single
        seeds = np.random.SeedSequence(seed).spawn(3)
        self.noise, self.speed = np.random.default_rng(seeds[0]), np.random.default_rng(seeds[1])
        self.arrivals = Arrivals(int(seeds[2].generate_state(1)[0]))
        self.version = 0
        self.told = 0.0  # when the newest point was sent out
        self.computed = np.zeros(self.n)  # when a worker's unit in flight is, or was, ready to send
        self.free = np.zeros(self.n)  # when its link is
        self.versions = np.zeros(self.n, dtype=np.int64)
        self.points: list[Floats] = [optimizer.point] * self.n
        self.resting = np.zeros(self.n, dtype=bool)
        self.drawn: list[tuple[Floats, float] | None] = [None] * self.n
        self.trace = Trace(counts=np.zeros(self.n, dtype=np.int64))

    def go(self) -> Trace:
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                return self.until_the_end()
        except DivergedError:
            return self.finish("diverged")

    def until_the_end(self) -> Trace:
        trace, stop, received = self.trace, self.stop, 0
        self.open_round(0.0)
        self.begin_all(0.0)
        if self.record(0.0, 0):
            return self.finish("epsilon")
        while True:
            arrival = self.arrivals.pop()
            if arrival is None:
                return self.finish("stuck")
            now, worker = arrival
            if now > stop.time:
                return self.finish("time")
            received += 1
            gradient = self.take(worker)
            self.rule.offer(worker, int(self.versions[worker]), gradient)
            if not self.rule.ready():
                if self.single:  # not finite, or too old: the worker gets the newest point all the same
                    self.begin(worker, now + float(self.uplink[worker]), self.version, self.point)
                else:
                    self.proceed(worker)
            else:
                done = self.rule.result()
                if not np.isfinite(done.gradient).all():  # the sum of finite ones
                    return self.finish("diverged")
                trace.counts += done.counts
                self.optimizer.step(done.gradient)
                self.version += 1
                now += self.round_cost
                self.open_round(now)
                if self.record(now, received):
                    return self.finish("epsilon")
                if trace.updates >= stop.updates:
                    return self.finish("updates")
                self.go_on(now, worker)
            if received >= stop.gradients:
                return self.finish("gradients")

    def open_round(self, now: float) -> None:
        target = None if self.target is None else self.target(self.optimizer.updates)
        self.rule.start(self.version, self.n, target=target)
        self.point: Floats = self.optimizer.point
        self.told = now

    def record(self, now: float, received: int) -> bool:
        size = norm(self.problem.gradient(self.optimizer.iterate))
        self.trace.times.append(now)
        self.trace.norms.append(size)
        self.trace.arrivals.append(received)
        if self.stop.epsilon is not None and size <= self.stop.epsilon:
            self.trace.reached = now
            return True
        return False

    def finish(self, end: str) -> Trace:
        self.trace.end = end
        self.trace.waiting_for = self.rule.waiting_for()
        self.trace.tally = self.rule.total
        return self.trace

    # -- workers --------------------------------------------------------------------------------------------------

    def begin_all(self, now: float) -> None:
        """Every worker begins at the newest point as soon as that reaches it; whatever it was doing is given up."""
        begin = now + self.uplink
        self.versions[:] = self.version
        work = self.speeds(self.n)
        if self.problem.variable_work:
            work *= np.array([self.draw(w, self.point)[1] for w in range(self.n)])
        self.computed = begin + self.h * work
        when = self.computed + self.uplink
        if isinstance(self.rule, Synchronous):
            self.resting = self.rule.shares == 0
            when[self.resting] = math.inf
        self.free = when
        if not self.cancel:
            self.points = [self.point] * self.n
        self.arrivals.restart(when, expected=self.rule.target)

    def go_on(self, now: float, worker: int) -> None:
        """A new point has just been made from ``worker``'s arrival."""
        if self.single:
            self.begin(worker, now + float(self.uplink[worker]), self.version, self.point)
        elif self.cancel:
            self.begin_all(now)
        else:
            self.resting[worker] = self.rule.fixed_share
            for idle in {worker, *np.flatnonzero(self.resting).tolist()}:
                self.proceed(idle)

    def proceed(self, worker: int) -> None:
        """``worker`` delivered, or rested: its next unit, at the newest point it knows by then, if one is wanted."""
        ready = float(self.computed[worker])
        known = self.told + float(self.uplink[worker])
        rested = bool(self.resting[worker])
        self.resting[worker] = False
        if self.rule.wanted(worker) == 0:
            self.resting[worker] = True
        elif self.versions[worker] == self.version:
            self.begin(worker, ready, self.version, self.point)
        elif rested or known <= ready:
            self.begin(worker, max(ready, known), self.version, self.point)
        else:  # the new point is still on its way: what it begins now will be stale
            self.begin(worker, ready, int(self.versions[worker]), self.points[worker])

    def begin(self, worker: int, at: float, version: int, point: Floats) -> None:
        self.versions[worker] = version
        if not self.cancel:
            self.points[worker] = point
        work = 1.0 if self.jitter == "fixed" else float(self.speeds(1)[0])
        if self.problem.variable_work:
            work *= self.draw(worker, point)[1]
        done = at + float(self.h[worker]) * work
        self.computed[worker] = done
        self.free[worker] = max(float(self.free[worker]), done) + float(self.uplink[worker])
        self.arrivals.push(float(self.free[worker]), worker)

    def take(self, worker: int) -> Floats:
        if self.problem.variable_work:
            drawn = self.drawn[worker]
            assert drawn is not None
            return drawn[0]
        point = self.point if self.cancel else self.points[worker]
        return self.problem.sample(worker, point, self.noise)[0]

    def draw(self, worker: int, point: Floats) -> tuple[Floats, float]:
        drawn = self.drawn[worker] = self.problem.sample(worker, point, self.noise)
        return drawn

    def speeds(self, count: int) -> Floats:
        if self.jitter == "fixed":
            return np.ones(count)
        if self.jitter == "uniform":
            return self.speed.uniform(0.5, 1.5, count)
        if self.jitter == "exponential":
            return self.speed.standard_exponential(count)
        spread = math.log(2.0)  # of a lognormal with mean 1 and standard deviation 1
        return self.speed.lognormal(-spread / 2, math.sqrt(spread), count)
