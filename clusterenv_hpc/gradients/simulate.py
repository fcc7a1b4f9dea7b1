"""``clusterenv-hpc simulate``: time to a solution of every method, against the number and the speeds of workers.

For every method, number of workers and scheme of compute times: the step that is best among ``alphas``, its median time
over the seeds until ||grad J|| <= epsilon, and what the theory expects.  Results are kept cell by cell in
``results.json``, so that a second call does only what is missing; figures are drawn from it at the end.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clusterenv_hpc.files import write_atomically
from clusterenv_hpc.gradients import theory
from clusterenv_hpc.gradients.problems import Floats, Problem, Wells, quadratic, two_tasks
from clusterenv_hpc.gradients.simulation_settings import Settings, SettingsError, describe, folder, parse
from clusterenv_hpc.gradients.simulator import Cluster, Stop, Trace, compute_times, simulate

USAGE = """\
usage: clusterenv-hpc simulate [key=value ...]

Runs the gradient methods' own rules on virtual time, for as many workers as you like, and measures how long each takes
to a solution: until ||grad J|| <= epsilon.  Worker i needs h_i for a gradient (times=) and k_i to send it or to get a
new point (communication=), while it computes the next.  Every method has the best of the steps in alphas=.

Prints the median times, and how many times as fast as sync_nigt Rennala and Malenia are, beside the ratio of the
theory's round times.  Writes into out=
  results.json     every median, 20 and 80 % quantile, seed and best step; a call that is stopped goes on from it
  workers_*.png    time against workers; dashed, the theory's time of a round, scaled to the line
  times.png        time by scheme of compute times, at the most workers
  runs_*.png       ||grad J|| over time, at the most workers

examples:
  clusterenv-hpc simulate
  clusterenv-hpc simulate workers=10000 times=sqrt methods=rennala_nigt,afedpg alphas=0.0625 seeds=1
  clusterenv-hpc simulate problem=two_tasks workers=2 times=straggler straggler=10 sigma=0.5
  clusterenv-hpc simulate communication=same transport=allreduce methods=rennala_nigt,sync_nigt

keys:
"""

Cell = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 for settings that cannot be, 1 for a folder that cannot be used."""
    words = sys.argv[1:] if argv is None else list(argv)
    if any(word in ("-h", "--help", "help") for word in words):
        print(USAGE + describe())
        return 0
    try:
        settings = parse(words)
        cells = sweep(settings, say=lambda line: print(line, file=sys.stderr, flush=True))
        from clusterenv_hpc.gradients.simulation_figures import draw  # matplotlib is slow to import

        paths = draw(settings, cells, folder(settings))
    except SettingsError as error:
        print(f"clusterenv-hpc: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"clusterenv-hpc: {place}{error.strerror or error}; choose another folder with out=", file=sys.stderr)
        return 1
    print(table(settings, cells))
    print(f"\nresults: {folder(settings) / 'results.json'}")
    print(f"figures: {', '.join(path.name for path in paths)}")
    return 0


def sweep(settings: Settings, say: Any = lambda line: None) -> list[Cell]:
    """All cells that ``settings`` ask for, in order; those in the folder's results.json are not done again."""
    path = folder(settings) / "results.json"
    known = _read(path, settings)
    folder(settings).mkdir(parents=True, exist_ok=True)
    cells = []
    wanted = list(_wanted(settings))
    for number, (scheme, n, method) in enumerate(wanted, 1):
        key = (scheme, n, method)
        if key not in known:
            known[key] = measure(settings, scheme, n, method)
            content = {"settings": settings.fixed(), "cells": list(known.values())}
            write_atomically(path, json.dumps(content, indent=1).encode())
            cell = known[key]
            say(
                f"[{number}/{len(wanted)}] times={scheme} workers={n} {method}: {_number(cell['time'])} "
                f"(alpha {cell['alpha']:g}, {cell['updates']} updates)"
            )
        cells.append(known[key])
    return cells


def measure(settings: Settings, scheme: str, n: int, method: str) -> Cell:
    """One cell: the best step, its times by seed, their median and 20 and 80 % quantiles, and the theory's times."""
    h = compute_times(scheme, n, factor=settings.straggler)
    runs = _Runs(settings, method, _problem(settings, n), _cluster(settings, scheme, h))
    alpha, traces = runs.best()
    times = [_reached(trace) for trace in traces]
    low, high = (float(x) for x in np.quantile(times, [0.2, 0.8], method="nearest"))
    return {
        "times": scheme,
        "workers": n,
        "method": method,
        "alpha": alpha,
        "time": _finite(float(np.median(times))),
        "low": _finite(low),
        "high": _finite(high),
        "by_seed": [_finite(t) for t in times],
        "updates": int(np.median([trace.updates for trace in traces])),
        "gradients": int(np.median([trace.arrivals[-1] for trace in traces])),
        "stale": int(np.median([trace.tally.stale for trace in traces])),
        "theory_round": _finite(round_time(settings, method, h)),
        "curve": _thinned(traces[0]),
    }


class _Runs:
    """The search for a method's best step, without running the hopeless ones to their end."""

    def __init__(self, settings: Settings, method: str, problem: Problem, cluster: Cluster) -> None:
        self.settings, self.method, self.problem, self.cluster = settings, method, problem, cluster

    def best(self) -> tuple[float, list[Trace]]:
        """The step with the least median time, and its runs; if no step arrives, the first and a single run."""
        limit = 2.0 * self.first_arrival()
        if limit == math.inf:
            alpha = self.settings.alphas[0]
            return alpha, [self.run(alpha, 0, self.settings.max_gradients, math.inf)]
        while True:
            found = [(alpha, self.all_seeds(alpha, limit)) for alpha in self.settings.alphas]
            alpha, traces = min(found, key=lambda pair: _median(pair[1]))
            if _median(traces) < math.inf or all(t.end != "time" for _, runs in found for t in runs):
                return alpha, traces
            limit *= 4.0  # the first seed was lucky

    def first_arrival(self) -> float:
        """The least time in which the first seed arrives, with any step; budgets grow until one does."""
        budget = 1000
        while True:
            budget = min(budget, self.settings.max_gradients)
            least = min(_reached(self.run(alpha, 0, budget, math.inf)) for alpha in self.settings.alphas)
            if least < math.inf or budget == self.settings.max_gradients:
                return least
            budget *= 4

    def all_seeds(self, alpha: float, limit: float) -> list[Trace]:
        """The runs of one step, none longer than ``limit``."""
        return [self.run(alpha, seed, self.settings.max_gradients, limit) for seed in range(self.settings.seeds)]

    def run(self, alpha: float, seed: int, gradients: int, limit: float) -> Trace:
        """One run."""
        stop = Stop(self.settings.epsilon, time=max(limit, 1e-300), gradients=gradients)
        return simulate(self.problem, self.settings.method(self.method, alpha), self.cluster, stop, seed=seed)


def round_time(settings: Settings, method: str, h: Floats) -> float:
    """What the theory gives one update, without communication; for AFedPG the mean time between two arrivals."""
    if method in ("rennala_nigt", "rennala_pg"):
        return theory.rennala_round_exact(h, settings.M)
    if method == "malenia_nigt":
        return theory.malenia_round_exact(h, settings.M)
    if method == "sync_nigt":
        return theory.synchronous_round(h, settings.M)
    if method == "m_sync_nigt":
        return theory.m_synchronous_round(h, settings.m or max(1, h.size // 2), settings.M)
    return float(1.0 / (1.0 / h).sum())


def table(settings: Settings, cells: Sequence[Cell]) -> str:
    """Median times by scheme and workers, a column a method; then Rennala's gain beside the theory's."""
    by_key = {(c["times"], c["workers"], c["method"]): c for c in cells}
    width = max(12, *(len(m) + 2 for m in settings.methods))
    lines = [
        f"virtual time until ||grad J|| <= {settings.epsilon:g} ({settings.problem}, median of {settings.seeds} seeds)",
        "",
        f"{'times':<10}{'workers':>8}" + "".join(f"{m:>{width}}" for m in settings.methods),
    ]
    gains = []
    for scheme in settings.times:
        for n in settings.workers:
            row = {m: by_key[scheme, n, m] for m in settings.methods}
            lines.append(
                f"{scheme:<10}{n:>8}" + "".join(f"{_number(row[m]['time']):>{width}}" for m in settings.methods)
            )
            for method in ("rennala_nigt", "malenia_nigt"):
                if method in row and "sync_nigt" in row and row[method]["time"] and row["sync_nigt"]["time"]:
                    measured = row["sync_nigt"]["time"] / row[method]["time"]
                    expected = row["sync_nigt"]["theory_round"] / row[method]["theory_round"]
                    gains.append(
                        f"  {scheme}, {n} workers: {method} {measured:.2f} times as fast, by the round times "
                        f"{expected:.2f}"
                    )
    if gains and settings.communication == "none":
        lines += ["", "against sync_nigt:", *gains]
    return "\n".join(lines)


def _wanted(settings: Settings) -> Iterator[tuple[str, int, str]]:
    for scheme in settings.times:
        for n in settings.workers:
            for method in settings.methods:
                yield scheme, n, method


def _problem(settings: Settings, n: int) -> Problem:
    if settings.problem == "wells":
        return Wells(settings.size, settings.sigma)
    if settings.problem == "two_tasks":
        return two_tasks(n, settings.sigma)
    return quadratic(settings.size, settings.sigma)


def _cluster(settings: Settings, scheme: str, h: Floats) -> Cluster:
    k = {"none": np.zeros(h.size), "equal": np.ones(h.size), "same": h}[settings.communication]
    return Cluster(h, k * settings.communication_scale, settings.jitter, settings.transport, settings.cancel)


def _reached(trace: Trace) -> float:
    return math.inf if trace.reached is None else trace.reached


def _median(traces: Sequence[Trace]) -> float:
    return float(np.median([_reached(trace) for trace in traces]))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,.4g}"


def _thinned(trace: Trace, points: int = 200) -> dict[str, list[float]]:
    keep = np.unique(np.linspace(0, trace.updates, min(points, trace.updates + 1)).astype(int))
    return {"time": [trace.times[i] for i in keep], "norm": [trace.norms[i] for i in keep]}


def _read(path: Path, settings: Settings) -> dict[tuple[str, int, str], Cell]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        stored = json.loads(text)
        cells = {(c["times"], c["workers"], c["method"]): c for c in stored["cells"]}
        before = stored["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path}: not a results file of simulate ({error}); choose another out=") from None
    now = json.loads(json.dumps(settings.fixed()))
    other = [key for key in now if before.get(key) != now[key]]
    if other:
        key = other[0]
        raise SettingsError(
            f"{path}: holds results for {key}={before.get(key)}, not {key}={now[key]}; choose another out="
        )
    return cells
