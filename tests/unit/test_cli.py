"""The command line: help, dispatch, exit codes, and errors that end in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from clusterenv_hpc import cli
from clusterenv_hpc.comm.channel import LAST_WORDS_S
from clusterenv_hpc.run.config import GROUPS, ConfigError, choices, quoted
from clusterenv_hpc.run.start import give_up, usage


def command(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterenv_hpc.cli", *words],
        capture_output=True, text=True, timeout=60, cwd=cwd, env={**os.environ, **env},
    )  # fmt: skip


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and done.stdout == "", (done.stdout, done.stderr)
    return lines[0]


def stand_in(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    """A sub-command ``probe`` that is ``function``."""
    monkeypatch.setitem(sys.modules, "probe_command", types.SimpleNamespace(main=function))  # type: ignore[arg-type]
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("probe_command:main", "for a test"))


# -- help ----------------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    for name, one in cli.COMMANDS.items():
        assert f"  {name}" in told and one.help in told
    assert "clusterenv-hpc train env=cartpole" in told and "resume=true" in told
    assert cli.main([]) == 2


def test_every_example_in_the_help_is_a_command_line_that_composes() -> None:
    import shlex

    from clusterenv_hpc.run.config import compose

    count = 0
    for text in (cli.EXAMPLES, usage()):
        for line in text.splitlines():
            _, found, words = line.partition("clusterenv-hpc train ")
            if found and "mypackage" not in words and not words.startswith(("[", "--help")):
                compose(shlex.split(words.split("   ")[0]))
                count += 1
    assert count >= 6


def test_train_help_lists_groups_choices_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    told = capsys.readouterr().out
    for group in GROUPS:
        assert f"{group}=" in told and all(choice in told for choice in choices(group))
    keys = "workers envs_per_worker total_steps run_dir checkpoint.every_s algo.epochs sync.delta sync.k policy.hidden"
    for key in (keys + " env.kwargs slurm.partition stop.at_return").split():
        assert f"  {key}=" in told, key
    assert "  gradients.communication.scheme=none equal: seconds;" in told  # a long key runs into nothing


def test_help_is_quick_because_it_loads_little() -> None:
    code = (
        "import sys; from clusterenv_hpc import cli; cli.main(['--help']); cli.main(['train', '--help']); "
        "heavy = {'torch', 'mpi4py', 'gymnasium', 'tensorboard', 'matplotlib'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    import clusterenv_hpc

    assert command("--version").stdout.strip() == clusterenv_hpc.__version__
    module = subprocess.run([sys.executable, "-m", "clusterenv_hpc", "--version"], capture_output=True, text=True)
    assert module.stdout.strip() == clusterenv_hpc.__version__, module.stderr


# -- dispatch and errors -------------------------------------------------------------------------------------------


def test_a_command_gets_its_words_and_gives_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    stand_in(monkeypatch, main)
    assert cli.main(["probe", "a=1", "--flag"]) == 7
    assert seen == [["a=1", "--flag"]]


def test_an_unknown_command_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("clusterenv-hpc: trian: no such command; did you mean train?")


@pytest.mark.parametrize(
    ("error", "code", "parts"),
    [
        (ZeroDivisionError("division\nby zero"), 1, ["ZeroDivisionError: division by zero", "test_cli.py:"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
        (OSError(28, "No space left on device", "/x/y"), 1, ["No space left on device", "/x/y"]),
    ],
)
def test_whatever_goes_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    parts: list[str],
) -> None:
    def main(argv: list[str]) -> int:
        raise error

    stand_in(monkeypatch, main)
    assert cli.main(["probe"]) == code
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == (1 if parts else 0)
    assert all(part in told.err for part in parts) and "Traceback" not in told.err


def test_the_traceback_is_there_for_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        raise RuntimeError("deep inside")

    stand_in(monkeypatch, main)
    monkeypatch.setenv("CLUSTERENV_HPC_TRACEBACK", "1")
    assert cli.main(["probe"]) == 1
    told = capsys.readouterr().err
    assert "Traceback (most recent call last)" in told
    assert told.splitlines()[-1].startswith("clusterenv-hpc: RuntimeError: deep inside")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m clusterenv_hpc.cli train --help | head -n 1", shell=True, capture_output=True, text=True
    )
    assert done.stderr == "" and done.stdout.startswith("usage:")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "worker=3"], ["worker=3", "workers"]),
        (["train", "env=cartpol"], ["env=cartpol", "cartpole"]),
        (["train", "workers=-1"], ["workers=-1", ">= 0"]),
        (["train", "env.id=Nope-v0"], ["env.id=Nope-v0"]),
        (["train", "--verbose"], ["--verbose", "no such option"]),
        (["eval", "nothing"], ["nothing: no such run"]),
        (["plot", "nothing"], ["nothing: no such run"]),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2_before_anything_starts(
    tmp_path: Path, words: list[str], parts: list[str]
) -> None:
    done = command(*words, cwd=tmp_path, CLUSTERENV_HPC_TRACEBACK="")
    line = only_line(done)
    assert done.returncode == 2 and line.startswith("clusterenv-hpc: ") and all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []


def test_cfg_prints_the_configuration_and_starts_nothing(tmp_path: Path) -> None:
    import yaml

    done = command("train", "env=cartpole", "seed=9", "--cfg", cwd=tmp_path)
    tree = yaml.safe_load(done.stdout)
    assert done.returncode == 0 and tree["seed"] == 9 and tree["env"]["id"] == "CartPole-v1"
    assert list(tmp_path.iterdir()) == []


def test_paths_survive_the_way_to_the_ranks() -> None:
    from clusterenv_hpc.run.config import compose

    for path in ("/tmp/a b", "/tmp/it's", "/tmp/a=b,c", "/tmp/$x{y}", "runs/plain-1", "/tmp/[1]", '/tmp/"q"'):
        assert compose([f"run_dir={quoted(path)}"]).run_dir == path, path


def test_a_launcher_has_time_to_pass_on_what_a_rank_said_before_it_aborts(capsys: pytest.CaptureFixture[str]) -> None:
    class World:
        Get_rank, Get_size = (lambda self: 0), (lambda self: 3)

        def Abort(self, code: int) -> None:
            self.code, self.at, self.said = code, time.monotonic(), capsys.readouterr().err

    began, world = time.monotonic(), World()
    assert give_up(ConfigError("workers=7: too many"), world) == world.code == 2
    assert "workers=7: too many" in world.said and world.at >= began + LAST_WORDS_S
