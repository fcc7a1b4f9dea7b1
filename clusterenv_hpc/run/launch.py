"""``clusterenv-hpc train workers=N`` started plainly: start the ranks on this machine, and say how it ended."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from clusterenv_hpc.run.mpi_launcher import (
    LaunchError,
    find_launcher,
    find_mpi,
    launch_command,
    launcher_environment,
    rank_environment,
)
from clusterenv_hpc.run.supervise import Ended, RankEnd, supervise

__all__ = ["LaunchError", "describe", "launch_program", "launch_ranks", "rank_environment"]

BAD_REQUEST = 2
"""The exit code of a command that was refused before anything began."""

RANK_PROGRAM = (
    # Until the run has its own handlers, an interrupt ends a rank without a traceback from the middle of an import.
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    # Whole lines, also under PYTHONUNBUFFERED: else two ranks that print at once print into each other.
    "[stream.reconfigure(line_buffering=True, write_through=False) for stream in (sys.stdout, sys.stderr)]; "
    "from clusterenv_hpc.cli import main; sys.exit(main())"
)


def launch_ranks(argv: Sequence[str], workers: int, run_dir: str | None, *, grace_s: float = 8.0) -> int:
    """Run ``clusterenv-hpc`` with ``argv`` on a learner and ``workers`` worker ranks of this machine.

    Args:
        argv: what stands after ``clusterenv-hpc``, the sub-command first.
        workers: at least 1.
        run_dir: where the run keeps its checkpoints, if known; named in the message after a crash.
        grace_s: seconds that the learner has to save and end after SIGINT or SIGTERM.

    Returns the learner's exit code, where it had the last word; otherwise 128 + s for a rank killed by signal s, or
    the code of the rank that failed.  No rank is left when this returns.

    Raises:
        LaunchError: there is no MPI, or no launcher that belongs to it.
    """
    program = [sys.executable, "-c", RANK_PROGRAM, *argv]
    ended = launch_program(program, workers + 1, grace_s=grace_s)
    if message := describe(ended, run_dir):
        start = b"" if ended.spoken.endswith(b"\n") or not ended.spoken else b"\n"  # a progress bar ends without one
        os.write(2, start + message.encode() + b"\n")
    return ended.code


def launch_program(
    program: Sequence[str], ranks: int, *, grace_s: float = 8.0, timeout_s: float | None = None
) -> Ended:
    """Run any command line on ``ranks`` MPI ranks of this machine, and wait for them.

    ``grace_s``: see ``launch_ranks``.  ``timeout_s``: seconds after which the ranks are told to end, as by SIGTERM.
    Raises LaunchError.
    """
    if ranks < 1:
        raise LaunchError(f"expected at least 1 rank, got {ranks}")
    mpi = find_mpi()
    launcher = find_launcher(mpi)
    environ = launcher_environment(mpi, ranks, os.environ)
    if os.isatty(2):  # the error stream is where progress is drawn
        environ |= {"CLUSTERENV_HPC_TTY": "1", "CLUSTERENV_HPC_COLUMNS": str(os.get_terminal_size(2).columns)}
    try:
        return supervise(
            lambda guard: launch_command(mpi, launcher, [*guard, *program], ranks, os.environ),
            environ,
            grace_s=grace_s,
            timeout_s=timeout_s,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {launcher}: {error.strerror or error}") from error


def describe(ended: Ended, run_dir: str | None) -> str:
    """What to tell the user of a launch's end; empty where the ranks have said it all."""
    cause = _cause(ended)
    unasked = ended.stopped_by is None and ended.code not in (0, BAD_REQUEST)
    resume = _resume(run_dir) if cause or unasked else []
    if cause and run_dir is not None and not resume:
        resume = ["No checkpoint was written yet."]
    return "\n".join([*([f"clusterenv-hpc: {cause}"] if cause else []), *resume])


def _cause(ended: Ended) -> str:
    failed = ended.failed
    if ended.stopped_by is not None:
        name = signal.Signals(ended.stopped_by).name
        if ended.killed:
            return f"the ranks did not stop in time after {name} and were killed"
        if failed is not None and failed.signal == ended.stopped_by:
            return f"stopped by {name}"
    if failed is None and ended.killed:
        return "the learner has ended, but its workers did not and were killed"
    if failed is None:
        return "" if ended.code == 0 or _explained(ended.spoken) else _launcher_failed(ended)
    rest = (
        "; the other ranks did not notice in time and were killed" if ended.killed else "; the other ranks were ended"
    )
    if failed.signal is not None:
        return f"{_who(failed)} was killed by {_signal_words(failed.signal)}{rest}"
    if failed.rank == 0 or _explained(ended.spoken):  # the learner has the last word, whatever it is
        return ""
    return f"{_who(failed)} ended with exit code {failed.code} and no word why{rest}"


def _who(end: RankEnd) -> str:
    return f"rank {end.rank} ({'worker' if end.rank else 'learner'}) on {socket.gethostname()}, pid {end.pid},"


def _launcher_failed(ended: Ended) -> str:
    words = " ".join(ended.launcher_words.decode(errors="replace").split())
    return f"the MPI launcher ended with exit code {ended.code}; it said: {words or 'nothing'}"


def _signal_words(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    hints = {
        signal.SIGKILL: ": by hand, or by the kernel because memory ran out (see dmesg)",
        signal.SIGSEGV: ": a crash in compiled code",
        signal.SIGBUS: ": often a full /dev/shm",
    }
    return f"signal {number} ({name}{hints.get(signal.Signals(number), '')})"


def _explained(spoken: bytes) -> bool:
    """Whether a rank has told its error itself."""
    return b"clusterenv-hpc: " in spoken or b"Traceback (most recent call last)" in spoken


def _resume(run_dir: str | None) -> list[str]:
    saved = sorted(Path(run_dir, "checkpoints").glob("update-*.pt")) if run_dir is not None else []
    if not saved:
        return []
    again = shlex.join(["clusterenv-hpc", "train", f"run_dir={run_dir}", "resume=true"])
    return [f"The last checkpoint is {saved[-1]}. To continue from it:", f"  {again}"]
