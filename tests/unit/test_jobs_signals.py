"""Flags, the clock, and how a job that was stopped ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from fake_slurm import FakeSlurm

from clusterenv_hpc.jobs import aftermath, signals
from clusterenv_hpc.jobs.signals import NOTICE, REQUEUE_FAILED, REQUEUE_OFF, STOP, JobSignals, Wish
from clusterenv_hpc.jobs.slurm import JobInfo


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def in_job(left_s: float = 3600.0, **more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time() + left_s)), **more}


@pytest.mark.parametrize("name", ["USR2", "USR1", "TERM"])
def test_handlers_only_set_flags(name):
    before = signal.getsignal(signal.Signals[f"SIG{name}"])
    with JobSignals(name, environ={}) as stop:
        assert stop.look() == Wish.NONE
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
        assert stop.look() == STOP and stop.reason == f"SIG{name}"
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == f"SIG{name}", "the first reason stays"
    assert signal.getsignal(signal.Signals[f"SIG{name}"]) == before


def test_sigterm_counts_whatever_the_signal_is():
    with JobSignals("USR1", environ={}) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert Wish.SAVE in stop.look() and stop.reason == "SIGTERM"


def test_a_notice_counts_as_the_signal_it_names(tmp_path):
    stop = JobSignals(environ={NOTICE: str(tmp_path / "notice")})
    assert not stop.look()
    (tmp_path / "notice").write_text("USR2\n")
    deadline = time.monotonic() + 5
    while not stop.look() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stop.reason == "SIGUSR2"


def test_the_learners_end_is_told_to_the_script(tmp_path):
    program = "from clusterenv_hpc.jobs.signals import JobSignals; JobSignals()"
    environ = {**os.environ, NOTICE: str(tmp_path / "notice")}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["notice.over"]


def test_no_update_is_begun_that_cannot_end_before_the_signal():
    stop = JobSignals(environ=in_job(1000), lead_s=120)
    assert stop.time_left is not None and 995 < stop.time_left <= 1000
    assert not stop.look(update_s=800)
    assert stop.fits(870) and not stop.fits(890)
    assert stop.look(update_s=890) == STOP and stop.reason == "time_limit"


def test_a_lead_as_long_as_the_limit_still_lets_a_job_work():
    stop = JobSignals(environ=in_job(60), lead_s=120)
    assert stop.fits(20) and not stop.fits(40)


def test_without_a_limit_everything_fits(fake):
    fake.answers("scontrol", "JobId=7 JobState=RUNNING EndTime=Unknown\n")
    stop = JobSignals(environ={"SLURM_JOB_ID": "7"})
    assert stop.time_left is None and not stop.look(update_s=1e9)


def test_the_limit_is_asked_of_slurm_where_it_is_not_in_the_environment(fake):
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 500))
    fake.answers("scontrol", f"JobId=7 JobState=RUNNING EndTime={end}\n")
    stop = JobSignals(environ={"SLURM_JOB_ID": "7"})
    assert stop.time_left == pytest.approx(500, abs=3)


def test_a_limit_that_cannot_be_learnt_is_said_and_no_reason_to_stop(fake):
    fake.answers("scontrol", err="down\n", code=1)
    said: list[str] = []
    stop = JobSignals(environ={"SLURM_JOB_ID": "7"}, say=said.append)
    assert not stop.look(update_s=1e9) and "time limit is not known" in said[0]


def test_a_limit_that_was_raised_meanwhile_counts(fake, monkeypatch):
    monkeypatch.setattr(signals, "AGAIN_S", 0.0)
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 5000))
    fake.answers("scontrol", f"JobId=7 JobState=RUNNING EndTime={end}\n")
    stop = JobSignals(environ=in_job(60), lead_s=10)
    assert not stop.look(update_s=100)


def stopped(environ: dict[str, str], reason: str = "SIGUSR2", **settings: object) -> JobSignals:
    stop = JobSignals(environ=environ, **settings)  # type: ignore[arg-type]
    stop.note(reason)
    return stop


def test_a_running_job_is_requeued_by_its_own_name(fake):
    fake.job("RUNNING")
    departure = stopped(in_job(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")).leave()
    assert departure.requeued and departure.exit_code == 0
    assert fake.calls[-1] == "scontrol requeue 7_2", "7 alone would be the whole array"


def test_a_cancelled_job_does_not_come_back(fake):
    fake.job("COMPLETING")
    departure = stopped(in_job(), "SIGTERM").leave()
    assert not departure.requeued and departure.exit_code == REQUEUE_OFF
    assert not [call for call in fake.calls if "requeue" in call]


def test_a_job_at_its_limit_comes_back(fake):
    fake.job("COMPLETING", reason="TimeLimit")
    assert stopped(in_job(), "SIGTERM").leave().requeued


def test_a_job_that_slurm_requeues_is_left_alone(fake):
    fake.job("COMPLETING", restarts=1)
    departure = stopped(in_job(), "SIGTERM").leave()
    assert departure.requeued and not [call for call in fake.calls if "requeue" in call]


def test_with_requeue_off_the_exit_code_says_so(fake):
    departure = stopped(in_job(), requeue=False).leave()
    assert departure.exit_code == REQUEUE_OFF and "requeue is off" in departure.said and not fake.calls


def test_outside_of_slurm_nothing_is_asked(fake):
    assert stopped({}).leave().exit_code == REQUEUE_OFF and not fake.calls


@pytest.mark.parametrize("failure", [{"err": "no\n", "code": 1}, {"sleep_s": 30}])
def test_a_requeue_that_fails_or_hangs_ends_in_time_and_says_so(fake, monkeypatch, failure):
    monkeypatch.setattr(signals, "REQUEUE_S", 0.3)
    monkeypatch.setattr(signals, "look", lambda job: JobInfo("7", "RUNNING"))
    fake.answers("scontrol", **failure)
    began = time.monotonic()
    departure = stopped(in_job()).leave()
    assert (
        departure.exit_code == REQUEUE_FAILED and not departure.requeued and "could not be requeued" in departure.said
    )
    assert time.monotonic() - began < 15


def summary(folder, reason: str) -> None:
    (folder / "summary.json").write_text(f'{{"exit_reason": "{reason}"}}')


def after(monkeypatch, folder, code: int, *more: str, **environ: str) -> int:
    for name, value in {"SLURM_JOB_ID": "7", **environ}.items():
        monkeypatch.setenv(name, value)
    return aftermath.main([str(code), str(folder), *more])


def test_a_job_whose_rank_was_killed_is_requeued(fake, monkeypatch, tmp_path):
    fake.job("RUNNING")
    summary(tmp_path, "running")
    assert after(monkeypatch, tmp_path, 137) == 137
    assert fake.calls[-1] == "scontrol requeue 7"


def test_a_run_that_says_it_lost_a_rank_is_requeued_whatever_its_code(fake, monkeypatch, tmp_path):
    fake.job("RUNNING")
    summary(tmp_path, "lost a rank: rank 2")
    after(monkeypatch, tmp_path, 1)
    assert fake.calls[-1] == "scontrol requeue 7"


@pytest.mark.parametrize(
    ("code", "reason", "state", "more", "environ"),
    [
        (0, "completed", "RUNNING", (), {}),
        (1, "running", "RUNNING", (), {}),
        (2, "running", "RUNNING", (), {}),
        (REQUEUE_OFF, "SIGTERM", "RUNNING", (), {}),
        (137, "failed: rank 1: ValueError", "RUNNING", (), {}),
        (143, "running", "COMPLETING", (), {}),  # scancel
        (137, "running", "RUNNING", ("--max-restarts=2",), {"SLURM_RESTART_COUNT": "2"}),
        (137, "running", "RUNNING", ("--max-restarts=0",), {}),
    ],
)
def test_others_are_not(fake, monkeypatch, tmp_path, code, reason, state, more, environ):
    fake.job(state)
    summary(tmp_path, reason)
    assert after(monkeypatch, tmp_path, code, *more, **environ) == code
    assert not [call for call in fake.calls if "requeue" in call]


@pytest.mark.parametrize(("state", "restarts"), [("COMPLETING", 1), ("RUNNING", 0)])
def test_nothing_contradicts_what_a_stopped_run_has_said(fake, monkeypatch, tmp_path, capsys, state, restarts):
    fake.job(state, restarts=restarts)
    summary(tmp_path, "SIGUSR2")
    assert after(monkeypatch, tmp_path, 75 if state == "RUNNING" else 143) in (75, 143)
    assert capsys.readouterr().err == "" and not [call for call in fake.calls if "requeue" in call]
    if restarts:
        summary(tmp_path, "running")
        after(monkeypatch, tmp_path, 143)
        assert "not requeued: Slurm does that itself, with job 7" in capsys.readouterr().err


def test_what_an_earlier_life_said_does_not_count(fake, monkeypatch, tmp_path):
    fake.job("RUNNING")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/update-000000001.pt").touch()
    summary(tmp_path, "failed: earlier")
    os.utime(tmp_path / "summary.json", (1, 1))
    after(monkeypatch, tmp_path, 137, "--after=60")
    assert fake.calls[-1] == "scontrol requeue 7"


def test_a_run_that_is_over_is_a_success_however_its_ranks_ended(fake, monkeypatch, tmp_path):
    fake.job("RUNNING")
    summary(tmp_path, "completed")
    assert after(monkeypatch, tmp_path, 137) == 0 and not fake.calls


def test_ranks_that_never_began_are_not_started_over_and_over(fake, monkeypatch, tmp_path, capsys):
    fake.job("RUNNING")
    assert after(monkeypatch, tmp_path, 137) == 137
    assert not fake.calls and "before the run had begun" in capsys.readouterr().err


@pytest.mark.parametrize("code", [142, 15, 16])
def test_a_job_whose_mpi_did_not_start_tries_again_but_not_for_ever(fake, monkeypatch, tmp_path, capsys, code):
    fake.job("RUNNING")
    assert after(monkeypatch, tmp_path, code) == code
    assert fake.calls[-1] == "scontrol requeue 7" and f"MPI did not start (exit code {code})" in capsys.readouterr().err
    calls = len(fake.calls)
    assert after(monkeypatch, tmp_path, code, SLURM_RESTART_COUNT="2") == code
    assert after(monkeypatch, tmp_path, code, "--max-restarts=0", SLURM_RESTART_COUNT="0") == code
    assert len(fake.calls) == calls and "at most 0 are allowed" in capsys.readouterr().err


def test_damaged_summaries_and_a_slurm_that_is_down_are_survived(fake, monkeypatch, tmp_path, capsys):
    fake.answers("scontrol", err="down\n", code=1)
    (tmp_path / "summary.json").write_text('{"exit_reason": ')
    assert after(monkeypatch, tmp_path, 137) == 137
    assert "not requeued" in capsys.readouterr().err
    assert after(monkeypatch, tmp_path, 137, SLURM_JOB_ID="x") == 137
