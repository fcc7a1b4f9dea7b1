"""PNGs from metrics: the right numbers, several runs, runs that are just beginning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterenv_hpc.run.config import ConfigError
from clusterenv_hpc.run.figures import FIGURES, draw, main, series
from clusterenv_hpc.run.run_dir import RunDir

PNG = b"\x89PNG\r\n\x1a\n"


def run_of(folder: Path, count: int, **more: Any) -> RunDir:
    folder.mkdir(parents=True)
    run = RunDir(folder)
    run.config.write_text("seed: 1\n")
    lines = []
    for update in range(1, count + 1):
        told = {"return_mean": None if update == 1 else 3.0 * update, "weight_requests": update // 2, "lag_mean": 0.5}
        told |= {"kl_mean": None, "steps_per_s": 100.0 * update, **more}
        lines.append(json.dumps({"update": update, "env_steps": 64 * update, **told}))
    run.metrics.write_text("".join(f"{line}\n" for line in lines))
    return run


def test_series_are_the_numbers_in_the_file(tmp_path: Path) -> None:
    records = [json.loads(line) for line in run_of(tmp_path / "a", 3).metrics.read_text().splitlines()]
    steps, values = series(records, "return_mean")
    assert steps.tolist() == [64.0, 128.0, 192.0]
    assert np.isnan(values[0]) and values[1:].tolist() == [6.0, 9.0]
    assert np.isnan(series(records, "not_there")[1]).all()
    for wrong in ("many", [1], {"a": 1}, 10**400):  # somebody else's line, or a disk's: a gap
        records[1]["env_steps"] = records[2]["return_mean"] = wrong
        steps, values = series(records, "return_mean")
        assert np.isnan(steps).tolist() == [False, True, False] and np.isnan(values).tolist() == [True, False, True]


def test_the_figures_show_what_the_issue_asks_for() -> None:
    assert {figure.metric for figure in FIGURES} == {
        "return_mean", "weight_requests", "lag_mean", "kl_mean", "steps_per_s",
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 50])
def test_one_png_for_each_figure_in_the_runs_directory(tmp_path: Path, count: int) -> None:
    run = run_of(tmp_path / "a", count)
    paths = draw([run], run.path)
    assert sorted(path.name for path in paths) == sorted(f"{figure.name}.png" for figure in FIGURES)
    assert all(path.parent == run.path and path.read_bytes().startswith(PNG) for path in paths)


def test_a_line_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[list[tuple[str, list[float]]]] = []

    def look(self: Figure, path: Path, **kwargs: Any) -> None:
        drawn.append([(line.get_label(), list(line.get_ydata())) for line in self.axes[0].lines])

    monkeypatch.setattr(Figure, "savefig", look)
    draw([run_of(tmp_path / "a", 3), run_of(tmp_path / "b", 4, steps_per_s=7.0)], tmp_path)
    speeds = drawn[[figure.metric for figure in FIGURES].index("steps_per_s")]
    assert speeds == [("a", [100.0, 200.0, 300.0]), ("b", [7.0] * 4)]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = run_of(tmp_path / "runs/one", 3), run_of(tmp_path / "runs/two", 3)
    assert main(["one"]) == 0
    assert capsys.readouterr().out.split() == [f"runs/one/{figure.name}.png" for figure in FIGURES]
    assert (one.path / "return.png").exists() and not (two.path / "return.png").exists()
    assert main(["one", "two"]) == 0
    assert (one.path / "compare_return.png").exists()
    assert main(["one", "two", "--out", "here/new"]) == 0
    assert (tmp_path / "here/new/kl.png").exists()


def test_a_run_without_updates_is_one_line(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", 0)
    with pytest.raises(ConfigError, match="holds no update yet"):
        draw([run], tmp_path)
    run.metrics.unlink()
    with pytest.raises(ConfigError, match="no metrics yet"):
        draw([run], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*--out"):
        draw([run_of(tmp_path / "b", 2)], tmp_path / "file")
