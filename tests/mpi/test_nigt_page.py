"""Every command and every line of Python that docs/nigt.md shows is run; trainings are cut short."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import run_marked

PAGE = (Path(__file__).parents[2] / "docs" / "nigt.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines() if line.strip()]
SHORT = ["total_steps=3000", "eval.episodes=1", "log.tensorboard=false"]


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) == 5 and all(line.startswith("clusterenv-hpc ") for line in COMMANDS)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str, tmp_path: Path) -> None:
    words = shlex.split(line)[1:]
    train = words[0] == "train"
    command = [sys.executable, "-m", "clusterenv_hpc.cli", *words, *(SHORT if train else [])]
    ran = run_marked(command, os.environ, 110, tmp_path).check()
    if train:
        (path,) = tmp_path.glob("runs/*/summary.json")
        told = json.loads(path.read_text())
        assert told["exit_reason"] == "completed" and told["gradients_used"] > 0
    else:
        assert "against sync_nigt:" in ran.stdout and (tmp_path / "simulated" / "results.json").exists()


def test_python() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(block, "docs/nigt.md", "exec"), {})
