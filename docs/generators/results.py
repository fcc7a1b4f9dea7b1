"""Fills the tables between ``<!-- table: experiment/name -->`` and ``<!-- end of table -->`` from stored results.

An experiment's ``report.py`` has a function ``tables()`` that gives Markdown by name.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARKED = re.compile(r"(<!-- table: (\w+)/(\w+) -->\n).*?(<!-- end of table -->)", re.S)


@functools.cache
def tables(experiment: str) -> dict[str, str]:
    """What an experiment's report gives."""
    path = ROOT / "experiments" / experiment / "report.py"
    spec = importlib.util.spec_from_file_location(f"report_of_{experiment}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"docs/generators/results.py: there is no {path.relative_to(ROOT)}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module.tables()


def filled(found: re.Match[str]) -> str:
    """A marked part with its table."""
    measured = (ROOT / "experiments" / found[2] / "results.json").is_file()
    text = tables(found[2])[found[3]] if measured else "*Not measured yet.*"
    return f"{found[1]}{text}\n{found[4]}"


def pages() -> dict[Path, str]:
    """Every page with marked parts, and what it ought to hold."""
    candidates = [ROOT / "docs" / "results.md", ROOT / "README.md", *sorted((ROOT / "experiments").glob("*/README.md"))]
    texts = {path: path.read_text() for path in candidates if path.is_file()}
    return {path: MARKED.sub(filled, text) for path, text in texts.items() if MARKED.search(text)}
