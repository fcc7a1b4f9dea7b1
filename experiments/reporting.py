"""What the experiments do alike: a command line, results stored, panels to draw on, a figure stored, tables told."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterenv_hpc.files import write_atomically

Figure = Any
"""matplotlib's; typed loosely, so that nothing but drawing needs it."""


def command_line(doc: str | None, resumable: bool = False) -> argparse.ArgumentParser:
    """A parser whose ``--help`` is the script's own docstring, as it is laid out there.

    ``resumable`` adds ``--for``, kept as ``seconds``: a script that goes on where it was may be given little time.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if resumable:
        told = "begin nothing more after so long (default: all that is missing is done)"
        parser.add_argument("--for", type=float, default=float("inf"), dest="seconds", metavar="SECONDS", help=told)
    return parser


def settings(parser: argparse.ArgumentParser, words: list[str], **defaults: Any) -> dict[str, Any]:
    """``key=value`` words over ``defaults``, whose types they take; an unknown or unreadable one ends the program."""
    found = dict(defaults)
    for word in words:
        key, _, value = word.partition("=")
        if key not in defaults:
            parser.error(f"{word}: allowed: {', '.join(f'{key}=' for key in defaults)}")
        try:
            found[key] = type(defaults[key])(value)
        except ValueError:
            parser.error(f"{word}: expected a number")
    return found


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
