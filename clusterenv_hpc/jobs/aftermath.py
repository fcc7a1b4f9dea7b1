"""What a job's script calls once its ranks are gone: was a rank killed, and does the job go on from its checkpoint?

    python -m clusterenv_hpc.jobs.aftermath EXIT_CODE RUN_DIR --max-restarts=N --after=SECONDS

Slurm requeues a job that lost a node.  One that lost a process only ends, so it requeues itself, here.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from pathlib import Path

from clusterenv_hpc.jobs.environment import SlurmEnvironmentError, read_slurm
from clusterenv_hpc.jobs.signals import REQUEUE_FAILED, REQUEUE_OFF, REQUEUE_S
from clusterenv_hpc.jobs.slurm import SlurmError, look, requeue

FINAL = (0, 1, 2, REQUEUE_OFF, REQUEUE_FAILED, 130)
"""Exit codes that a run chose: it is over, was refused, has failed of itself, or was stopped."""

NO_START = (128 + signal.SIGALRM, 15, 16)
"""Exit codes of ranks whose MPI did not start: ended by their own alarm, or by MPICH.  Another time it may."""

EARLY_RESTARTS = 2
"""How often such a job is requeued."""

OVER = ("completed", "solved")
"""Exit reasons of a run that has come to its end."""

STOPPED = re.compile(r"SIG[A-Z0-9]+$|time_limit$")
"""Exit reasons of a run that was stopped from outside, and has saved."""

LOST = "lost a rank"
"""How the exit reason of a run begins whose learner found a rank gone."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the job's script."""
    parser = argparse.ArgumentParser(prog="python -m clusterenv_hpc.jobs.aftermath")
    parser.add_argument("code", type=int)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--max-restarts", type=int, default=20)
    parser.add_argument("--after", type=float, default=float("inf"), help="seconds since the ranks were started")
    args = parser.parse_args(argv)
    told = exit_reason(args.run_dir, args.after)
    if args.code and told in OVER:
        say(f"the run is over ({told}); that the ranks ended with exit code {args.code} afterwards does not matter")
        return 0
    begun = bool(told) or any(args.run_dir.glob("checkpoints/*.pt"))
    if reason := why_not(args.code, told, args.max_restarts, begun):
        if args.code and not STOPPED.match(told):  # such a run has said itself what becomes of its job
            say(f"the ranks ended with exit code {args.code}; not requeued: {reason}")
        return int(args.code)
    job = read_slurm()
    assert job is not None
    if begun:
        say(
            f"a rank was killed (exit code {args.code}); job {job.label} goes back to the queue, and on from the last "
            f"checkpoint in {args.run_dir}"
        )
    else:
        say(f"MPI did not start (exit code {args.code}); job {job.label} goes back to the queue, and tries again")
    try:
        requeue(job.label, timeout_s=REQUEUE_S)
    except SlurmError as error:
        say(str(error))
    return int(args.code)


def say(text: str) -> None:
    """One line into the job's output."""
    print(f"clusterenv-hpc: {text}", file=sys.stderr, flush=True)


def why_not(code: int, told: str, max_restarts: int, begun: bool) -> str | None:
    """Why a job whose ranks ended with ``code`` is not requeued; None if it is.

    Args:
        told: the run's own reason, as :func:`exit_reason` has it.
        begun: whether the run has come so far that there is something to go on with.
    """
    if code in FINAL and not told.startswith(LOST):
        return "the run ended by itself"
    if told.startswith("failed"):  # trying again would end the same way
        return f"the run {told}"
    if not begun and code not in NO_START:
        return "they ended before the run had begun"
    try:
        job = read_slurm()
        if job is None:
            return "this is no Slurm job"
        allowed = max_restarts if begun else min(EARLY_RESTARTS, max_restarts)
        if job.restart_count >= allowed:
            return f"it was restarted {job.restart_count} times, and at most {allowed} are allowed"
        info = look(job.label)
    except (SlurmEnvironmentError, SlurmError) as error:
        return str(error)
    if info.state != "RUNNING" and (info.restarts or 0) > job.restart_count:
        return f"Slurm does that itself, with job {job.label}"
    if info.state != "RUNNING":
        return f"Slurm is ending job {job.label} ({info.state}{f', {info.reason}' if info.reason else ''})"
    return None


def exit_reason(run_dir: Path, within_s: float) -> str:
    """What the run says of its end, if it said so within the last ``within_s`` seconds; else an empty text."""
    path = run_dir / "summary.json"
    try:
        if time.time() - path.stat().st_mtime > within_s:
            return ""
        return str(json.loads(path.read_text())["exit_reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
