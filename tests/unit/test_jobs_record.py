"""Which run a word means, which jobs a run remembers, what a sweep's words come to, and how ranks are started."""

from __future__ import annotations

import json
import os

import pytest
from fake_slurm import FakeSlurm

from clusterenv_hpc.jobs import record, sweep
from clusterenv_hpc.jobs.choose import choose_launch
from clusterenv_hpc.jobs.config import SlurmConfigError, make_config
from clusterenv_hpc.jobs.record import NotFoundError, find
from clusterenv_hpc.jobs.render import Launch
from clusterenv_hpc.run import mpi_launcher
from clusterenv_hpc.run.mpi_launcher import Mpi


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return FakeSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def runs(tmp_path):
    """runs/: two runs, a sweep of two, and what is no run."""
    runs = tmp_path / "runs"
    names = ("cartpole-s1", "cartpole-s2", "sweep", "sweep/0-a", "sweep/1-b", "notes")
    for name in names:
        (runs / name).mkdir(parents=True)
        if name != "notes":
            (runs / name / "config.yaml").touch()
    for age, name in enumerate(names):
        os.utime(runs / name, (age, age))
    return runs


def test_jobs_are_remembered_the_newest_last_and_facts_are_kept(tmp_path):
    record.remember(tmp_path, "7", nodes=3)
    record.remember(tmp_path, "8_1")
    record.remember(tmp_path, "7", state="x")
    first, last = record.read(tmp_path)
    assert first["job"] == "8_1" and last["job"] == "7" and last["nodes"] == 3 and last["state"] == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"], "nothing is left beside it"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"jobs": 3}', '{"jobs": [1, {"job": "x; rm"}, {"job": null}, {}]}'])
def test_a_file_that_is_none_of_ours_is_no_jobs(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    assert record.read(tmp_path) == []
    record.remember(tmp_path, "7")
    assert record.read(tmp_path)[0]["job"] == "7"


def test_a_run_is_found_by_path_name_start_and_as_the_latest(fake, runs):
    record.remember(runs / "cartpole-s1", "7")
    os.utime(runs / "cartpole-s1", (99, 99))
    assert find(str(runs / "cartpole-s2")).directory == runs / "cartpole-s2"
    target = find("cartpole-s1")
    assert (target.job, target.name) == ("7", "cartpole-s1") and find("latest") == target
    assert find("sweep/0-a").directory is not None and find("0-").directory is not None
    assert find("cartpole-s2").job is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cart", "cart: several runs begin so: cartpole-s1, cartpole-s2"),
        ("pong", "pong: no such job or run; .* runs: cartpole-s1, cartpole-s2, sweep"),
        ("notes", "no such job or run"),
        ("0", "no such job or run|several"),
        ("-5", "no such job or run"),
        ("", "no such job or run"),
    ],
)
def test_what_is_not_found_is_told_with_what_there_is(fake, runs, text, told):
    if text == "0":
        text = "0x"
    with pytest.raises(NotFoundError, match=told):
        find(text)


def test_without_any_run_that_is_told(fake):
    for text in ("latest", "x"):
        with pytest.raises(NotFoundError, match=r"none in .*runs"):
            find(text)


def test_a_jobs_number_finds_its_run_by_what_it_remembers_or_by_its_output(fake, runs):
    record.remember(runs / "sweep", "70")
    record.remember(runs / "sweep/1-b", "70_1")
    assert find("70_1").directory.samefile(runs / "sweep/1-b") and find("70").directory.samefile(runs / "sweep")
    assert find("70+0").directory.samefile(runs / "sweep"), "the first component of a heterogeneous job"
    assert find("8").directory is None, "no Slurm to ask"
    fake.answers("scontrol", f"JobId=8 JobState=RUNNING StdOut={runs}/cartpole-s2/slurm-8.out\n")
    assert find("8").directory == runs / "cartpole-s2"
    fake.answers("scontrol", "JobId=8 JobState=RUNNING StdOut=/elsewhere/slurm-8.out\n")
    target = find("8")
    assert target.directory is None and target.name == "job 8"


# -- sweeps --------------------------------------------------------------------------------------------------------


def test_combinations_come_in_hydras_order(capsys):
    elements = sweep.expand(["env=cartpole", "seed=1,2", "sync=aps,always"])
    assert [element.varied for element in elements] == [
        ("seed=1", "sync=aps"), ("seed=1", "sync=always"), ("seed=2", "sync=aps"), ("seed=2", "sync=always"),
    ]  # fmt: skip
    assert elements[2].overrides == ("env=cartpole", "seed=2", "sync=aps")
    assert sweep.main(["3", "env=cartpole", "seed=1,2", "sync=aps,always"]) == 0
    assert capsys.readouterr().out.splitlines() == ["env=cartpole", "seed=2", "sync=always"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a=1"], [()]),
        (["a=range(0,3)"], [("a=0",), ("a=1",), ("a=2",)]),
        (["a=[1,2]"], [()]),
        (["a='1,2'"], [()]),
        (["a=[1,2],[3]"], [("a=[1,2]",), ("a=[3]",)]),
        (["a={x: 1},{x: 2}"], [("a={x:1}",), ("a={x:2}",)]),
        (["a=choice(x, y)"], [("a=x",), ("a=y",)]),
    ],
)
def test_what_is_a_sweep_and_what_is_a_value(words, expected):
    assert [element.varied for element in sweep.expand(words)] == expected


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["4", "seed=1,2"], "element 4: the words make 2; allowed: --array=0-1"),
        (["x", "seed=1,2"], "element x"),
        (["-1", "seed=1,2"], "element -1"),
        (["0", "seed=1,,2"], "cannot be read"),
        (["0", "seed"], "cannot be read"),
        (["0", "seed=1,2", "run_dir=x"], "run_dir=x: allowed outside of sweeps"),
        (["0", "a=range(0,100)", "b=range(0,11)"], "1100 combinations so far; allowed: at most 1000"),
    ],
)
def test_elements_that_are_not_there(capsys, argv, told):
    assert sweep.main(argv) == 2
    err = capsys.readouterr().err
    assert told in err and len(err.splitlines()) == 1


# -- how ranks are started -----------------------------------------------------------------------------------------

MPICH, OPENMPI4, OPENMPI5 = (
    Mpi("MPICH", (5, 0, 2), "", "4"), Mpi("Open MPI", (4, 1, 4), "", "4"), Mpi("Open MPI", (5, 0, 1), "", "4")
)  # fmt: skip
ALL = (
    "MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
)


@pytest.mark.parametrize(
    ("mpi", "keys", "offered", "expected"),
    [
        (MPICH, {}, ALL, Launch(mpi="pmi2")),
        (OPENMPI4, {}, ALL, Launch(mpi="pmix")),
        (OPENMPI4, {}, "", Launch(mpi="pmix")),  # srun says nothing: the usual one
        (Mpi("Cray MPI", (8,), "", "4"), {}, ALL, Launch(mpi=None)),  # the site's default
        (MPICH, {"mpi": "pmix_v4"}, "", Launch(mpi="pmix_v4")),
        (MPICH, {"launcher": "mpiexec"}, ALL, Launch(program="/x/mpiexec")),
        (OPENMPI5, {"launcher": "ulfm"}, ALL, Launch(program="/x/mpiexec", openmpi=True)),
    ],
)
def test_ranks_are_started_as_this_mpi_understands(fake, monkeypatch, mpi, keys, offered, expected):
    monkeypatch.setattr(mpi_launcher, "find_mpi", lambda: mpi)
    monkeypatch.setattr(mpi_launcher, "find_launcher", lambda mpi: "/x/mpiexec")
    fake.answers("srun", offered)
    assert choose_launch(make_config(keys)) == expected


@pytest.mark.parametrize(
    ("mpi", "keys", "told"),
    [
        (OPENMPI4, {}, "needs srun --mpi=pmix, this Slurm has pmi2; allowed: slurm.launcher=mpiexec"),
        (MPICH, {"launcher": "ulfm"}, "slurm.launcher=ulfm: mpi4py loads MPICH"),
        (OPENMPI4, {"launcher": "ulfm"}, "expected Open MPI 5 or later"),
    ],
)
def test_what_does_not_fit_is_told(fake, monkeypatch, mpi, keys, told):
    monkeypatch.setattr(mpi_launcher, "find_mpi", lambda: mpi)
    fake.answers("srun", "MPI plugin types are...\n\tnone\n\tpmi2\n")
    with pytest.raises(SlurmConfigError, match=told):
        choose_launch(make_config(keys))


def test_a_job_is_written_as_json_that_others_can_read(tmp_path):
    record.remember(tmp_path, "7")
    assert json.loads((tmp_path / "job.json").read_text())["jobs"][0]["since"]
