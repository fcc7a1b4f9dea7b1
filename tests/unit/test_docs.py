"""The documentation holds: generated pages are fresh, links lead somewhere, and what pages show is run.

Each page has a folder of its own, in which its blocks are run in order.  Trainings are cut short, and outside of
TRAINED only composed and checked; what a page marks ``<!-- not run: reason -->`` is left out.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import REPOSITORY, Block, blocks, indented_commands, links, pages, shortened, slugs

DOCS = sorted((REPOSITORY / "docs").glob("*.md"))

ELSEWHERE = {
    "README.md": "unit/test_readme.py",
    "docs/new_algorithm.md": "unit/test_new_algorithm.py",
    "docs/nigt.md": "mpi/test_nigt_page.py",
    "docs/moving_your_script.md": "mpi/test_examples.py",
}
"""Pages whose Python, and commands in fences, are run by a test of their own."""

TRAINED = {"quick_start.md"}
"""Pages whose trainings are run, and not only checked."""

SHOWN = {"text", "yaml", "diff", "", "console", "mermaid", "json", "ini"}
"""Languages that are shown and not run."""

SET_UP = ("source ", "cd ", "export ", "eval ", "module ", ". ")

NOT_HERE = {
    "srun": "needs an allocation: tests/slurm",
    "sbatch": "needs Slurm: tests/slurm; the template must be there",
    "squeue": "needs Slurm", "sinfo": "needs Slurm", "scontrol": "needs Slurm", "scancel": "needs Slurm",
    "sacct": "needs Slurm", "salloc": "needs Slurm",
    "pip": "installs; the extras are compared with setup.cfg",
    "apt": "installs", "apt-get": "installs", "git": "changes a repository",
    "slurm/devcluster/up": "tests/slurm", "slurm/devcluster/down": "tests/slurm", "slurm/devcluster/env": "tests/slurm",
    "slurm/devcluster/status": "tests/slurm", "slurm/devcluster/install": "tests/slurm",
}  # fmt: skip
"""Programs that a test on a bare machine does not run, and why."""

WITH_SLURM = {"watch", "logs", "cancel", "list"}
"""Sub-commands that ask Slurm; tests/slurm runs them."""


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def shown_blocks(path: Path) -> list[Block]:
    """What this file must run of a page."""
    if name_of(path) in ELSEWHERE:
        return []
    found = blocks(path.read_text())
    for block in found:
        assert block.language in SHOWN | {"bash", "sh", "python"}, f"{path.name}: a block of {block.language}"
    return [block for block in found if block.language in ("bash", "sh", "python") and block.not_run is None]


def run(words: list[str], cwd: Path, variables: dict[str, str] | None = None, allowed: tuple[int, ...] = (0,)) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode in allowed, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"


def run_command(command: str, page: Path, cwd: Path, mpiexec: Callable[..., Any]) -> None:
    """One line of a page, as far as a bare machine can run it."""
    if command.startswith(SET_UP):
        return
    words = shlex.split(command)
    program = next(word for word in words if "=" not in word)
    if program == "make":
        if shutil.which("make"):
            run(["make", "-n", *words[1:]], REPOSITORY)
    elif program == "clusterenv-hpc":
        rest, variables = shortened(command, train=page.name in TRAINED)
        if rest[0] not in WITH_SLURM or "--help" in rest:
            allowed = (0, 1) if rest[0] == "doctor" else (0,)  # 1 where something could be better
            run([sys.executable, "-m", "clusterenv_hpc.cli", *rest], cwd, variables, allowed)
    elif program == "mpiexec":
        assert words[1] == "-n" and words[3] == "python", command
        mpiexec(int(words[2]), str(cwd / words[4]), *words[5:], env={"PYTHONPATH": str(cwd)}, timeout=100).check()
    elif program == "python":
        if words[1].startswith(("docs/", "experiments/")):
            assert (REPOSITORY / words[1]).is_file(), f"{page.name}: {command}"
        elif words[1] != "-m":
            run([sys.executable, *words[1:]], cwd)
    else:
        assert program in NOT_HERE, f"{page.name}: {command}: run it, list it, or mark it <!-- not run: reason -->"
        if program == "sbatch" and (template := next((word for word in words if word.endswith(".sbatch")), None)):
            assert (REPOSITORY / template).is_file(), f"{page.name}: {command}"


@pytest.mark.parametrize("path", [path for path in DOCS if shown_blocks(path)], ids=lambda path: path.stem)
@pytest.mark.timeout(240)
def test_what_a_page_shows_is_run(path: Path, tmp_path: Path, mpiexec: Callable[..., Any]) -> None:
    code: list[str] = []
    for block in shown_blocks(path):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "python":
            code.append(block.text)
        else:
            for command in block.commands:
                run_command(command, path, tmp_path, mpiexec)
    if code:  # one program: later blocks use what earlier ones have made
        (tmp_path / "page.py").write_text("\n".join(code))
        run([sys.executable, "page.py"], tmp_path)


@pytest.mark.parametrize("path", [*DOCS, REPOSITORY / "README.md"], ids=lambda path: path.stem)
def test_indented_commands_are_understood(path: Path, tmp_path: Path) -> None:
    """They stand in running text with names of the reader's own, so their words are checked, and nothing is trained."""
    for command in indented_commands(path.read_text()):
        words = shlex.split(command)
        if words[0] == "clusterenv-hpc" and words[1] in ("train", "submit") and "--help" not in words:
            if "..." in command or not all("=" in word or word.startswith("-") for word in words[2:]):
                continue
            if not any(word.startswith(("env.id=my", "algo=ALGO")) for word in words):
                rest, variables = shortened(command, train=False)
                run([sys.executable, "-m", "clusterenv_hpc.cli", *rest], tmp_path, variables)
        elif words[0] == "clusterenv-hpc":
            from clusterenv_hpc.cli import COMMANDS

            assert words[1] in COMMANDS or words[1].startswith("-"), command
        elif words[0] == "python" and words[1].startswith(("examples/", "experiments/", "docs/")):
            assert (REPOSITORY / words[1]).exists(), command


def test_pages_that_others_run_are_run_there() -> None:
    for page, test in ELSEWHERE.items():
        text = (REPOSITORY / "tests" / test).read_text()
        assert Path(page).name in text or "ppo_after" in text, f"tests/{test} does not read {page}"


@pytest.mark.parametrize("path", pages(), ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{name_of(path)} links to {link}"
        if anchor:
            assert anchor in slugs(file.read_text()), f"{name_of(path)} links to {link}: no such heading"


def test_every_page_is_in_the_index() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text()
    for path in DOCS:
        assert path.name == "README.md" or path.name in index, f"docs/README.md does not name {path.name}"


def test_generated_pages_are_fresh() -> None:
    run([sys.executable, str(REPOSITORY / "docs" / "generate.py"), "--check"], REPOSITORY)


def test_anchors_and_links_are_found() -> None:
    text = "# One `two`\n\n[a](b.md#c) ![p](q.png) `[no](code)`\n\n```text\n# not a heading\n[no](x)\n```\n## One two\n"
    assert slugs(text) == {"one-two", "one-two-1"}
    assert links(text) == ["b.md#c", "q.png"]


def test_a_block_may_say_why_it_is_not_run() -> None:
    kept, left = blocks("```bash\nls  # list\n```\n<!-- not run: it waits -->\n```bash\nwatch\n```\n")
    assert kept.commands == ["ls"] and kept.not_run is None
    assert left.not_run == "it waits"
