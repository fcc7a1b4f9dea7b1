"""A bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from clusterenv_hpc.run.progress import Bar, Lines, Progress, make_progress, number, on_terminal


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def record(steps: int, **more: Any) -> dict[str, Any]:
    told = {"return_mean": 123.456, "steps_per_s": 54321.0, "lag_mean": 2.25, "weights_saved": 0.934}
    return {"update": steps // 100, "env_steps": steps, **told, **more}


def test_the_kind_follows_the_stream_and_the_launchers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERENV_HPC_TTY", raising=False)
    plain, terminal = io.StringIO(), Terminal()
    assert type(make_progress("auto", 1, 0, 1.0, plain)) is Lines
    assert type(make_progress("auto", 1, 0, 1.0, terminal)) is Bar
    assert type(make_progress("bar", 1, 0, 1.0, plain)) is Bar
    assert type(make_progress("lines", 1, 0, 1.0, terminal)) is Lines
    assert type(make_progress("none", 1, 0, 1.0, terminal)) is Progress
    monkeypatch.setenv("CLUSTERENV_HPC_TTY", "1")
    assert on_terminal(plain) and type(make_progress("auto", 1, 0, 1.0, plain)) is Bar


def test_lines_come_now_and_then_and_at_the_end() -> None:
    out = io.StringIO()
    lines = make_progress("lines", 1000, 0, every_s=3600.0, stream=out)
    for steps in range(100, 1001, 100):
        lines.update(record(steps))
    lines.close()
    lines.close()
    told = out.getvalue().splitlines()
    assert len(told) == 2 and "\r" not in out.getvalue() and "\x1b" not in out.getvalue()
    assert told[0].startswith(" 10%") and told[1].startswith("100%")
    for part in ("steps 1,000/1,000", "update 10", "return 123.5", "54,321 steps/s", "lag 2.2", "weights saved 93%"):
        assert part in told[1]


def test_every_line_comes_where_they_are_rare() -> None:
    out = io.StringIO()
    lines = make_progress("lines", 1000, 0, every_s=0.0, stream=out)
    for steps in (100, 200, 300):
        lines.update(record(steps))
    lines.close()
    assert len(out.getvalue().splitlines()) == 3


def test_what_is_not_known_yet_is_a_dash() -> None:
    assert [number(value) for value in (None, float("nan"), 1234.56, -0.04)] == ["-", "-", "1,234.6", "-0.0"]
    out = io.StringIO()
    Lines(10, 1.0, out).update(record(5, return_mean=float("nan"), lag_mean=None))
    assert "return -  " in out.getvalue() and "lag -  " in out.getvalue()


def test_a_bar_shows_return_speed_lag_and_messages_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERENV_HPC_COLUMNS", "120")
    out = Terminal()
    bar = make_progress("bar", 1000, 0, every_s=1.0, stream=out)
    bar.update(record(500))
    bar.say("a word")
    bar.update(record(1000))
    bar.close()
    last = out.getvalue().rstrip().rsplit("\r", 1)[-1]
    for part in ("100%", "1.00k/1.00k", "return 123.5", "54,321 steps/s", "lag 2.2", "weights saved 93%"):
        assert part in last
    assert len(last) <= 120
    assert re.search(r"(^|\r|\n) *a word *\n", out.getvalue())


@pytest.mark.parametrize("columns", ["60", "200"])
def test_a_bar_is_as_wide_as_the_launcher_says(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("CLUSTERENV_HPC_COLUMNS", columns)
    out = io.StringIO()
    bar = make_progress("bar", 1000, 0, every_s=1.0, stream=out)
    bar.update(record(500))
    bar.close()
    widest = max(len(part.rstrip("\n")) for part in out.getvalue().split("\r"))
    assert widest == int(columns) if columns == "200" else widest <= int(columns)


def test_a_resumed_bar_begins_where_the_run_stands() -> None:
    out = Terminal()
    make_progress("bar", 1000, 750, every_s=1.0, stream=out).close()
    assert " 75%" in out.getvalue()


def test_on_a_real_terminal() -> None:
    code = """
        import sys
        from clusterenv_hpc.run.progress import make_progress
        shown = make_progress("auto", 10, 0, 1.0)
        shown.update({"env_steps": 10, "update": 1, "return_mean": 1.0, "steps_per_s": 2.0, "lag_mean": 3.0,
                      "weights_saved": 0.5})
        shown.close()
    """
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERENV_HPC_")}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=theirs, env=env)
    os.close(theirs)
    told = b""
    try:
        while piece := os.read(ours, 4096):
            told += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"100%" in told and b"\r" in told
