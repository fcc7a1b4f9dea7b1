"""Stands between an MPI launcher and one rank, and writes down how the rank ended.

    python -I guard.py FOLDER PROGRAM ...

Launchers give the exit codes of several ranks as one, and not always the right rank's name; the guard is the rank's
parent, so it knows.  It writes FOLDER/<rank>.pid when the rank starts and FOLDER/<rank>.end (wait status, and the
time) when it is over, and only then ends the same way itself: whoever is killed in consequence comes later.  Guard
and rank follow their parents into death, whatever those die of.  Runs by itself: imports nothing of this package.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from types import FrameType

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1


def follow(parent: int) -> None:
    """Have this process killed when its parent, ``parent``, dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def write(path: str, text: str) -> None:
    """Whole or not at all, as far as a reader can see."""
    with open(f"{path}.part", "w") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


def main(folder: str, program: list[str]) -> int:
    """Run ``program``; returns its exit code, or dies of the signal that it died of."""
    follow(os.getppid())
    rank = next(os.environ[name] for name in RANK_VARIABLES if name in os.environ)
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is somebody to pass them on to
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        follow(guard)
        try:
            os.execvp(program[0], program)
        except OSError as error:
            print(f"clusterenv-hpc: cannot start {program[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    write(os.path.join(folder, f"{rank}.pid"), str(child))
    _, status = os.waitpid(child, 0)
    write(os.path.join(folder, f"{rank}.end"), f"{status} {time.monotonic()}")
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the rank's, is enough
        if os.WTERMSIG(status) in PASSED_ON:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(guard, os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
