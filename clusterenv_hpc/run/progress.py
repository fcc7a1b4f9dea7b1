"""How a run shows that it goes on: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm


def on_terminal(stream: TextIO) -> bool:
    """Whether a person watches: the stream is a terminal, or the process that launched these ranks has one."""
    return stream.isatty() or os.environ.get("CLUSTERENV_HPC_TTY") == "1"


def number(value: float | None, digits: int = 1) -> str:
    """``value`` for people; a dash where there is none yet."""
    return "-" if value is None or value != value else f"{value:,.{digits}f}"


def particulars(record: Mapping[str, Any]) -> list[str]:
    """What a record says beyond what all have: of versions and weights, or of gradients."""
    if "gradients_used" in record:
        return [
            f"gradients {number(record['gradients_used'], 0)}, dropped {number(record['gradients_dropped'], 0)}",
            f"||d|| {record['direction_norm']:.3g}",
        ]
    return [f"lag {number(record['lag_mean'])}", f"weights saved {number(100 * record['weights_saved'], 0)}%"]


def _columns(stream: TextIO) -> int | None:
    """How wide a bar is to be: as the launching process says; None for as wide as the terminal is at any time."""
    told = os.environ.get("CLUSTERENV_HPC_COLUMNS", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    try:
        return None if os.get_terminal_size(stream.fileno()).columns > 0 else 100
    except (OSError, ValueError):  # no terminal, or one that does not know
        return 100


class Progress:
    """Shows no progress, only what is said; the others are variations of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def update(self, record: Mapping[str, Any]) -> None:
        """One more update; ``record`` is its line of metrics.jsonl."""

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the terminal in order."""


class Bar(Progress):
    """A bar of environment steps, with return, steps/s and what else the algorithm has to tell."""

    def __init__(self, total_steps: int, done: int, stream: TextIO) -> None:
        super().__init__(stream)
        columns = _columns(stream)
        self._bar = tqdm(
            total=total_steps,
            initial=done,
            file=stream,
            unit="step",
            unit_scale=True,
            ncols=columns,
            nrows=None if columns is None else 24,  # a terminal that says it has no lines would be shown nothing
            dynamic_ncols=columns is None,
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def update(self, record: Mapping[str, Any]) -> None:
        self._bar.set_postfix_str(
            f"return {number(record['return_mean'])}, {number(record['steps_per_s'], 0)} steps/s, "
            + ", ".join(particulars(record)),
            refresh=False,
        )
        self._bar.update(record["env_steps"] - self._bar.n)

    def say(self, text: str) -> None:
        self._bar.write(text, file=self._stream)

    def close(self) -> None:
        self._bar.refresh()
        self._bar.close()


class Lines(Progress):
    """A plain line every few seconds."""

    def __init__(self, total_steps: int, every_s: float, stream: TextIO) -> None:
        super().__init__(stream)
        self._total, self._every_s = total_steps, every_s
        self._last_s = -every_s
        self._unsaid: Mapping[str, Any] | None = None

    def update(self, record: Mapping[str, Any]) -> None:
        self._unsaid = record
        if time.monotonic() - self._last_s >= self._every_s:
            self._print()

    def _print(self) -> None:
        if (record := self._unsaid) is None:
            return
        self._unsaid, self._last_s = None, time.monotonic()
        self.say(
            f"{100 * record['env_steps'] / self._total:3.0f}%  steps {record['env_steps']:,}/{self._total:,}  "
            f"update {record['update']}  return {number(record['return_mean'])}  "
            f"{number(record['steps_per_s'], 0)} steps/s  " + "  ".join(particulars(record))
        )

    def close(self) -> None:
        self._print()


def make_progress(kind: str, total_steps: int, done: int, every_s: float, stream: TextIO | None = None) -> Progress:
    """The display that ``log.progress`` asks for: ``auto``, ``bar``, ``lines`` or ``none``."""
    stream = sys.stderr if stream is None else stream
    if kind == "none":
        return Progress(stream)
    if kind == "bar" or (kind == "auto" and on_terminal(stream)):
        return Bar(total_steps, done, stream)
    return Lines(total_steps, every_s, stream)
