"""``make setup`` decides rightly what to do.  The Python that it calls is a stand-in which notes what it was asked for,
so that no package is installed here; the real thing runs before this test can.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/bash
# Stands in for a Python that can make virtual environments, and for the Python within one.
echo "$*" >> "$LOG"
case "$*" in
"-c import sys"*) exit ${BAD_VERSION:-0} ;;
"-c import ensurepip"*) exit ${NO_ENSUREPIP:-0} ;;
"-m venv"*)
    rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; touch "$4/pyvenv.cfg"
    [ -z "${DIE_IN_VENV:-}" ] || { rm "$4/bin/python"; exit 1; } ;;
"-m pip --version") exit 0 ;;
"-m pip install"*) [ -z "${DIE_IN_PIP:-}" ] || kill -9 $PPID; exit ${PIP_CODE:-0} ;;
esac
"""


INSTALL = """#!/bin/bash
# Stands in for slurm/devcluster/install.
echo "install" >> "$LOG"
[ -z "${SAID:-}" ] || printf '%b\\n' "$SAID" >&2
exit ${INSTALL_CODE:-0}
"""


class Workshop:
    """A copy of what the Makefile looks at, and a log of what it asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        for name in ("Makefile", "setup.cfg", "setup.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        (folder / "slurm/devcluster").mkdir(parents=True)
        for name, text in (("python", PYTHON), ("slurm/devcluster/install", INSTALL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def make(self, *words: str, **environ: str) -> tuple[int, list[str], str]:
        """Exit code, what the Python was asked for, and the output."""
        self.log.write_text("")
        without = ("MAKE", "MFLAGS", "VENV", "CI", "ARGS", "PIP_ARGS")
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(without)}
        done = subprocess.run(
            ["make", *words, "PYTHON=./python"], cwd=self.folder, env={**inherited, "LOG": str(self.log), **environ},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30,
        )  # fmt: skip
        asked = [line for line in self.log.read_text().splitlines() if line.startswith(("-m venv", "-m pip install"))]
        return done.returncode, asked, done.stdout


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def made(asked: list[str]) -> bool:
    return any(line.startswith("-m venv") for line in asked)


def installed(asked: list[str]) -> list[str]:
    """The extras of each installation."""
    return [line.rpartition(".[")[2].rstrip("]") for line in asked if ".[" in line]


def test_the_first_time_installs_and_the_second_does_nothing(workshop: Workshop) -> None:
    code, asked, out = workshop.make("setup")
    assert (code, made(asked), installed(asked)) == (0, True, ["mpich,box2d"]), out
    assert all("-c constraints.txt" in line for line in asked if line.startswith("-m pip install"))
    assert workshop.make("setup")[:2] == (0, [])


@pytest.mark.parametrize("name", ["setup.cfg", "setup.py", "pyproject.toml", "constraints.txt"])
def test_a_changed_input_installs_again_into_the_same_environment(workshop: Workshop, name: str) -> None:
    workshop.make("setup")
    later = (workshop.folder / ".venv" / ".setup-train").stat().st_mtime + 1
    os.utime(workshop.folder / name, (later, later))
    code, asked, _ = workshop.make("setup")
    assert (code, made(asked), installed(asked)) == (0, False, ["mpich,box2d"])


def test_the_tests_environment_serves_training_too_but_not_the_reverse(workshop: Workshop) -> None:
    workshop.make("setup")
    assert installed(workshop.make("setup-dev")[1]) == ["dev"]
    assert workshop.make("setup")[1] == []
    assert workshop.make("setup-dev")[1] == []


def test_a_deleted_environment_is_made_anew(workshop: Workshop) -> None:
    workshop.make("setup")
    shutil.rmtree(workshop.folder / ".venv")
    code, asked, _ = workshop.make("setup")
    assert (code, made(asked), installed(asked)) == (0, True, ["mpich,box2d"])


def test_an_environment_without_its_python_is_made_anew(workshop: Workshop) -> None:
    workshop.make("setup")
    (workshop.folder / ".venv" / "bin" / "python").unlink()
    assert made(workshop.make("setup")[1])


def test_a_half_made_environment_is_not_taken_for_a_whole_one(workshop: Workshop) -> None:
    assert workshop.make("setup", DIE_IN_VENV="1")[0] != 0
    code, asked, _ = workshop.make("setup")
    assert (code, made(asked), installed(asked)) == (0, True, ["mpich,box2d"])


def test_an_installation_that_was_killed_begins_anew(workshop: Workshop) -> None:
    workshop.make("setup")
    assert workshop.make("setup-dev", DIE_IN_PIP="1")[0] != 0
    code, asked, _ = workshop.make("setup")
    assert (code, made(asked), installed(asked)) == (0, True, ["mpich,box2d"]), "packages may be half copied"


def test_an_installation_that_pip_gave_up_goes_on(workshop: Workshop) -> None:
    code, _, out = workshop.make("setup", PIP_CODE="1")
    assert code != 0
    assert "Run the same command again" in out
    code, asked, _ = workshop.make("setup")
    assert (code, made(asked), installed(asked)) == (0, False, ["mpich,box2d"])


def test_two_at_once_do_not_tread_on_each_other(workshop: Workshop) -> None:
    workshop.make("setup")
    (workshop.folder / ".venv" / ".busy").write_text(f"{os.getpid()}\n")
    code, asked, out = workshop.make("setup")
    assert (code != 0, asked) == (True, [])
    assert f"Another make (pid {os.getpid()})" in out


def test_what_is_missing_is_told(workshop: Workshop) -> None:
    code, asked, out = workshop.make("setup", NO_ENSUREPIP="1")
    assert (code != 0, asked) == (True, [])
    assert "apt install python3-venv" in out
    code, asked, out = workshop.make("setup", BAD_VERSION="1")
    assert (code != 0, asked) == (True, [])
    assert "No Python 3.10 to 3.13 found" in out


def test_a_folder_that_is_no_environment_is_not_cleared(workshop: Workshop) -> None:
    (workshop.folder / "thesis").mkdir()
    (workshop.folder / "thesis" / "chapter1").touch()
    code, asked, out = workshop.make("setup", "VENV=thesis")
    assert (code != 0, asked) == (True, [])
    assert "is no virtual environment" in out
    workshop.make("clean", "VENV=thesis")
    assert (workshop.folder / "thesis" / "chapter1").exists()


def test_train_takes_overrides_which_win(workshop: Workshop) -> None:
    _, _, out = workshop.make("--dry-run", "train", "ARGS=env=cartpole seed=3")
    assert ".venv/bin/clusterenv-hpc train env=lunarlander workers=2 env=cartpole seed=3" in out


def called(workshop: Workshop) -> list[str]:
    """What of the packages, the linters and the tests was run, in order."""
    words = [line.removeprefix("-m ") for line in workshop.log.read_text().splitlines()]
    return [line for line in words if line.startswith(("install", "ruff", "mypy", "pytest"))]


ALL_FOUR = ["install", "ruff check .", "mypy", "pytest -n 2 --no-loadscope-reorder"]


def test_the_suite_comes_with_its_packages_and_says_nothing_where_they_are_there(workshop: Workshop) -> None:
    code, _, out = workshop.make("test")
    assert (code, called(workshop)) == (0, ALL_FOUR), out
    code, _, out = workshop.make("test", "ARGS=-k sync")
    assert (code, called(workshop)) == (0, [*ALL_FOUR[:3], f"{ALL_FOUR[3]} -k sync"]) and out == ""
    assert "installed: munge" in workshop.make("test", SAID="installed: munge")[2]


@pytest.mark.parametrize("ci", [None, "true"])
def test_packages_that_cannot_be_installed_end_ci_and_nothing_else(workshop: Workshop, ci: str | None) -> None:
    workshop.make("setup-dev")
    said = "E: no network\\nE: really\\ndevcluster: to install munge, run as root: slurm/devcluster/install"
    environ = {"INSTALL_CODE": "2", "SAID": said, **({"CI": ci} if ci else {})}
    code, _, out = workshop.make("test", **environ)
    if ci:
        assert code != 0 and called(workshop) == ["install"]
        assert "E: no network" in out and "CI: no test may be skipped" in out
    else:
        assert (code, called(workshop)) == (0, ALL_FOUR)
        (line,) = out.splitlines()
        assert (
            line.startswith("devcluster: to install munge, run as root: slurm/devcluster/install") and "skipped" in line
        )


def test_a_failure_of_one_does_not_hide_the_others(workshop: Workshop) -> None:
    workshop.make("setup-dev")
    (workshop.folder / ".venv/bin/python").write_text(
        PYTHON.replace('"-m pip --version"', '"-m mypy") exit 1 ;;\n"-m pip --version"')
    )
    code, _, out = workshop.make("test")
    assert code != 0 and called(workshop) == ALL_FOUR and out.splitlines()[0] == "failed: mypy"


def test_help_teaches_and_is_what_make_alone_says(workshop: Workshop) -> None:
    code, asked, out = workshop.make("help")
    assert (code, asked) == (0, [])
    for target in ("train", "setup", "test", "lint", "bench", "devcluster", "clean"):
        assert f"make {target}" in out
    assert workshop.make()[2] == out
