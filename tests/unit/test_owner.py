"""Two processes never write into one run, and nothing that a dead one left behind keeps it from going on."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterenv_hpc.jobs.slurm import JobInfo, SlurmError
from clusterenv_hpc.run import owner as module
from clusterenv_hpc.run.config import ConfigError
from clusterenv_hpc.run.owner import (
    FILE,
    STALE_S,
    Owner,
    Ownership,
    TakenOverError,
    forget_the_dead,
    read,
    this_process,
)

ELSEWHERE = Owner("node9", "another boot/1", 77, 5, None, "today")


def leave(directory: Path, owner: Owner, age_s: float = 0.0) -> None:
    path = directory / FILE
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))


@pytest.fixture
def other() -> Iterator[Owner]:
    """A live process of this machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        began = module._began(process.pid)
        assert began is not None
        yield dataclasses.replace(this_process(), pid=process.pid, began=began)


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(job: str) -> JobInfo:
        raise SlurmError("no Slurm here")

    monkeypatch.setattr(module, "look", look)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_a_run_is_held_and_given_back(tmp_path: Path) -> None:
    with Ownership(tmp_path) as owner:
        assert owner.before is None and this_process().same_process(read(tmp_path))
        owner.demand()
    assert list(tmp_path.iterdir()) == []


def test_a_live_process_of_this_machine_keeps_its_run(tmp_path: Path, other: Owner) -> None:
    leave(tmp_path, other, age_s=10 * STALE_S)
    with pytest.raises(ConfigError, match=rf"process {other.pid} on .* works on this run; allowed: another run_dir"):
        Ownership(tmp_path)
    assert read(tmp_path) == other and [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("change", [{"began": 1}, {"pid": 2**22 + 1}], ids=["number used again", "no such process"])
def test_a_dead_process_of_this_machine_keeps_nothing(tmp_path: Path, other: Owner, change: dict[str, int]) -> None:
    leave(tmp_path, dead := dataclasses.replace(other, **change))
    with Ownership(tmp_path) as owner:
        assert owner.before == dead


def test_only_the_dead_of_this_machine_are_forgotten(tmp_path: Path, other: Owner) -> None:
    for one in (other, ELSEWHERE, dataclasses.replace(other, began=1)):
        leave(tmp_path, one)
        forget_the_dead(tmp_path)
        assert read(tmp_path) == (None if one.began == 1 else one)


def test_a_process_elsewhere_keeps_its_run_while_it_renews_its_record(tmp_path: Path) -> None:
    leave(tmp_path, ELSEWHERE, age_s=STALE_S - 60)
    with pytest.raises(ConfigError, match=r"node9 .* if it was killed, try again in (59|60) s"):
        Ownership(tmp_path)
    leave(tmp_path, ELSEWHERE, age_s=STALE_S + 1)
    with Ownership(tmp_path) as owner:
        assert owner.before == ELSEWHERE


def test_a_requeued_job_takes_its_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fresh the record of the node that died."""
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    leave(tmp_path, before := dataclasses.replace(ELSEWHERE, job="123"))
    with Ownership(tmp_path) as owner:
        assert owner.before == before


def test_another_job_waits_until_slurm_says_that_the_first_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "124")
    leave(tmp_path, dataclasses.replace(ELSEWHERE, job="123"))
    for state in (None, "RUNNING", "UNKNOWN", "NODE_FAIL"):
        if state is not None:
            monkeypatch.setattr(module, "look", lambda job, state=state: JobInfo(job, state))
        if state == "NODE_FAIL":
            Ownership(tmp_path).release()
        else:
            with pytest.raises(ConfigError, match="job 123"):
                Ownership(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 3}', '{"host": 1}'])
def test_a_record_that_cannot_be_read_blocks_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    Ownership(tmp_path).release()


def test_who_finds_another_in_his_place_stops_and_leaves_the_record(tmp_path: Path) -> None:
    with Ownership(tmp_path) as owner:
        leave(tmp_path, ELSEWHERE)
        owner.demand(every_s=60)  # not yet
        with pytest.raises(TakenOverError, match=r"process 77 on node9 .* has taken this run over"):
            owner.demand()
    assert read(tmp_path) == ELSEWHERE


def test_a_record_is_renewed_while_the_run_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.01)
    with Ownership(tmp_path) as owner:
        os.utime(tmp_path / FILE, (1, 1))
        for _ in range(500):
            if (tmp_path / FILE).stat().st_mtime > 1:
                return
            owner._over.wait(0.01)
    pytest.fail("not renewed within 5 s")
