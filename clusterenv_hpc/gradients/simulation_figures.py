"""Figures of a simulation: time to a solution against workers, against their speeds, and single runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clusterenv_hpc.gradients.simulation_settings import Settings

Cell = dict[str, Any]


def draw(settings: Settings, cells: Sequence[Cell], directory: Path) -> list[Path]:
    """Write all PNGs into ``directory``; returns their paths."""
    paths = []
    for scheme in settings.times:
        chosen = [c for c in cells if c["times"] == scheme]
        paths.append(_against_workers(settings, scheme, chosen, directory / f"workers_{scheme}.png"))
        paths.append(_curves(settings, scheme, chosen, directory / f"runs_{scheme}.png"))
    paths.append(_against_times(settings, cells, directory / "times.png"))
    return paths


def _canvas() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def _finish(figure: Any, axes: Any, path: Path) -> Path:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    return path


def _against_workers(settings: Settings, scheme: str, cells: Sequence[Cell], path: Path) -> Path:
    """Medians with 20 to 80 % bands; dashed, the theory's time of a round times one constant a method."""
    figure, axes = _canvas()
    for number, method in enumerate(settings.methods):
        line = sorted((c for c in cells if c["method"] == method and c["time"]), key=lambda c: c["workers"])
        if not line:
            continue
        colour = f"C{number}"
        n = np.array([c["workers"] for c in line])
        time = np.array([c["time"] for c in line])
        axes.plot(n, time, marker="o", color=colour, label=method)
        high = [c["high"] if c["high"] is not None else np.nan for c in line]
        axes.fill_between(n, [c["low"] for c in line], high, color=colour, alpha=0.15, linewidth=0)
        expected = np.array([c["theory_round"] or np.nan for c in line])
        scale = np.exp(np.nanmean(np.log(time / expected)))
        axes.plot(n, expected * scale, color=colour, linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("workers")
    axes.set_ylabel(f"virtual time until ||grad J|| <= {settings.epsilon:g}")
    axes.set_title(
        f"{settings.problem}, compute times: {scheme}; dashed: theory's round time, scaled", fontsize="medium"
    )
    return _finish(figure, axes, path)


def _against_times(settings: Settings, cells: Sequence[Cell], path: Path) -> Path:
    """Bars by scheme of compute times, at the largest number of workers."""
    figure, axes = _canvas()
    most = max(settings.workers)
    width = 0.8 / len(settings.methods)
    by_key = {(c["times"], c["method"]): c["time"] for c in cells if c["workers"] == most}
    for number, method in enumerate(settings.methods):
        heights = [by_key[scheme, method] or np.nan for scheme in settings.times]
        axes.bar(np.arange(len(settings.times)) + (number + 0.5) * width - 0.4, heights, width, label=method)
    axes.set_yscale("log")
    axes.set_xticks(range(len(settings.times)), settings.times)
    axes.set_xlabel(f"compute times of {most} workers")
    axes.set_ylabel(f"virtual time until ||grad J|| <= {settings.epsilon:g}")
    return _finish(figure, axes, path)


def _curves(settings: Settings, scheme: str, cells: Sequence[Cell], path: Path) -> Path:
    """||grad J|| of the first seed's runs, at the largest number of workers."""
    figure, axes = _canvas()
    most = max(settings.workers)
    for number, method in enumerate(settings.methods):
        for cell in cells:
            if cell["method"] == method and cell["workers"] == most:
                axes.plot(cell["curve"]["time"], cell["curve"]["norm"], color=f"C{number}", linewidth=1, label=method)
    axes.axhline(settings.epsilon, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=0.0)
    axes.set_yscale("log")
    axes.set_xlabel("virtual time")
    axes.set_ylabel("||grad J||")
    axes.set_title(f"{settings.problem}, {most} workers, compute times: {scheme}", fontsize="medium")
    return _finish(figure, axes, path)
