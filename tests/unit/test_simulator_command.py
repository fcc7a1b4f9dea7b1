"""``clusterenv-hpc simulate``: what it writes, that it goes on where it was, and what it says to bad input."""

from __future__ import annotations

import json

import pytest

from clusterenv_hpc.gradients import simulate
from clusterenv_hpc.gradients.methods import METHODS
from clusterenv_hpc.gradients.simulation_settings import Settings, describe, parse

QUICK = ["workers=4", "times=sqrt,straggler", "seeds=2", "alphas=0.125,0.0625", "max_gradients=5000", "sigma=0.5"]


def run(tmp_path, *words):
    given = {word.partition("=")[0] for word in words}
    quick = [word for word in QUICK if word.partition("=")[0] not in given]
    return simulate.main([*quick, f"out={tmp_path / 'out'}", *words])


def cells_of(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())["cells"]


def test_results_table_and_figures(tmp_path, capsys):
    assert run(tmp_path, "methods=rennala_nigt,sync_nigt,malenia_nigt") == 0
    out = capsys.readouterr().out
    cells = cells_of(tmp_path)
    assert [(c["times"], c["method"]) for c in cells] == [
        (t, m) for t in ("sqrt", "straggler") for m in ("rennala_nigt", "sync_nigt", "malenia_nigt")
    ]
    by_key = {(c["times"], c["method"]): c for c in cells}
    for cell in cells:
        assert len(cell["by_seed"]) == 2 and cell["low"] <= cell["time"] <= cell["high"]
        assert cell["time"] == pytest.approx(cell["updates"] * cell["theory_round"], rel=0.5)
    slow, fast = by_key["straggler", "sync_nigt"], by_key["straggler", "rennala_nigt"]
    assert slow["time"] > 20 * fast["time"]
    assert f"{fast['time']:,.4g}" in out and f"{slow['time']:,.4g}" in out and "times as fast" in out
    names = {"workers_sqrt", "workers_straggler", "runs_sqrt", "runs_straggler", "times"}
    for name in names:
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    real, done = simulate.measure, []

    def interrupted(settings, scheme, n, method):
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append((scheme, n, method))
        return real(settings, scheme, n, method)

    monkeypatch.setattr(simulate, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "methods=rennala_nigt")
    first = cells_of(tmp_path)
    assert len(first) == 1
    done.clear()
    monkeypatch.setattr(simulate, "measure", lambda *args: done.append(args[1:]) or real(*args))
    assert run(tmp_path, "methods=rennala_nigt") == 0
    assert done == [("straggler", 4, "rennala_nigt")]
    assert cells_of(tmp_path)[0] == first[0]
    assert run(tmp_path, "methods=rennala_nigt") == 0 and len(done) == 1
    assert run(tmp_path, "methods=rennala_nigt,sync_nigt", "times=sqrt") == 0  # more methods fit into the same folder
    assert done[1:] == [("sqrt", 4, "sync_nigt")]
    assert not [p for p in (tmp_path / "out").iterdir() if p.suffix not in (".json", ".png")]


def test_a_method_that_never_arrives(tmp_path, capsys):
    words = ["problem=two_tasks", "workers=2", "times=straggler", "straggler=10", "methods=malenia_nigt,afedpg"]
    assert run(tmp_path, *words) == 0
    malenia, afedpg = cells_of(tmp_path)
    assert malenia["time"] is not None and afedpg["time"] is None
    assert "not reached" in capsys.readouterr().out


def test_results_of_other_settings_are_kept_apart(tmp_path, capsys):
    assert run(tmp_path, "methods=rennala_nigt", "times=sqrt") == 0
    before = (tmp_path / "out" / "results.json").read_bytes()
    assert run(tmp_path, "methods=rennala_nigt", "times=sqrt", "M=30") == 2
    assert "M=20, not M=30" in capsys.readouterr().err
    assert (tmp_path / "out" / "results.json").read_bytes() == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cells": []}', '{"cells": [1], "settings": {}}', "\x00"])
def test_a_damaged_results_file_is_named(tmp_path, capsys, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text(content)
    assert run(tmp_path) == 2
    err = capsys.readouterr().err
    assert "results.json" in err and "out=" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("M", "expected key=value"),
        ("worker=3", "did you mean workers"),
        ("M=0", "M must be"),
        ("M=-3", "M must be"),
        ("M=many", "a whole number"),
        ("M=1.5", "a whole number"),
        ("eta=0", "eta must be in"),
        ("eta=1.01", "eta must be in"),
        ("eta=nan", "eta must be in"),
        ("alphas=0.1,-1", "alpha"),
        ("alphas=", "at least one"),
        ("alphas=inf", "alpha"),
        ("workers=4,0", "workers must be"),
        ("workers=4,4", "none twice"),
        ("methods=ppo", "methods must be one of"),
        ("times=cubic", "times must be one of"),
        ("problem=chess", "problem must be one of"),
        ("jitter=gamma", "jitter must be one of"),
        ("epsilon=0", "epsilon must be"),
        ("sigma=-1", "sigma must be"),
        ("cancel=maybe", "true or false"),
        ("m=9", "m must be from 1"),
        ("m=0", "m must be from 1"),
        ("M_init=0", "M_init must be"),
        ("transport=allreduce", "afedpg has no all-reduce"),
        ("seeds=0", "seeds must be"),
        ("out=", "out must name"),
        ("M=20 M=30", "given twice"),
    ],
)
def test_bad_input_ends_in_one_line(tmp_path, capsys, word, message):
    words = [w for w in QUICK if w.split("=")[0] not in word]
    assert simulate.main([*words, *([] if word == "out=" else [f"out={tmp_path / 'out'}"]), *word.split(" ")]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("clusterenv-hpc: ")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert simulate.main([*QUICK, f"out={tmp_path / 'file' / 'out'}"]) == 1
    err = capsys.readouterr().err
    assert str(tmp_path / "file") in err and err.count("\n") == 1


def test_help_names_every_key(capsys):
    assert simulate.main(["--help"]) == 0
    out = capsys.readouterr().out
    for key in Settings.__dataclass_fields__:
        assert f"  {key}=" in out
    assert describe() in out


def test_settings_are_typed():
    settings = parse(["workers=[3, 5]", "M_init=null", "m=3", "cancel=False", "alphas=1e-2", "methods=m_sync_nigt"])
    assert settings.workers == (3, 5) and settings.M_init is None and settings.m == 3
    assert settings.cancel is False and settings.alphas == (0.01,) and settings.methods == ("m_sync_nigt",)
    assert parse([]).methods == METHODS
