"""submit, watch, cancel, logs and list on a fake Slurm: what they ask of it, and what they say when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_slurm import JOB, FakeSlurm

from clusterenv_hpc import cli
from clusterenv_hpc.jobs import commands, record, slurm
from clusterenv_hpc.jobs.commands import describe, read_rows
from clusterenv_hpc.jobs.slurm import JobInfo

WORDS = ["env=cartpole", "slurm.mpi=pmi2", "slurm.ntasks=3"]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.answers("sbatch", "7\n")
    fake.job("RUNNING")
    return fake


@pytest.fixture
def run(fake, capsys):
    """A run that was submitted as job 7, with a record of its metrics."""
    assert cli.main(["submit", *WORDS]) == 0
    capsys.readouterr()
    directory = Path("runs/cartpole-ppo-aps-s1")
    (directory / "config.yaml").touch()
    row = {"update": 3, "env_steps": 1500, "return_mean": 21.5, "steps_per_s": 9000.0, "lag_mean": float("nan")}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"update": 4, "env')
    return directory


def elements(state, numbers=(0, 1)):
    line = JOB.replace("JobId=7", "JobId={id} ArrayJobId=7 ArrayTaskId={n}")
    return "".join(line.format(id=70 + n, n=n, state=state, reason="None", restarts=0) + "\n" for n in numbers)


# -- submit --------------------------------------------------------------------------------------------------------


def test_submit_says_the_jobs_number_and_directory_and_returns(fake, capsys):
    assert cli.main(["submit", *WORDS, "name=mine"]) == 0
    told = capsys.readouterr().out.splitlines()
    directory = Path("runs/mine").absolute()
    assert told == ["job 7: 3 ranks", f"run:    {directory}", "watch:  clusterenv-hpc watch 7"]
    script = (directory / "job.sbatch").read_text()
    assert f"run_dir={directory}" in script and "resume=true" in script and " name=mine" not in script
    assert record.read(directory)[-1]["job"] == "7"
    assert fake.calls == [f"sbatch --parsable {directory}/job.sbatch"]


def test_a_dry_run_prints_the_script_and_leaves_nothing(fake, tmp_path, capsys):
    assert cli.main(["submit", *WORDS, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH")
    assert cli.main(["submit", "--dry-run", *WORDS, "-m", "seed=1,2"]) == 0
    assert "#SBATCH --array=0-1" in capsys.readouterr().out
    assert fake.calls == [] and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("sweep", [[], ["-m", "seed=1,2"]])
def test_sbatchs_own_lists_need_no_quotes(fake, capsys, sweep):
    words = ("slurm.nodelist=n1,n[2-3]", "slurm.mail_type=END,FAIL", "slurm.gres=gpu:1,shard:2")
    assert cli.main(["submit", *WORDS, *sweep, *words, "--dry-run"]) == 0
    script = capsys.readouterr().out
    for line in ("--nodelist='n1,n[2-3]'", "--mail-type=END,FAIL", "--gres=gpu:1,shard:2"):
        assert f"#SBATCH {line}\n" in script


def test_an_array_comes_with_a_table(fake, capsys):
    assert cli.main(["submit", *WORDS, "-m", "seed=1,2", "sync=aps,always", "eval_workers=1"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "job 7: an array of 4, 3 ranks each"
    (directory,) = Path("runs").iterdir()
    table = [line.split("\t") for line in (directory / "sweep.tsv").read_text().splitlines()]
    assert table[0] == ["element", "job", "run", "overrides"]
    assert [row[1:] for row in table[1:]] == [
        [f"7_{n}", f"{n}-seed-{seed}-sync-{sync}", f"seed={seed} sync={sync}"]
        for n, (seed, sync) in enumerate([(1, "aps"), (1, "always"), (2, "aps"), (2, "always")])
    ]
    assert all(" ".join(row) == " ".join(line.split()) for row, line in zip(table, told[1:6], strict=True))
    assert record.find("7_2").directory == directory / table[3][2]


def test_a_refusal_is_shown_as_it_came_and_its_exit_code_is_ours(fake, tmp_path, capsys):
    said = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed\n"
    fake.answers("sbatch", err=said, code=4)
    for words in (WORDS, [*WORDS, "-m", "seed=1,2"]):
        assert cli.main(["submit", *words]) == 4
        assert capsys.readouterr().err == said + "clusterenv-hpc: sbatch refused the job (exit code 4)\n"
        assert not list(tmp_path.glob("runs/*"))


def test_without_slurm_nothing_is_left(fake, tmp_path, capsys):
    (fake.folder / "sbatch").unlink()
    assert cli.main(["submit", *WORDS]) == 1
    err = capsys.readouterr().err
    assert "sbatch: no such command on PATH" in err and "slurm/devcluster/up" in err and len(err.splitlines()) == 1
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("answer", [{"out": "Welcome!\n"}, {"sleep_s": 30}], ids=["garbage", "no answer"])
def test_a_job_that_may_be_there_keeps_its_directory(fake, monkeypatch, capsys, answer):
    """It would run without an output, and without the script that says what it was."""
    fake.answers("sbatch", **answer)
    monkeypatch.setattr(slurm.submit, "__kwdefaults__", {"directory": None, "timeout_s": 1.0})
    assert cli.main(["submit", *WORDS]) == 1
    err = capsys.readouterr().err
    assert ("answered" in err or "did not answer within 1 s" in err) and len(err.splitlines()) == 1
    assert Path("runs/cartpole-ppo-aps-s1/job.sbatch").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slurm.nods=2"], "slurm.nods=2: no such key; did you mean slurm.nodes? allowed: slurm.job_name, slurm.part"),
        (["slurm.nodes=1,2"], "slurm.nodes=1,2: one value expected"),
        (["workers=7"], "workers=7: the job has 3 ranks, one learner and 2 workers; allowed: workers=2"),
        (["eval_workers=1", "slurm.ntasks=2"], "eval_workers=1: the job has 2 ranks"),
        (["-m", "seed=1,2", "run_dir=x"], "run_dir=x: allowed outside of sweeps"),
        (["-m", "slurm.nodes=1,2"], "slurm keys cannot vary"),
        (["-m", "seed=range(0,5000)"], "at most 1000"),
        (["-m", "seed=1,,2"], "seed=1,,2: cannot be read"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(fake, tmp_path, capsys, words, told):
    assert cli.main(["submit", *WORDS, *words]) == 2
    err = capsys.readouterr().err
    assert told in err and len(err.splitlines()) == 1
    assert fake.calls == [] and not list(tmp_path.glob("runs/*"))


def test_the_job_is_told_even_where_it_cannot_be_written_down(fake, monkeypatch, capsys):
    def full(*args, **facts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record, "remember", full)
    assert cli.main(["submit", *WORDS]) == 1
    told = capsys.readouterr()
    assert "job 7: 3 ranks" in told.out and "No space left" in told.err


# -- watch ---------------------------------------------------------------------------------------------------------


def test_watch_shows_state_and_metrics_once(run, capsys):
    assert cli.main(["watch", "cartpole", "--once"]) == 0
    told = capsys.readouterr().out
    assert "RUNNING on n[1-2], 1:00 elapsed, 59:00 left" in told
    assert "1,500 steps, return 21.5, 9,000 steps/s" in told and "nan" not in told and "lag" not in told


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("FAILED", 1), ("CANCELLED", 1), ("TIMEOUT", 1)])
def test_watch_ends_with_the_job(fake, run, capsys, state, code):
    fake.job(state)
    (run / "summary.json").write_text('{"exit_reason": "failed: x", "env_steps": 1500, "return_mean": 21.5}')
    assert cli.main(["watch", "7"]) == code
    told = capsys.readouterr().out
    assert state in told and "exit_reason=failed: x  env_steps=1500" in told and f"run:  {run}" in told


@pytest.mark.parametrize(("reason", "code"), [("completed", 0), ("SIGTERM", 1)])
def test_a_job_that_slurm_has_forgotten_is_judged_by_its_run(fake, run, capsys, reason, code):
    fake.answers("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    (run / "summary.json").write_text(json.dumps({"exit_reason": reason}))
    assert cli.main(["watch", "7"]) == code
    assert "Slurm has forgotten this job" in capsys.readouterr().out


def test_watch_asks_again_and_gives_up_in_the_end(fake, run, capsys, monkeypatch):
    monkeypatch.setattr(commands, "PATIENCE", 3)
    fake.answers("scontrol", err="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert cli.main(["watch", str(run), "--interval", "0.01"]) == 1
    told = capsys.readouterr()
    assert "asking again" in told.out and "Unable to contact" in told.err and len(told.err.splitlines()) == 1
    assert len([call for call in fake.calls if call.startswith("scontrol")]) == 3


def test_an_array_is_counted_and_shown_by_element_with_one_question(fake, capsys):
    assert cli.main(["submit", *WORDS, "-m", "seed=1,2,3"]) == 0
    waiting = JOB.replace("JobId=7", "JobId=7 ArrayJobId=7 ArrayTaskId=2-2%1").format(
        state="PENDING", reason="Priority", restarts=0
    )
    fake.answers("scontrol", elements("RUNNING") + waiting + "\n")
    before = len(fake.calls)
    assert cli.main(["watch", "7", "--once"]) == 0
    told = capsys.readouterr().out
    assert "1 PENDING, 2 RUNNING" in told
    assert "7_1  1-seed-2  RUNNING" in told and "7_2  2-seed-3  PENDING (Priority)" in told
    assert len(fake.calls) == before + 1
    fake.answers("scontrol", elements("COMPLETED", (0, 1)) + elements("FAILED", (2,)))
    assert cli.main(["watch", "7"]) == 1
    assert "2 COMPLETED, 1 FAILED" in capsys.readouterr().out


def test_a_run_that_slurm_never_saw_cannot_be_watched(fake, capsys):
    Path("runs/local").mkdir(parents=True)
    Path("runs/local/config.yaml").touch()
    for command in ("watch", "cancel"):
        assert cli.main([command, "local"]) == 2
        assert "was not submitted to Slurm from here" in capsys.readouterr().err
    assert cli.main(["watch", "nothing"]) == 2
    assert "no such job or run" in capsys.readouterr().err
    fake.answers("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    for command in ("watch", "cancel"):
        assert cli.main([command, "123456"]) == 1
        assert "job 123456: Slurm does not know it" in "".join(capsys.readouterr())


# -- cancel, logs, list --------------------------------------------------------------------------------------------


def test_cancel_ends_what_lives(fake, run, capsys):
    fake.answers("scancel")
    assert cli.main(["cancel", "latest"]) == 0
    assert fake.calls[-1] == "scancel 7" and "job 7 cancelled (cartpole-ppo-aps-s1)" in capsys.readouterr().out
    fake.job("COMPLETED")
    calls = len(fake.calls)
    assert cli.main(["cancel", "7"]) == 0
    assert "is over already: COMPLETED" in capsys.readouterr().out and "scancel" not in fake.calls[calls:]
    fake.job("RUNNING")
    assert cli.main(["cancel", "7", "nothing"]) == 2, "a wrong name is told before anything is cancelled"
    assert "scancel" not in fake.calls[calls:] and "nothing: no such job" in capsys.readouterr().err
    fake.answers("scancel", err="scancel: error: Kill job error on job id 7: Access/permission denied\n", code=1)
    assert cli.main(["cancel", "7"]) == 1
    assert "permission denied" in capsys.readouterr().err


def test_logs_show_the_end_and_follow_to_the_end(fake, run, capsys):
    assert cli.main(["logs", "7"]) == 2
    assert "has printed nothing yet" in capsys.readouterr().err
    (run / "slurm-7.out").write_bytes(b"".join(b"line %d\n" % n for n in range(100)) + b"\xff\n")
    assert cli.main(["logs", "7", "-n", "3"]) == 0
    assert capsys.readouterr().out == "line 98\nline 99\n\ufffd\n"
    assert cli.main(["logs", "7", "-n", "0"]) == 0
    assert capsys.readouterr().out.startswith("line 0\n")
    fake.job("COMPLETED")
    assert cli.main(["logs", "7", "-n", "1", "--follow"]) == 0


def test_logs_of_a_launched_job_are_the_learners(fake, run, capsys):
    folder = run / "submitit/7"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        (folder / f"7_{rank}_log.out").write_text(f"rank {rank}\n")
    fake.answers("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert cli.main(["logs", str(run)]) == 0
    assert capsys.readouterr().out == "rank 0\n"


def test_list_shows_each_job_with_its_run(fake, run, capsys):
    fake.answers("squeue", "12_3|PENDING|0:00|1:00:00|p||Priority|other\n7|RUNNING|0:42|1:00|p|n1|None|x\n")
    fake.answers("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert cli.main(["list"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["JOB", "STATE", "ELAPSED", "LEFT", "NODES", "RUN"]
    assert first.split() == ["7", "RUNNING", "0:42", "1:00", "n1", str(run)]
    assert second.split() == ["12_3", "PENDING", "0:00", "1:00:00", "(Priority)", "other"]
    fake.answers("squeue", "")
    assert cli.main(["list"]) == 0 and "no jobs" in capsys.readouterr().out
    fake.answers("squeue", "what?\n")
    assert cli.main(["list"]) == 1 and "squeue answered" in capsys.readouterr().err


# -- what they are made of -----------------------------------------------------------------------------------------


def test_a_record_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    path.write_text("".join(f'{{"update": {n}}}\n' for n in range(20_000)) + '["no", "object"]\nnonsense\n{"update":')
    assert [row["update"] for row in read_rows(path)] == list(range(20_000))
    assert read_rows(path, last=3) == [{"update": 19_999}], "the last three lines, and what of them is a record"


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (JobInfo("7", "PENDING", "Resources"), "PENDING (Resources)"),
        (JobInfo("7", "PENDING", "BeginTime", restarts=2), "PENDING (BeginTime), restart 2"),
        (JobInfo("7", "RUNNING", nodes="n1", elapsed_s=59.9), "RUNNING on n1, 0:59 elapsed"),
        (
            JobInfo("7", "RUNNING", nodes="n1", elapsed_s=3600, left_s=86400 * 2 + 61),
            "RUNNING on n1, 1:00:00 elapsed, 2-0:01:01 left",
        ),
    ],
)
def test_states_in_words(info, text):
    assert describe(info) == text
