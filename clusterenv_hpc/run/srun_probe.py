"""Which ``srun --mpi=`` makes one world of its tasks.

The wrong one makes n worlds of one rank each and exits with 0, or aborts; which is right depends on how MPI and Slurm
were built, so it is tried.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterenv_hpc.run.mpi_launcher import HYDRA, LaunchError, find_mpi

SIZE_PROGRAM = "from clusterenv_hpc.comm.mpi import MPI; print('world of', MPI.COMM_WORLD.size, flush=True)"
PREFERRED = {HYDRA: ("pmi2", "cray_shasta", "pmix")}
"""Plugins in the order in which they are tried, by launcher family; Open MPI: pmix, and pmi2 where it was built so."""


@dataclass(frozen=True)
class MpiPlugin:
    """``name``: what to give to ``srun --mpi=``, or None; ``tried``: what each plugin came to, in order."""

    name: str | None
    tried: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join(f"--mpi={name}: {outcome}" for name, outcome in self.tried.items())


@dataclass(frozen=True)
class Said:
    """A command's exit code (None: ended after its deadline, or not found) and its output."""

    code: int | None
    out: str
    err: str


def ask(command: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None) -> Said:
    """Run a command with a deadline; srun is asked to end first, so that it can cancel what it started."""
    try:
        process = subprocess.Popen(
            command, env=None if environ is None else dict(environ), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Said(None, "", f"{command[0]}: {error.strerror or error}")
    for patience, number in ((timeout_s, signal.SIGTERM), (3.0, signal.SIGKILL), (3.0, signal.SIGKILL)):
        try:
            out, err = process.communicate(timeout=patience)
            late = patience != timeout_s
            return Said(None, out, f"no answer within {timeout_s:g} s") if late else Said(process.returncode, out, err)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
    return Said(None, "", f"no answer within {timeout_s:g} s, nor to a kill")


def mpi_plugins(timeout_s: float = 10.0) -> list[str]:
    """The names that ``srun --mpi=list`` gives, without the one that does nothing."""
    said = ask(["srun", "--mpi=list"], timeout_s)
    text = said.out + said.err  # releases differ in where they write it
    names = re.findall(r"^(?:srun:\s*)?\s*(?:MPI types are\.\.\.)?\s*([a-z][a-z0-9_]+)\s*$", text, re.MULTILINE)
    generic = {"pmix"} & set(names)
    return [name for name in names if name != "none" and not (generic and name.startswith("pmix_v"))]


def find_mpi_plugin(
    *, tasks: int = 2, options: Sequence[str] = (), timeout_s: float = 20.0, all_within_s: float = 60.0
) -> MpiPlugin:
    """Try the plugins of this Slurm until ``srun --mpi=NAME`` makes one world of ``tasks`` tasks.

    Inside an allocation the step shares it; outside, srun asks for a small one and gives up when it has to wait.

    Args:
        options: further options of srun, such as a partition or an account.
        timeout_s: for each plugin, in seconds.  all_within_s: for all of them.

    Raises:
        LaunchError: there is no srun, or no MPI.
    """
    if shutil.which("srun") is None:
        raise LaunchError("there is no srun on PATH")
    names, mpi = mpi_plugins(), find_mpi()
    first = PREFERRED.get(mpi.family or "", ("pmix", "pmi2"))
    names.sort(key=lambda name: first.index(name) if name in first else len(first))
    tried: dict[str, str] = {}
    until = time.monotonic() + all_within_s
    for name in names:
        within = min(timeout_s, until - time.monotonic())
        if within <= 0:
            tried[name] = "not tried: no time left"
            continue
        world, tried[name] = _try(name, tasks, options, within)
        if world:
            return MpiPlugin(name, tried)
    return MpiPlugin(None, tried)


def _try(name: str, tasks: int, options: Sequence[str], within_s: float) -> tuple[bool, str]:
    environ = {key: text for key, text in os.environ.items() if not key.startswith(("PMI_", "PMIX_", "OMPI_COMM_"))}
    where = ["--overlap"] if "SLURM_JOB_ID" in environ else [f"--immediate={max(1, int(within_s) - 2)}", "--time=1"]
    command = ["srun", *where, "--overcommit", f"--ntasks={tasks}", "--kill-on-bad-exit=1", f"--mpi={name}"]
    said = ask([*command, *options, sys.executable, "-c", SIZE_PROGRAM], within_s, environ)
    sizes = [int(size) for size in re.findall(r"world of (\d+)", said.out)]
    if said.code == 0 and sizes == [tasks] * tasks:
        return True, f"one world of {tasks}"
    if said.code == 0 and sizes == [1] * tasks:
        return False, f"{tasks} singletons, which looks like success and is not"
    last = next(reversed(said.err.strip().splitlines()), "") if said.code is not None else said.err
    return False, f"fails ({last or f'exit code {said.code}, worlds of {sizes}'})"
