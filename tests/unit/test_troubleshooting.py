"""The messages that docs/troubleshooting.md explains are still those that the program prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()

ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]
MESSAGES = [re.findall(r"`([^`]+)`", row.split(" | ")[0])[0] for row in ROWS]
OTHERS = re.compile(r"\((Slurm|srun)'s\)")
SLURMS_OWN = [message for message, row in zip(MESSAGES, ROWS, strict=True) if OTHERS.search(row.split(" | ")[0])]


def texts(tree: ast.AST) -> list[str]:
    """Every string of a module, what is formatted into it left out as a NUL."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if id(node) in documentation:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def source() -> list[str]:
    found = []
    for path in (REPOSITORY / "clusterenv_hpc").rglob("*.py"):
        found += texts(ast.parse(path.read_text()))
    for path in (REPOSITORY / "slurm/devcluster").iterdir():
        found += [
            re.sub(r"\$\([^()]*(?:\([^()]*\))?[^()]*\)|\$\w+", "\0", line) for line in path.read_text().splitlines()
        ]
    return found


def occurs(message: str, source: list[str]) -> bool:
    """Whether one string holds the pieces of ``message`` in order, with something between them."""
    pattern = re.compile(".*?".join(re.escape(piece.strip()) for piece in message.split("…") if piece.strip()), re.S)
    return any(pattern.search(text) for text in source)


def test_there_are_many_of_them() -> None:
    assert len(MESSAGES) > 40 and len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", [message for message in MESSAGES if message not in SLURMS_OWN])
def test_a_quoted_message_is_in_the_source(message: str, source: list[str]) -> None:
    assert occurs(message, source), f"docs/troubleshooting.md quotes what is printed nowhere: {message}"


def test_a_message_that_is_not_there_is_noticed(source: list[str]) -> None:
    assert not occurs("the flux capacitor is … out", source)
    assert not occurs("requeue is off, so … workers", source), "pieces of several messages are not one"


def test_every_row_says_what_to_do() -> None:
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 3 and all(cells), row


def test_keys_that_the_page_names_exist() -> None:
    from clusterenv_hpc.jobs.config import SlurmConfig

    keys = set(SlurmConfig.__dataclass_fields__)
    for page in ("troubleshooting.md", "cluster.md"):
        for key in re.findall(r"slurm\.([a-z_]+)", (REPOSITORY / "docs" / page).read_text()):
            assert key in keys, f"{page} names slurm.{key}"
