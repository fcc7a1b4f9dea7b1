"""The script of docs/moving_your_script.md: it runs before and after, and on ranks it is what it is in one process."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = (ROOT / "examples" / f"ppo_{name}.py" for name in ("before", "after"))


def test_both_learn_and_ranks_change_nothing(mpiexec: Callable[..., Any]) -> None:
    said = []
    for script in (BEFORE, AFTER):
        ran = subprocess.run([sys.executable, str(script), "20000"], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout.strip())
        assert float(said[-1].rpartition(" ")[2]) > 60, "random play gives 22"
    assert mpiexec(2, AFTER, "20000").check().stdout.strip() == said[1]


def test_the_documentation_shows_the_difference() -> None:
    lines = difflib.unified_diff(BEFORE.read_text().splitlines(), AFTER.read_text().splitlines(), lineterm="", n=1)
    changed = [line for line in list(lines)[2:] if line.startswith(("+", "-"))]
    shown = (ROOT / "docs" / "moving_your_script.md").read_text().splitlines()
    assert changed and [line for line in changed if line[1:].strip() and line not in shown] == []
