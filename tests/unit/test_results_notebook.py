"""experiments/notebooks/results.ipynb draws every figure from what is stored, and writes nothing beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from notebooks import FOLDER, execute

EXPERIMENTS = FOLDER.parent


@pytest.mark.needs("notebook")
def test_every_report_is_drawn(tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in EXPERIMENTS.glob("*/*.png")}
    shown = execute("results.ipynb", tmp_path, 100, EXPERIMENTS=str(EXPERIMENTS))
    ready = [path.parent for path in EXPERIMENTS.glob("*/report.py") if (path.parent / "results.json").exists()]
    said = re.search(r"(\d+) figures of (\d+) experiments", shown["import contextlib"])
    assert said and int(said[2]) == len(ready) and int(said[1]) >= 1
    assert {path: path.stat().st_mtime_ns for path in EXPERIMENTS.glob("*/*.png")} == before
