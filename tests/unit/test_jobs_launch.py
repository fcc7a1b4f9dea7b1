"""``launch``: what is refused before anything is submitted, what reaches sbatch, and what a handle says of its job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

import clusterenv_hpc
from clusterenv_hpc.jobs import launch as launching
from clusterenv_hpc.jobs import record
from clusterenv_hpc.jobs.config import SlurmConfigError
from clusterenv_hpc.jobs.launch import JobFailed, TrainRank
from clusterenv_hpc.jobs.slurm import SlurmError, SlurmRefused, SlurmUncertain
from clusterenv_hpc.run.config import ConfigError

WORDS = ["env=cartpole", "slurm.mpi=pmi2"]
SHORT = ["env=cartpole", "total_steps=600", "eval.episodes=0", "algo.num_steps=16", "envs_per_worker=4",
         "algo.minibatch_size=64", "log.tensorboard=false"]  # fmt: skip


BROKEN = "def make():\n    raise RuntimeError('no licence')\n"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return FakeSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def sbatch(fake):
    """One that takes every job, with what submitit needs beside it."""
    os.symlink("/bin/echo", fake.folder / "echo")
    fake.answers("sbatch", "7\n")
    fake.answers("srun")
    return fake


def script_of(directory: Path) -> str:
    """The script that sbatch was given for the run in ``directory``."""
    (path,) = directory.glob("submitit/*/*_submission.sh")
    return path.read_text()


@pytest.mark.parametrize(
    ("overrides", "keys", "told"),
    [
        ("env=cartpole", {}, "a list of words"),
        (7, {}, "a list of words"),
        ([["env=cartpole"], "seed=2"], {}, "lists of words alone"),
        (["env=cartpole", ["seed=2"]], {}, r"words such as 'seed=3'"),
        (["env=cartpole", 3], {}, r"words such as 'seed=3'"),
        (["env=cartpool"], {}, "cartpool"),
        (["env=cartpole", "sede=1"], {}, "sede"),
        (WORDS, {"cluster": "lsf"}, "cluster=lsf: allowed: slurm, local, debug"),
        (WORDS, {"nods": 2}, "slurm.nods"),
        (WORDS, {"nodes": 0}, "slurm.nodes"),
        (WORDS, {"mem": "lots"}, "slurm.mem"),
        (WORDS, {"time": "soon"}, "slurm.time"),
        (WORDS, {"sbatch": ["--output=x"]}, "the script sets this itself"),
        ([*WORDS, "workers=5"], {"nodes": 2, "ntasks_per_node": 2}, "workers=5: the job has 4 ranks"),
        (WORDS, {"nodes": 2, "ntasks": 3}, "slurm.ntasks=3: submitit starts equal tasks"),
        (WORDS, {"learner_cpus": 4, "cpus_per_task": 1}, "slurm.learner_cpus"),
        (WORDS, {"launcher": "mpiexec"}, "slurm.launcher"),
        ([[*WORDS, "slurm.time=10"], [*WORDS, "slurm.time=20"]], {}, "slurm keys cannot vary"),
        ([[*WORDS, "run_dir=runs/x"], [*WORDS, "run_dir=runs/../runs/x"]], {}, "run_dir=.*x: several runs"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_submitted(sbatch, tmp_path, overrides, keys, told):
    with pytest.raises((SlurmConfigError, ConfigError), match=told) as caught:
        clusterenv_hpc.launch(overrides, **keys)
    assert "\n" not in str(caught.value)
    assert sbatch.calls == [] and not list(tmp_path.glob("runs/*")), "nothing submitted, nothing left"


def test_a_machine_without_slurm_is_told_what_it_may_do(fake, tmp_path):
    with pytest.raises(SlurmError, match=r"sbatch: no such command .* cluster='local' or cluster='debug'"):
        clusterenv_hpc.launch(WORDS)
    assert not list(tmp_path.glob("runs/*"))


def test_sbatchs_refusal_is_an_error_with_its_words(sbatch, tmp_path):
    said = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n"
    sbatch.answers("sbatch", err=said, code=1)
    for overrides in (WORDS, [[*WORDS, "seed=1"], [*WORDS, "seed=2"]]):
        with pytest.raises(SlurmRefused, match="Invalid account or account/partition") as caught:
            clusterenv_hpc.launch(overrides)
        assert caught.value.said == said and caught.value.exit_code == 1
        assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("answer", [{"out": "Welcome!\n"}, {"sleep_s": 30}], ids=["garbage", "no answer"])
def test_a_job_that_may_have_been_taken_keeps_its_directory(sbatch, tmp_path, monkeypatch, answer):
    sbatch.answers("sbatch", **answer)
    monkeypatch.setattr(launching.slurm.submit, "__kwdefaults__", {"directory": None, "timeout_s": 1.0})
    began = time.monotonic()
    with pytest.raises(SlurmUncertain, match=r"answered|did not answer within 1 s"):
        clusterenv_hpc.launch(WORDS)
    assert time.monotonic() - began < 20
    assert (tmp_path / "runs/cartpole-ppo-aps-s1").is_dir()


def test_a_job_is_submitted_and_remembered(sbatch, tmp_path):
    job = clusterenv_hpc.launch(
        WORDS, nodes=2, ntasks_per_node=3, time="1:00:00", partition="long", mem="4G", requeue=False, cpus_per_task=2,
        sbatch=["--comment='two words'", "--contiguous"], modules=["gcc/13"], env={"NOTE": "it's"}, qos=None,
    )  # fmt: skip
    assert job.job_id == "7" and job.directory == tmp_path / "runs/cartpole-ppo-aps-s1"
    assert record.read(job.directory)[-1]["job"] == "7"
    assert len(sbatch.calls) == 1 and sbatch.calls[0].startswith("sbatch --parsable ")
    script = script_of(job.directory)
    lines = script.splitlines()
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=3", "#SBATCH --time=1:00:00", "#SBATCH --partition=long",
        "#SBATCH --mem=4G", "#SBATCH --no-requeue", "#SBATCH --comment='two words'", "#SBATCH --contiguous",
        "#SBATCH --signal=USR2@120", "module load gcc/13 || exit 1",
    ):  # fmt: skip
        assert line in lines, f"{line}\n{script}"
    assert "--qos" not in script and "#SBATCH --requeue" not in script
    assert "export NOTE='it'\"'\"'s'" in script
    assert re.search(r"srun .*--mpi=pmi2 .*--cpus-per-task=2", script) and "--max-restarts=0" in script
    assert subprocess.run(["/bin/bash", "-n"], input=script, text=True).returncode == 0


def test_what_is_not_set_is_left_to_the_site(sbatch):
    """submitit would set five minutes, and a wckey of its own."""
    script = script_of(clusterenv_hpc.launch([*WORDS, "slurm.signal_lead_s=0"], ntasks=4).directory)
    options = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    names = {option.partition("=")[0] for option in options}
    assert names == {"error", "output", "job-name", "nodes", "ntasks-per-node", "open-mode", "requeue"}, script
    assert "nodes=1" in options and "ntasks-per-node=4" in options


def test_a_key_can_be_a_word_or_a_keyword(sbatch):
    one = script_of(clusterenv_hpc.launch([*WORDS, "slurm=cpu", "slurm.nodes=3"]).directory)
    other = script_of(clusterenv_hpc.launch([*WORDS, "slurm=cpu"], nodes=3).directory)
    assert "--nodes=3" in one and re.sub("-s1-2", "-s1", other).splitlines()[1:9] == one.splitlines()[1:9]


def test_several_lists_make_one_array(sbatch, tmp_path):
    jobs = clusterenv_hpc.launch([[*WORDS, f"seed={seed}"] for seed in (1, 2, 3)], ntasks=2, array_limit=2)
    assert [job.job_id for job in jobs] == ["7_0", "7_1", "7_2"] and len(sbatch.calls) == 1
    assert [job.directory.name for job in jobs] == [f"cartpole-ppo-aps-s{seed}" for seed in (1, 2, 3)]
    (script,) = {path.read_text() for path in tmp_path.glob("runs/*/submitit/*/*_submission.sh")}
    assert "#SBATCH --array=0-2%2" in script
    for number, job in enumerate(jobs):
        assert f"  {number}) run_dir={job.directory} ;;" in script
        assert record.find(f"7_{number}").directory.absolute() == job.directory
    assert isinstance(clusterenv_hpc.launch([[*WORDS]]), list), "one list of words is an array of one"


def test_a_job_around_the_notebook_does_not_leak_into_what_it_launches(sbatch, monkeypatch):
    around = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "9", "SLURM_CPUS_PER_TASK": "3", "SBATCH_QOS": "x", "PMI_RANK": "0"}
    for name, value in {**around, "SLURM_CONF": "/c"}.items():
        monkeypatch.setenv(name, value)
    clusterenv_hpc.launch(WORDS)
    assert sbatch.environment("sbatch")["SLURM_CONF"] == "/c"
    assert not set(around) & set(sbatch.environment("sbatch"))
    assert os.environ["SLURM_JOB_ID"] == "5" and os.environ["PMI_RANK"] == "0", "the notebook keeps its own"


class TestHandle:
    """Of a job of the fake Slurm."""

    @pytest.fixture
    def job(self, sbatch):
        job = clusterenv_hpc.launch(WORDS)
        sbatch.job("RUNNING")
        return job

    def ends(self, job, reason):
        (job.directory / "summary.json").write_text(json.dumps({"exit_reason": reason, "env_steps": 5}))

    def test_state_comes_from_slurm(self, sbatch, job):
        assert (job.state, job.done) == ("RUNNING", False) and "7, RUNNING" in repr(job)
        sbatch.job("CANCELLED")
        assert job.done
        sbatch.answers("scontrol", "what?\n")
        with pytest.raises(SlurmError, match="answered"):
            _ = job.state
        assert "7, UNKNOWN" in repr(job), "a cell that ends with the job never raises"

    def test_metrics_and_summary_before_and_while_they_are_written(self, job):
        assert job.metrics() == [] and job.summary() is None and job.logs() == ""
        (job.directory / "metrics.jsonl").write_text('{"update": 1}\nnonsense\n{"update": 2}\n{"upd')
        (job.directory / "summary.json").write_text("{")
        assert job.metrics() == [{"update": 1}, {"update": 2}] and job.summary() is None
        with pytest.raises(ConfigError):
            clusterenv_hpc.launch([*WORDS, "seed=2"]).plot()

    def test_result_waits_and_then_is_the_summary(self, sbatch, job):
        with pytest.raises(TimeoutError, match=r"job 7 is RUNNING after 0\.2 s; it goes on"):
            job.result(timeout_s=0.2, every_s=0.05)
        self.ends(job, "completed")
        sbatch.job("COMPLETED")
        assert job.result(timeout_s=5)["env_steps"] == 5

    def test_a_requeued_job_is_waited_for(self, sbatch, job):
        self.ends(job, "SIGUSR2")
        sbatch.job("PENDING", reason="BeginTime", restarts=1)
        with pytest.raises(TimeoutError, match="PENDING"):
            job.result(timeout_s=0.2, every_s=0.05)

    @pytest.mark.parametrize(("state", "reason"), [("FAILED", "failed: x"), ("CANCELLED", "SIGTERM"), ("TIMEOUT", "")])
    def test_a_job_that_ended_otherwise_says_why(self, sbatch, job, state, reason):
        sbatch.job(state)
        if reason:
            self.ends(job, reason)
        began = time.monotonic()
        with pytest.raises(JobFailed, match=rf"job 7 is over \({state}\), its run says:? {reason or 'nothing'}"):
            job.result(every_s=0.05)
        assert time.monotonic() - began < 10

    def test_silence_of_slurms_ends_the_waiting_too(self, sbatch, job, monkeypatch):
        monkeypatch.setattr(launching, "UNANSWERED_S", 0.2)
        sbatch.answers("scontrol", err="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
        with pytest.raises(SlurmRefused, match="Unable to contact"):
            job.result(every_s=0.05)

    def test_a_forgotten_job_is_judged_by_its_run(self, sbatch, job, monkeypatch):
        monkeypatch.setattr(launching, "UNANSWERED_S", 0.2)
        sbatch.answers("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
        with pytest.raises(JobFailed, match="UNKNOWN"):
            job.result(every_s=0.05)
        self.ends(job, "solved")
        assert job.result()["exit_reason"] == "solved"

    def test_cancel_asks_slurm(self, sbatch, job):
        sbatch.answers("scancel")
        job.cancel()
        assert sbatch.calls[-1] == "scancel 7"
        sbatch.answers("scancel", err="scancel: error: Access/permission denied\n", code=1)
        with pytest.raises(SlurmRefused, match="permission denied"):
            job.cancel()


def test_without_slurm_a_run_is_a_process_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    job = clusterenv_hpc.launch([*SHORT, "workers=1"], cluster="local")
    unwanted = clusterenv_hpc.launch([*SHORT, "workers=0", "total_steps=100000000"], cluster="local")
    assert time.monotonic() - began < 5, "it returns at once"
    unwanted.cancel()
    assert job.state in ("RUNNING", "COMPLETED")
    summary = job.result(timeout_s=90, every_s=0.1)
    assert (summary["env_steps"], summary["workers"], job.state) == (600, 1, "COMPLETED")
    assert job.metrics()[-1]["env_steps"] == 600 and "made all its steps" in job.logs()
    with pytest.raises(JobFailed, match="CANCELLED"):
        unwanted.result(timeout_s=60, every_s=0.1)


def test_a_run_that_fails_on_this_machine_says_so_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    job = clusterenv_hpc.launch([*SHORT, "env.id=broken:make", "env.backend=sync", "workers=0"], cluster="local")
    with pytest.raises(JobFailed, match=r"is over \(FAILED\).*no licence"):
        job.result(timeout_s=60, every_s=0.1)


def test_a_run_on_this_machine_that_is_cancelled_saves_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SHORT, "workers=0", "total_steps=100000000", "checkpoint.every_s=0.5", "log.every_s=0.1"]
    job = clusterenv_hpc.launch(words, cluster="local")
    deadline = time.monotonic() + 60
    while (job.summary() or {}).get("exit_reason") != "running":
        assert time.monotonic() < deadline, job.logs()
        time.sleep(0.1)
    job.cancel()
    assert (job.state, job.summary()["exit_reason"]) == ("CANCELLED", "SIGTERM"), job.logs()
    assert f"update-{job.summary()['updates']:09}.pt" in {path.name for path in job.directory.glob("checkpoints/*")}


def test_debug_runs_within_result_and_fails_without_a_debugger(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    job = clusterenv_hpc.launch([*SHORT, "workers=0"], cluster="debug")
    assert job.state == "PENDING" and not job.done
    assert job.result()["env_steps"] == 600 and job.state == "COMPLETED"
    job.cancel()
    assert job.state == "COMPLETED"
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    failing = clusterenv_hpc.launch(
        [*SHORT, "env.id=broken:make", "env.backend=sync", "workers=0", "name=x"], cluster="debug"
    )
    with pytest.raises(JobFailed, match=r"FAILED.*exit code 1; its output says why"):
        failing.result()
    assert failing.state == "FAILED"
    assert "no licence" in capfd.readouterr().err
    unwanted = clusterenv_hpc.launch([*SHORT, "name=y"], cluster="debug")
    unwanted.cancel()
    assert unwanted.state == "CANCELLED"
    with pytest.raises(JobFailed, match="CANCELLED"):
        unwanted.result()


def test_a_rank_that_leaves_with_an_exit_code_is_a_failure(monkeypatch):
    import clusterenv_hpc.run.start as start

    def leaves(code):
        def main(words):
            raise SystemExit(code)

        return main

    for code in (0, None):
        monkeypatch.setattr(start, "main", leaves(code))
        assert TrainRank(["x"])() == 0
    for code, told in ((3, "exit code 3"), ("text", "exit code 1")):
        monkeypatch.setattr(start, "main", leaves(code))
        with pytest.raises(JobFailed, match=told):
            TrainRank(["x"])()


NOTEBOOK = """
import asyncio
import clusterenv_hpc

assert asyncio.get_running_loop() is not None
try:
    clusterenv_hpc.launch(["env=cartpole", "sede=1"], cluster="local")
except ValueError as error:
    print(error)
job = clusterenv_hpc.launch(WORDS, cluster="local")
job.cancel()
while not job.done:
    await asyncio.sleep(0.1)
job
"""


@pytest.mark.needs("notebook")
def test_in_a_notebooks_kernel_nothing_is_different(tmp_path):
    """A kernel has a running event loop, no terminal, and no standard input."""
    import nbformat
    from nbclient import NotebookClient

    cell = nbformat.v4.new_code_cell(f"WORDS = {[*SHORT, 'total_steps=10000000', 'workers=1']}\n" + NOTEBOOK)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(nbformat.v4.new_notebook(cells=[cell]), timeout=90, kernel_name="python3", resources=where).execute()
    told = "".join(str(output.get("text") or output["data"]["text/plain"]) for output in cell.outputs)
    assert "sede" in told and "LaunchedJob(" in told
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_importing_it_starts_nothing():
    program = """
    import sys, threading
    from clusterenv_hpc import launch
    assert threading.active_count() == 1
    assert not {"torch", "mpi4py", "submitit"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=30)
