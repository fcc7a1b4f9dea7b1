"""Commands of Slurm's that answer what a test wants, for the paths that a real cluster takes only on a bad day."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

JOB = "JobId=7 JobName=x JobState={state} Reason={reason} Restarts={restarts} RunTime=00:01:00 TimeLimit=01:00:00 " + (
    "Partition=debug NodeList=n[1-2] ExitCode=0:0 EndTime=2030-01-01T00:00:00 StdOut=/r/slurm-7.out"
)


class FakeSlurm:
    """A folder that is put first on PATH, and the calls that came."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.log = folder, folder / "calls.log"
        monkeypatch.setenv("PATH", str(folder))  # and nothing else: a real Slurm may be installed
        for name in list(os.environ):
            if name.startswith(("SLURM_", "SBATCH_", "PMI", "OMPI_COMM")):
                monkeypatch.delenv(name)

    def answers(self, command: str, out: str = "", *, err: str = "", code: int = 0, sleep_s: float = 0.0) -> None:
        """From now on ``command`` prints ``out`` and ``err``, and ends with ``code``, after ``sleep_s`` seconds."""
        path = self.folder / command
        wait = f"{'exec ' if sleep_s > 10 else ''}/bin/sleep {sleep_s}"
        path.write_text(
            f'#!/bin/sh\necho {command} "$@" >>{self.log}; /usr/bin/env >{self.folder}/env.{command}; {wait}\n'
            f"printf %s {shlex.quote(out)}; printf %s {shlex.quote(err)} >&2; exit {code}\n"
        )
        path.chmod(0o755)

    def job(self, state: str = "RUNNING", reason: str = "None", restarts: int = 0) -> None:
        """``scontrol`` knows a job 7, and whatever else it is asked succeeds."""
        self.answers("scontrol", JOB.format(state=state, reason=reason, restarts=restarts) + "\n")

    @property
    def calls(self) -> list[str]:
        """The command lines so far."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def environment(self, command: str) -> dict[str, str]:
        """What the command last saw."""
        lines = (self.folder / f"env.{command}").read_text().splitlines()
        return dict(line.partition("=")[::2] for line in lines)
