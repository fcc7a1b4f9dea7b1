"""The scripts of experiments/ say what they do before they do it, and what they do not understand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
# A peer's driver runs inside of that peer's environment, on what peers/run.py gives it.
SCRIPTS = sorted(
    path.relative_to(EXPERIMENTS).as_posix()
    for path in EXPERIMENTS.rglob("*.py")
    if "__main__" in path.read_text() and path.parent.name != "drivers"
)


def run(monkeypatch: pytest.MonkeyPatch, script: str, *words: str) -> int:
    """A script as ``python SCRIPT WORD ...`` from the repository's root; its exit code."""
    path = EXPERIMENTS / script
    monkeypatch.chdir(EXPERIMENTS.parent)
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    return int(ended.value.code or 0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_script_s_own_text_and_starts_nothing(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = (EXPERIMENTS / script).read_text().split('"""')[1].splitlines()[0]
    assert run(monkeypatch, script, "--help") == 0
    assert first in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sweep.py",), "the following arguments are required: folder"),
        (("sweep.py", "experiments/none"), "expected a folder of experiments/ that holds a sweep.yaml"),
        (("sweep.py", "experiments/aps", "pong"), "no run of experiments/aps/sweep.yaml begins with 'pong'"),
        (("nigt/simulated.py", "cubic"), "cubic: allowed: "),
        (("nigt/two_tasks.py", "nothing"), "nothing: allowed: malenia_nigt"),
        (("nigt/two_tasks.py", "seed=x"), "seed=x: expected a number"),
        (("nigt/two_tasks.py", "steps=3"), "steps=3: allowed: seed="),
        (("scaling/weights.py", "0"), "hidden=0: expected at least 1"),
        (("peers/environments.py", "nobody"), "nobody: allowed: "),
        (("aps/report.py", "cartpole"), "unrecognized arguments: cartpole"),
    ],
)
def test_what_a_script_does_not_understand_is_told_in_a_line(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == 2
    assert said in capsys.readouterr().err
