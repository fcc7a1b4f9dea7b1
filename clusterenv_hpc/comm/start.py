"""Before MPI starts: what an earlier life of the same job has left is removed, and the start gets a deadline."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

MPI_START_S = 300
"""How long MPI may take to start, in whole seconds: ranks that cannot agree would wait for each other for ever."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """To import mpi4py's MPI in, which starts it; does nothing where somebody has."""
    if "mpi4py.MPI" in sys.modules:
        yield
        return
    clear_leftovers()
    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    if ours:
        signal.alarm(MPI_START_S)  # ends this process, even within MPI_Init, where no Python runs
    try:
        yield
    finally:
        if ours:
            signal.alarm(0)


def clear_leftovers(
    environ: Mapping[str, str] | None = None, folder: Path = Path("/dev/shm"), *, wait_s: float = 60.0
) -> list[Path]:
    """Removes the shared memory that an earlier life of this job's step has left on this node; returns what was there.

    MPICH under ``srun --mpi=pmi2`` names it after the number of the job and its step, and a requeued job has the same:
    its ranks would take the dead ones' memory for their own, and fail or hang at the start.  To be called by every
    task before MPI is started: the node's first one removes it, the others wait (``wait_s`` at most) until it has.
    """
    environ = os.environ if environ is None else environ
    name, node, restart = (environ.get(key, "") for key in ("PMI_JOBID", "SLURM_NODEID", "SLURM_RESTART_COUNT"))
    if not (re.fullmatch(r"\d+\.\d+", name) and node.isdigit() and restart.isdigit() and int(restart) > 0):
        return []
    done = [folder / f"clusterenv-hpc-{name}-{node}-{life}" for life in (int(restart) - 1, int(restart))]
    if environ.get("SLURM_LOCALID") != "0":
        deadline = time.monotonic() + wait_s
        while not done[1].exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return []
    digest = 0x811C9DC5  # FNV-1a, of 32 bits
    for byte in name.encode():
        digest = (digest ^ byte) * 0x01000193 & 0xFFFFFFFF
    path, removed = folder / f"mpich_shm_{digest:x}_{node}", []
    with contextlib.suppress(OSError):
        if path.stat().st_uid == os.geteuid():
            path.unlink()
            removed.append(path)
    with contextlib.suppress(OSError):
        done[0].unlink(missing_ok=True)
        done[1].touch()
    return removed
