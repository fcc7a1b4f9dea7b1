"""What writes the generated pages: docstrings become Markdown, keys become rows, marked parts become tables."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import REPOSITORY


def load(path: str) -> ModuleType:
    """A file outside of the package, as a module."""
    spec = importlib.util.spec_from_file_location(
        "loaded_" + path.replace("/", "_").removesuffix(".py"), REPOSITORY / path
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def api() -> ModuleType:
    return load("docs/generators/api.py")


def test_a_docstring_becomes_markdown(api: ModuleType) -> None:
    text = """Do it, as :class:`Thing` does.

Args:
    one: the first, which
        goes on.
    *others: ``[N]`` of them.

    >>> code

Raises:
    ValueError: it cannot be.
"""
    assert api.markdown(text).split("\n\n") == [
        "Do it, as `Thing` does.",
        "Args:",
        "- `one`: the first, which goes on.\n- `*others`: `[N]` of them.",
        "```text\n>>> code\n```",
        "Raises:",
        "- `ValueError`: it cannot be.",
    ]


def test_signatures_lose_self(api: ModuleType) -> None:
    source = (
        'class A:\n    def __init__(\n        self,\n        one: int,\n    ) -> None:\n        """Doc."""\n\n'
        '    def plain(self) -> int:\n        """Doc."""\n\n'
        '    def two(self, x: int = 1) -> int:  # why\n        """Doc."""\n'
    )
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    init, plain, two = (part for part in node.body if isinstance(part, ast.FunctionDef))
    assert api.signature(init, source, "A") == ["A(", "    one: int,", ")"]
    assert api.signature(plain, source) == ["def plain() -> int"]
    assert api.signature(two, source) == ["def two(x: int = 1) -> int"]


def test_a_name_is_found_through_imports(api: ModuleType) -> None:
    found = api.find("clusterenv_hpc", "APS")
    assert isinstance(found.node, ast.ClassDef) and "class APS" in found.source
    with pytest.raises(SystemExit, match="has no Nothing"):
        api.find("clusterenv_hpc", "Nothing")


def test_every_number_has_a_unit() -> None:
    configuration = load("docs/generators/configuration.py")
    page = configuration.page()
    assert re.search(r"\| `sync\.delta` \| float ≥ 0 \| `[\d.]+` \| nats \| .*divergence", page)
    assert "| `timeout` | float > 0 | `600.0` | s |" in page
    assert "`runs/<name>`" not in page and "runs/&lt;name>" in page  # else Markdown takes it for HTML


def test_marked_parts_are_filled_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    results = load("docs/generators/results.py")
    monkeypatch.setattr(results, "tables", lambda experiment: {"one": f"| {experiment} |"})
    text = "before\n<!-- table: aps/one -->\n| old |\n<!-- end of table -->\nafter\n"
    told = results.MARKED.sub(results.filled, text)
    assert told == "before\n<!-- table: aps/one -->\n| aps |\n<!-- end of table -->\nafter\n"
    assert results.MARKED.sub(results.filled, told) == told


def flooded(size: float, cost: float, rate: float) -> dict[str, Any]:
    return {"message_bytes": size, "us_per_message": cost, "worker_messages_per_s": rate, "workers_served": 1.0}


def test_the_model_of_scaling_is_what_was_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("experiments/scaling/report.py")
    stored: dict[str, Any] = {
        f"message {n}": {"results": {"cartpole": flooded(1e3 * n, 50.0 + 0.002 * 1e3 * n, 1.0)}} for n in (8, 32, 128)
    }
    stored["env flood"] = {"options": {"num_steps": 128}, "results": {"hopper": flooded(1e5, 250.0, 20.0)}}
    (tmp_path / "results.json").write_text(json.dumps(stored))
    monkeypatch.setattr(report, "HERE", tmp_path)
    cost = report.fitted(report.stored())
    assert math.isclose(cost.a, 50.0, rel_tol=1e-6) and math.isclose(cost.b, 0.002, rel_tol=1e-6)
    load_of = report.loads(report.stored())["hopper"]
    assert load_of.steps_per_s == 20.0 * 16 * 128 and load_of.period_s == 0.05
    # 0.05 s / 250 us: 200 workers; of 1024 workers' steps 200 / 1024 arrive; by bytes alone 0.05 s / 200 us.
    (row,) = (line for line in report.tables()["model"].splitlines() if line.startswith("| hopper"))
    assert row == "| hopper | 1.00 | 1.00 | 0.78 | 0.20 | 0.05 | 200 | 250 |"


def test_a_peer_that_did_not_get_there_is_told_so() -> None:
    report = load("experiments/peers/report.py")
    there = {"steps_per_s": 1.0, "solved_s": 12.0, "solved_steps": 34_000, "last_return": 480.0, "seconds": 45.0}
    late = {**there, "solved_s": None, "solved_steps": None, "last_return": 300.0}
    assert report.solved([there, there]) == "12.0 (34,000)"
    assert report.solved([there, late]) == "12.0 (34,000), 1 of 2 seeds"
    assert report.solved([late]) == "not in 45 s (return 300)"
    assert report.solved([{"error": "x"}]) == "failed" and report.solved([]) == ""
