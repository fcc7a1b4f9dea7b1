"""What the README shows is run: its scripts as they stand, its commands made short."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LINES = [line.strip().split("  #")[0].strip() for line in README.splitlines() if line.startswith("    ")]
COMMANDS = [line for line in LINES if line.startswith(("clusterenv-hpc ", "make ", "sbatch "))]

SHORT = ["total_steps=2000", "eval.episodes=2", "log.progress=lines"]


def shortened(command: str) -> list[str]:
    """The words after ``clusterenv-hpc``, for a run of seconds."""
    name, *words = command.split()[1:]
    if name == "train" and "--help" not in words:
        return [name, *words, *SHORT]
    if name == "submit":
        return [name, *words, "--dry-run"]  # submitted for real in tests/slurm
    if name == "bench":
        return [name, *words, "repeats=1", "seconds=0.2"]
    if name == "eval":
        return [name, *words, "episodes=2"]
    return [name, *words]


def test_the_readme_shows_what_is_looked_for() -> None:
    assert len(SCRIPTS) == 3
    assert {command.split()[1] for command in COMMANDS if command.startswith("clusterenv-hpc")} >= {
        "train", "eval", "plot", "doctor", "bench", "submit", "watch",
    }  # fmt: skip


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_scripts_run_as_they_stand(number: int, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS[number])
    subprocess.run([sys.executable, str(path)], cwd=tmp_path, check=True, timeout=110)


def test_the_first_script_runs_on_ranks(mpiexec: Callable[..., Any]) -> None:
    ran = mpiexec(3, SCRIPTS[0], timeout=110).check()
    assert "for 2 workers and 10 versions" in ran.stdout


def test_commands_run(tmp_path: Path) -> None:
    """In the order in which they are shown: ``latest`` is the run that was trained before."""
    for command in COMMANDS:
        if not command.startswith("clusterenv-hpc ") or command.split()[1] == "watch":
            continue
        words = [sys.executable, "-m", "clusterenv_hpc.cli", *shortened(command)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110)
        allowed = (0, 1) if "doctor" in words else (0,)  # the doctor says 1 where something could be better
        assert done.returncode in allowed, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_knows_its_targets() -> None:
    for command in COMMANDS:
        if command.startswith("make "):
            words = ["make", "-n", *command.split()[1:]]
            subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)


def test_templates_and_links_exist() -> None:
    for command in COMMANDS:
        if command.startswith("sbatch "):
            assert (REPOSITORY / command.split()[1]).is_file(), command
    for page in [
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").glob("*.md"),
        *REPOSITORY.glob("experiments/**/*.md"),
    ]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
