"""Slurm's commands: sbatch, squeue, scontrol, scancel, sacct; each call has a deadline, and each failure one line.

Waiting is done by asking squeue now and then: ``sbatch --wait`` looks only every ten seconds, and holds the terminal.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clusterenv_hpc.jobs.config import seconds
from clusterenv_hpc.jobs.environment import scrubbed_environment

CALL_S = 30.0
"""Deadline of one call, in seconds: a loaded controller may take several."""

SUBMIT_S = 120.0
"""Deadline of sbatch, which waits longer when the controller is busy."""

JOB = re.compile(r"[1-9]\d{0,17}(_\d{1,9}|\+\d{1,5})?")
"""How a job is written: 123, 120_3 for an element of an array, 123+1 for a component of a heterogeneous job."""

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ENDING = ("COMPLETING", "STAGE_OUT", "SIGNALING")
ACTIVE = (*WAITING, "RUNNING", "SUSPENDED", "STOPPED", "RESIZING", *ENDING)
"""States that may still change by themselves."""


class SlurmError(RuntimeError):
    """A Slurm command is missing, does not answer in time, or answers nonsense; the message is one line."""


class SlurmRefused(SlurmError):
    """Slurm said no.  ``said`` is what it printed, as it came; ``exit_code`` is the command's."""

    def __init__(self, command: str, code: int, said: str) -> None:
        super().__init__(f"{command} ended with exit code {code}: {' '.join(said.split()) or 'it said nothing'}")
        self.command, self.exit_code, self.said = command, code, said


class SlurmUncertain(SlurmError):
    """It is not known whether Slurm did what it was asked for."""


@dataclass(frozen=True)
class JobInfo:
    """What Slurm says of one job.

    job: as Slurm's commands take it.  state: one of Slurm's long words, such as RUNNING; UNKNOWN where Slurm has
    forgotten the job.  elapsed_s, left_s: seconds; None where not known or without limit.  restarts: how often it was
    requeued.  output: the path of its output.  count: for how many elements of an array this stands.
    """

    job: str
    state: str = "UNKNOWN"
    reason: str | None = None
    name: str = ""
    partition: str | None = None
    nodes: str | None = None
    elapsed_s: float | None = None
    left_s: float | None = None
    restarts: int | None = None
    exit_code: str | None = None
    output: str | None = None
    count: int = 1

    @property
    def active(self) -> bool:
        """Whether the job waits, runs or is about to end."""
        return self.state in ACTIVE


def call(words: Sequence[str], *, timeout_s: float = CALL_S) -> str:
    """The standard output of one of Slurm's commands.

    Raises:
        SlurmError: it is not there, or cannot be run.
        SlurmUncertain: it does not answer within ``timeout_s`` seconds.
        SlurmRefused: it ends with an exit code other than 0.
    """
    environ = {name: value for name, value in scrubbed_environment().items() if not _PRESETS.match(name)}
    # Inside a job that is being ended Slurm signals every process of it, and the call is often one of those.
    shielded = ["/bin/sh", "-c", "trap '' TERM CONT USR1 USR2 HUP; exec \"$@\"", "sh", *words]
    try:
        if shutil.which(words[0], path=environ.get("PATH")) is None:
            raise FileNotFoundError
        done = subprocess.run(shielded, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise SlurmUncertain(
            f"{words[0]} did not answer within {timeout_s:g} s: Slurm's controller is down or overloaded "
            f"(try: scontrol ping)"
        ) from None
    except FileNotFoundError:
        raise SlurmError(
            f"{words[0]}: no such command on PATH; this machine has no Slurm, or its module is not loaded "
            f'(to try without a cluster: slurm/devcluster/up, then eval "$(slurm/devcluster/env)")'
        ) from None
    except OSError as error:
        raise SlurmError(f"{words[0]} cannot be run: {error.strerror or error}") from None
    said = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        code = done.returncode if done.returncode > 0 else 128 - done.returncode
        raise SlurmRefused(str(words[0]), code, done.stderr.decode(errors="replace") or said)
    return said


_PRESETS = re.compile(r"(SQUEUE|SACCT|SCONTROL|SCANCEL)_")
"""What a person sets for these commands' output would change what is read here."""


def submit(script: str, *, directory: str | None = None, timeout_s: float = SUBMIT_S) -> str:
    """Hands a script to sbatch; returns the job's number.

    Args:
        directory: where the job starts; the current one if None.

    Raises:
        SlurmError, SlurmRefused: see :func:`call`.
        SlurmUncertain: the same, or the answer is no job's number.
    """
    said = call(["sbatch", "--parsable", *([f"--chdir={directory}"] if directory else []), script], timeout_s=timeout_s)
    last = next(reversed(said.strip().splitlines()), "")
    job = last.partition(";")[0].strip()
    if not JOB.fullmatch(job):
        raise SlurmUncertain(
            f"sbatch answered {_shortened(said)}; expected a job's number (whether it took the job shows: squeue --me)"
        )
    return job


def look(job: str, *, timeout_s: float = CALL_S) -> JobInfo:
    """What Slurm says of ``job``; state UNKNOWN where it has forgotten it and keeps no accounts.

    Of an array or a heterogeneous job: the first element or component that is still active, else the first that did
    not end well, else the first; with the nodes of all components.

    Raises:
        SlurmError, SlurmRefused: see :func:`call`; or the answer cannot be read.
    """
    infos = look_all(job, timeout_s=timeout_s)
    infos = [info for info in infos if info.job == job] or infos
    active = [info for info in infos if info.active]
    bad = [info for info in infos if info.state != "COMPLETED"]
    worst = next(iter(active or bad or infos))
    nodes = dict.fromkeys(info.nodes for info in infos if info.nodes) if "+" in worst.job else [worst.nodes or ""]
    return dataclasses.replace(worst, job=job, nodes=",".join(nodes) or None)


def look_all(job: str, *, timeout_s: float = CALL_S) -> list[JobInfo]:
    """The same of every element of an array and every component of a heterogeneous job; never empty.

    Elements that wait are one entry, as Slurm keeps them, with ``count`` above 1.
    """
    try:
        shown = call(["scontrol", "--oneliner", "show", "job", job], timeout_s=timeout_s)
    except SlurmRefused as error:
        if "nvalid job id" not in error.said:
            raise
        return [from_accounts(job, timeout_s=timeout_s)]
    records = [_record(line) for line in shown.splitlines() if line.strip()]
    if any("JobId" not in record or "JobState" not in record for record in records):
        raise SlurmError(f"scontrol show job {job} answered {_shortened(shown)}; expected JobId=... JobState=...")
    return [_info(record) for record in records] or [from_accounts(job, timeout_s=timeout_s)]


def _record(line: str) -> dict[str, str]:
    """Key and value of a line of scontrol's; a value goes on until the next key."""
    found = list(re.finditer(r"(?:^|\s)([A-Za-z][\w/:]*)=", line))
    ends = [*(match.start() for match in found[1:]), len(line)]
    record: dict[str, str] = {}
    for match, end in zip(found, ends, strict=False):
        record.setdefault(match[1], line[match.end() : end].strip())
    return record


def _info(record: Mapping[str, str]) -> JobInfo:
    known = {name: value for name, value in record.items() if value not in ("", "(null)", "None", "N/A", "Unknown")}
    job = known["JobId"]
    if "ArrayTaskId" in known and known["ArrayTaskId"].isdigit():
        job = f"{known['ArrayJobId']}_{known['ArrayTaskId']}"
    elif "ArrayJobId" in known:
        job = known["ArrayJobId"]
    elif "HetJobOffset" in known:
        job = f"{known['HetJobId']}+{known['HetJobOffset']}"
    elapsed, limit = seconds(known.get("RunTime")), seconds(known.get("TimeLimit"))
    running = known["JobState"] == "RUNNING"
    return JobInfo(
        job=job,
        state=known["JobState"],
        reason=known.get("Reason"),
        name=known.get("JobName", ""),
        partition=known.get("Partition"),
        nodes=known.get("NodeList"),
        elapsed_s=elapsed,
        left_s=max(0.0, limit - elapsed) if running and limit is not None and elapsed is not None else None,
        restarts=int(known["Restarts"]) if known.get("Restarts", "").isdigit() else None,
        exit_code=known.get("ExitCode"),
        output=known.get("StdOut"),
        count=_count(known.get("ArrayTaskId", "")),
    )


def _count(tasks: str) -> int:
    """How many elements ``0-3,7-9:2%2`` are."""
    total = 0
    for part in tasks.partition("%")[0].split(","):
        if found := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            total += len(range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1)))
    return max(total, 1)


def from_accounts(job: str, *, timeout_s: float = CALL_S) -> JobInfo:
    """A job that the controller has forgotten, as far as there is a database; UNKNOWN otherwise.  Never raises."""
    words = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "JobID,State,ElapsedRaw,ExitCode,NodeList,Partition,JobName"]
    try:
        lines = [line.split("|", 6) for line in call(words, timeout_s=timeout_s).splitlines() if line.strip()]
    except SlurmError:
        return JobInfo(job)
    for fields in lines:
        if len(fields) == 7 and fields[0] == job and fields[1]:
            elapsed = float(fields[2]) if fields[2].isdigit() else None
            state = fields[1].split()[0]  # CANCELLED by 1000
            return JobInfo(job, state, None, fields[6], fields[5], fields[4], elapsed, exit_code=fields[3])
    return JobInfo(job)


def end_time(job: str, *, timeout_s: float = CALL_S) -> float | None:
    """When the time limit of a running job strikes, in seconds since 1970; None without a limit.

    Raises:
        SlurmError, SlurmRefused: see :func:`call`.
    """
    record = _record(call(["scontrol", "--oneliner", "show", "job", job], timeout_s=timeout_s).split("\n")[0])
    try:
        return datetime.datetime.fromisoformat(record.get("EndTime", "")).timestamp()
    except ValueError:
        return None


def mine(*, timeout_s: float = CALL_S) -> list[JobInfo]:
    """This user's jobs that wait or run, oldest first.

    Raises:
        SlurmError, SlurmRefused: see :func:`call`; or the answer cannot be read.
    """
    format = "%i|%T|%M|%L|%P|%N|%r|%j"  # the name last: it may hold anything
    infos = []
    for line in call(["squeue", "--me", "-h", "-r", "-o", format], timeout_s=timeout_s).splitlines():
        fields = line.split("|", 7)
        if len(fields) != 8 or not JOB.fullmatch(fields[0]):
            raise SlurmError(f"squeue answered {_shortened(line)}; expected {format}")
        job, state, elapsed, left, partition, nodes, reason, name = fields
        reason = "" if reason == "None" else reason
        infos.append(
            JobInfo(job, state, reason or None, name, partition, nodes or None, seconds(elapsed), seconds(left))
        )
    return sorted(infos, key=lambda info: [int(part) for part in re.split(r"[_+]", info.job)])


def cancel(jobs: Iterable[str], *, signal: str | None = None, timeout_s: float = CALL_S) -> None:
    """Ends ``jobs``, or sends them ``signal``.

    Raises:
        SlurmError, SlurmRefused: see :func:`call`.
    """
    call(["scancel", *([f"--signal={signal}"] if signal else []), *jobs], timeout_s=timeout_s)


def requeue(job: str, *, timeout_s: float = CALL_S) -> None:
    """Sends a running job back to the queue.  Slurm ends what still runs of it at once.

    Raises:
        SlurmError, SlurmRefused: see :func:`call`.
    """
    call(["scontrol", "requeue", job], timeout_s=timeout_s)


def available() -> bool:
    """Whether sbatch is on PATH."""
    return any(os.access(os.path.join(folder, "sbatch"), os.X_OK) for folder in os.get_exec_path())


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= 120 else flat[:117] + "...")
