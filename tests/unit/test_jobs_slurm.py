"""Slurm's commands when they are missing, slow, refuse, or answer nonsense; and what good answers are read as."""

from __future__ import annotations

import time

import pytest
from fake_slurm import FakeSlurm

from clusterenv_hpc.jobs import slurm
from clusterenv_hpc.jobs.slurm import SlurmError, SlurmRefused


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return FakeSlurm(tmp_path / "bin", monkeypatch)


CALLS = [
    ("sbatch", lambda: slurm.submit("x.sbatch", timeout_s=0.5)),
    ("scontrol", lambda: slurm.look("7", timeout_s=0.5)),
    ("scontrol", lambda: slurm.requeue("7", timeout_s=0.5)),
    ("scontrol", lambda: slurm.end_time("7", timeout_s=0.5)),
    ("scancel", lambda: slurm.cancel(["7"], timeout_s=0.5)),
    ("squeue", lambda: slurm.mine(timeout_s=0.5)),
]


@pytest.mark.parametrize(("command", "call"), CALLS)
def test_a_missing_command_is_named(fake, command, call):
    with pytest.raises(SlurmError, match=f"{command}: no such command"):
        call()


@pytest.mark.parametrize(("command", "call"), CALLS)
def test_a_command_that_does_not_answer_is_given_up(fake, command, call):
    fake.answers(command, sleep_s=30)
    began = time.monotonic()
    with pytest.raises(SlurmError, match=r"did not answer within 0\.5 s"):
        call()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("command", "call"), CALLS)
def test_a_refusal_is_shown_as_it_came(fake, command, call):
    said = f"{command}: error: no\n{command}: error: never\n"
    fake.answers(command, err=said, code=3)
    with pytest.raises(SlurmRefused, match="exit code 3") as caught:
        call()
    assert caught.value.said == said and caught.value.exit_code == 3 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "call", "garbage"),
    [
        ("sbatch", CALLS[0][1], "Welcome to the cluster!\n"),
        ("sbatch", CALLS[0][1], ""),
        ("sbatch", CALLS[0][1], "12x\n"),
        ("sbatch", CALLS[0][1], "-5\n"),
        ("scontrol", CALLS[1][1], "what?\n"),
        ("squeue", CALLS[5][1], "a|b\n"),
        ("squeue", CALLS[5][1], "x|RUNNING|0:01|1:00|p|n1|None|name\n"),
    ],
)
def test_garbage_is_not_believed(fake, command, call, garbage):
    fake.answers(command, garbage)
    with pytest.raises(SlurmError, match="answered"):
        call()


def test_bytes_that_are_no_text_do_not_matter(fake):
    (fake.folder / "sbatch").write_bytes(b"#!/bin/sh\nprintf '\\377\\376\\n123\\n'\n")
    (fake.folder / "sbatch").chmod(0o755)
    assert slurm.submit("x.sbatch") == "123"


@pytest.mark.parametrize(("answer", "job"), [("123\n", "123"), ("123;cluster\n", "123"), ("a banner\n 123\n", "123")])
def test_the_jobs_number_is_read(fake, answer, job):
    fake.answers("sbatch", answer)
    assert slurm.submit("my script.sbatch") == job
    assert fake.calls == ["sbatch --parsable my script.sbatch"]


def test_an_enclosing_job_is_scrubbed_and_the_cluster_kept(fake, monkeypatch):
    fake.answers("sbatch", "1\n")
    for name, value in {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "9", "SLURM_CONF": "/c", "SBATCH_QOS": "q"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    slurm.submit("x")
    seen = fake.environment("sbatch")
    assert seen["SLURM_CONF"] == "/c"
    assert not [name for name in seen if name.startswith(("SLURM_J", "SLURM_N", "SBATCH_", "SQUEUE_"))]


def test_a_job_is_read(fake):
    fake.job("RUNNING", restarts=2)
    info = slurm.look("7")
    assert (info.state, info.nodes, info.elapsed_s, info.left_s, info.restarts) == ("RUNNING", "n[1-2]", 60, 3540, 2)
    assert info.output == "/r/slurm-7.out" and info.reason is None and info.active


def test_of_an_array_the_state_is_that_of_its_worst(fake):
    line = "JobId=9{n} ArrayJobId=90 ArrayTaskId={n} JobName=x JobState={state} Reason=None RunTime=00:00:09\n"
    fake.answers("scontrol", "".join(line.format(n=n, state=s) for n, s in enumerate(("COMPLETED", "FAILED"))))
    assert slurm.look("90").state == "FAILED" and slurm.look("90_0").state == "COMPLETED"
    fake.answers("scontrol", line.format(n=0, state="FAILED") + line.format(n="1-4%2", state="PENDING"))
    infos = slurm.look_all("90")
    assert [info.count for info in infos] == [1, 4] and slurm.look("90").state == "PENDING"


def test_of_a_heterogeneous_job_the_nodes_are_those_of_all_components(fake):
    line = "JobId=9{n} HetJobId=90 HetJobOffset={n} JobName=x JobState=RUNNING Reason=None NodeList={nodes}\n"
    fake.answers("scontrol", line.format(n=0, nodes="gpu1") + line.format(n=1, nodes="n[1-2]"))
    assert slurm.look("90").nodes == "gpu1,n[1-2]"


def test_a_forgotten_job_is_looked_up_in_the_accounts(fake):
    fake.answers("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert slurm.look("7").state == "UNKNOWN"  # no sacct at all
    fake.answers("sacct", err="Slurm accounting storage is disabled\n", code=1)
    assert slurm.look("7").state == "UNKNOWN"
    fake.answers("sacct", "7|CANCELLED by 1000|61|0:15|n1|debug|a|b\n")
    info = slurm.look("7")
    assert (info.state, info.elapsed_s, info.name, info.active) == ("CANCELLED", 61, "a|b", False)


def test_own_jobs_are_listed_by_number(fake):
    fake.answers(
        "squeue", "12_3|PENDING|0:00|1:00:00|debug||Priority|n|ame\n9|RUNNING|1-00:00:01|UNLIMITED|debug|n1|None|x\n"
    )
    first, second = slurm.mine()
    assert (first.job, first.elapsed_s, first.left_s) == ("9", 86401, None)
    assert (second.job, second.reason, second.name, second.nodes) == ("12_3", "Priority", "n|ame", None)


def test_a_signal_to_the_whole_job_does_not_end_the_call(fake):
    # Slurm signals every process of a job that it ends; the answer is still wanted.
    import os
    import signal
    import threading

    fake.answers("scontrol", "JobId=7 JobState=RUNNING\n", sleep_s=1.0)

    def hit():
        deadline = time.monotonic() + 5
        while not fake.calls and time.monotonic() < deadline:
            time.sleep(0.02)
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                try:
                    with open(f"/proc/{entry}/stat") as stat:
                        parent = int(stat.read().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                if parent == os.getpid():
                    os.kill(int(entry), signal.SIGTERM)

    thread = threading.Thread(target=hit)
    thread.start()
    info = slurm.look("7")
    thread.join()
    assert info.state == "RUNNING"
