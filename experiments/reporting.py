"""What the experiments do alike: results stored, panels to draw on, a figure stored, tables told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterenv_hpc.files import write_atomically

Figure = Any
"""matplotlib's; typed loosely, so that nothing but drawing needs it."""


def store(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results`` whole: an experiment that is killed keeps what it had."""
    write_atomically(path, (json.dumps(results, indent=1, sort_keys=True) + "\n").encode())


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure of ``size`` inches and its axes ``[rows, columns]``, without a window or any state of pyplot's."""
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=size, layout="tight")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure``; returns where."""
    figure.savefig(path, dpi=130)
    return path


def tell(tables: Mapping[str, str], drawn: Path | None) -> None:
    """Print the tables by name, and where the figure is."""
    for name, text in tables.items():
        print(f"{name}\n{text}\n")
    if drawn is not None:
        print(drawn)
