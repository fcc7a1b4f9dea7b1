"""Figures of one run, or of several laid over each other, from their metrics.jsonl."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv_hpc.run.config import ConfigError
from clusterenv_hpc.run.metrics import read_metrics
from clusterenv_hpc.run.run_dir import RunDir, find


@dataclass(frozen=True)
class Figure:
    """One PNG: a metric over environment steps."""

    name: str
    metric: str
    label: str


FIGURES = (
    Figure("return", "return_mean", "mean return of recent episodes"),
    Figure("requests", "weight_requests", "weight requests so far"),
    Figure("lag", "lag_mean", "version lag of the data (versions)"),
    Figure("kl", "kl_mean", "KL(local || learner) the workers measured (nats)"),
    Figure("steps_per_s", "steps_per_s", "environment steps per second"),
)

GRADIENT_FIGURES = (
    Figure("direction", "direction_norm", "||d||, the direction of the step"),
    Figure("gradients", "gradients_used", "gradients used so far"),
    Figure("dropped", "gradients_dropped", "gradients that came too late or were refused"),
)
"""What runs of the gradient methods have beside or in place of these."""


def series(records: Sequence[dict[str, Any]], metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Environment steps and values of one metric; NaN, a gap in the line, where a record has no such number."""
    steps, values = (np.array([_number(record.get(key)) for record in records]) for key in ("env_steps", metric))
    return steps, values


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan


def draw(runs: Sequence[RunDir], directory: Path, prefix: str = "") -> list[Path]:
    """Writes one PNG for each figure whose metric a run has into ``directory``, every run a line; returns their paths.

    Raises ConfigError where a run has no metrics yet, or the directory cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    loaded = {}
    for run in runs:
        try:
            loaded[run] = read_metrics(run.metrics)
        except OSError as error:
            raise ConfigError(f"{run.metrics}: cannot be read: {error.strerror}; the run has no metrics yet") from error
        if not loaded[run]:
            raise ConfigError(f"{run.metrics}: holds no update yet; expected a run that has made one")
    paths = []
    known = {name for records in loaded.values() for record in records for name in record}
    for figure in (figure for figure in (*FIGURES, *GRADIENT_FIGURES) if figure.metric in known):
        canvas = Canvas(figsize=(7, 4.2), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.subplots()
        for run, records in loaded.items():
            steps, values = series(records, figure.metric)
            axes.plot(
                steps, values, label=run.path.resolve().name, linewidth=1.5, marker="." if len(steps) < 3 else None
            )
        axes.set_xlabel("environment steps")
        axes.set_ylabel(figure.label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        path = directory / f"{prefix}{figure.name}.png"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            canvas.savefig(path, dpi=130)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written: {error.strerror}; choose another place with --out"
            ) from error
        paths.append(path)
    return paths


def main(argv: list[str]) -> int:
    """``clusterenv-hpc plot``."""
    parser = argparse.ArgumentParser(
        prog="clusterenv-hpc plot",
        description="Draw return, weight requests, version lag, KL and steps/s as PNG, into the run's directory.",
        epilog="Example: clusterenv-hpc plot lunarlander-ppo-aps-s1 lunarlander-ppo-always-s1 --out comparison",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's directory, its name below runs/ or the start of it, or latest"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; default: the (first) run's directory")
    args = parser.parse_args(argv)
    runs = [find(text) for text in args.runs]
    prefix = "compare_" if len(runs) > 1 and args.out is None else ""
    for path in draw(runs, args.out or runs[0].path, prefix):
        print(path)
    return 0
