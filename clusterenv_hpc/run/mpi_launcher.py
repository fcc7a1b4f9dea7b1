"""Which MPI this Python speaks, which launcher belongs to it, and what both need to be told.

An MPI library and another MPI's launcher start n worlds of one rank each, without a word.  So the library is asked
for its name, in a process of its own: MPI may be started only once in a process, and a launcher must not start it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from clusterenv_hpc.jobs.environment import scrubbed_environment
from clusterenv_hpc.run.guard import RANK_VARIABLES

PROBE_S = 60.0
"""Deadline for asking the library, in seconds: the first import from a cold shared folder is slow."""

PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
with open("/proc/self/maps") as maps:
    paths = sorted({line.split(None, 5)[5].strip() for line in maps if "/libmpi" in line})
print(json.dumps({"name": name, "version": version, "paths": paths, "mpi4py": mpi4py.__version__}))
"""

HYDRA, OPENMPI = "hydra", "openmpi"
FAMILIES = {"MPICH": HYDRA, "MVAPICH": HYDRA, "MVAPICH2": HYDRA, "Intel MPI": HYDRA, "Open MPI": OPENMPI}
"""mpi4py's names of MPI vendors, and the kind of launcher that each comes with."""

LAUNCHERS = {
    HYDRA: ("mpiexec.hydra", "mpiexec.mpich", "mpiexec", "mpirun"),
    OPENMPI: ("mpirun.openmpi", "mpirun", "mpiexec.openmpi", "mpiexec"),
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class LaunchError(RuntimeError):
    """The ranks cannot be started; the message says what to do."""


@dataclass(frozen=True)
class Mpi:
    """An MPI library as mpi4py loads it."""

    vendor: str
    version: tuple[int, ...]
    library: str
    mpi4py: str

    @property
    def family(self) -> str | None:
        """The kind of launcher, or None where this project knows none."""
        return FAMILIES.get(self.vendor)

    def __str__(self) -> str:
        return f"{self.vendor} {'.'.join(map(str, self.version))}"


def find_mpi(environ: Mapping[str, str] | None = None) -> Mpi:
    """The MPI that mpi4py loads in this environment; nothing is initialised.

    Raises:
        LaunchError: mpi4py is missing, finds no library, or does not answer.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S,
            env=scrubbed_environment(environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LaunchError(f"mpi4py did not load its MPI within {PROBE_S:.0f} s; is the file system up?") from None
    if done.returncode != 0:
        last = next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise LaunchError(
            f"mpi4py cannot load an MPI library ({last}). Install one into this environment: "
            "pip install 'clusterenv_hpc[mpich]', or load your site's MPI module"
        )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    library = next(iter(found["paths"]), "")
    return Mpi(found["name"], tuple(found["version"]), library, found["mpi4py"])


def find_launcher(mpi: Mpi) -> str:
    """The ``mpiexec`` or ``mpirun`` that belongs to ``mpi``: beside its library, beside this Python, or on PATH.

    Raises:
        LaunchError: there is none of the same family (and, for Open MPI, the same major version).
    """
    if mpi.family is None:
        raise LaunchError(
            f"no launcher of {mpi.vendor} is known here; start the ranks with its own mpiexec, or with srun"
        )
    seen = []
    for path in _candidates(mpi):
        said = launcher_version(path)
        if said is not None and _belongs(mpi, *said):
            return path
        seen.append(f"{path} ({' '.join(filter(None, said)) if said else 'does not run'})")
    others = f"; found only {', '.join(seen)}" if seen else ""
    raise LaunchError(
        f"mpi4py loads {mpi} ({mpi.library or 'library not found'}), but no launcher that belongs to it was found"
        f"{others}. Put its mpiexec on PATH, or use a wheel's MPI in a fresh environment: "
        "pip install 'clusterenv_hpc[mpich]'"
    )


def launcher_version(path: str) -> tuple[str, str] | None:
    """Family and version of a launcher, by its own word; None where it does not say."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout + done.stderr
    if found := re.search(r"Open MPI\) (\S+)", text):
        return OPENMPI, found[1]
    if "HYDRA" in text:
        found = re.search(r"Version:\s+(\S+)", text)
        return HYDRA, found[1] if found else ""
    return (HYDRA, "") if "Intel(R) MPI" in text else None


def _belongs(mpi: Mpi, family: str, version: str) -> bool:
    same_major = version.partition(".")[0] == str(mpi.version[0])
    return family == mpi.family and (family == HYDRA or same_major)


def _candidates(mpi: Mpi) -> Iterator[str]:
    names = LAUNCHERS[mpi.family or HYDRA]
    folders = [parent / "bin" for parent in Path(os.path.realpath(mpi.library)).parents] if mpi.library else []
    folders += [Path(sys.executable).parent, *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    for folder in dict.fromkeys(folders):
        for name in names:
            if path := shutil.which(name, path=str(folder)):
                yield path


def available_cores() -> int:
    """How many cores this process may use: its affinity, or what its control group grants if that is less."""
    cores = len(os.sched_getaffinity(0))
    for quota, period in (_cgroup_v2(), _cgroup_v1()):
        if quota > 0 and period > 0:
            cores = min(cores, max(1, round(quota / period)))
    return cores


def _cgroup_v2() -> tuple[int, int]:
    words = _read("/sys/fs/cgroup/cpu.max").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and words[0].isdigit() else (0, 0)


def _cgroup_v1() -> tuple[int, int]:
    quota, period = (_read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return (int(quota), int(period)) if quota.isdigit() and period.isdigit() else (0, 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def world_rank(environ: Mapping[str, str]) -> int | None:
    """This process's rank in COMM_WORLD as its launcher put it into the environment; None outside."""
    names = (*RANK_VARIABLES, "SLURM_PROCID") if "SLURM_STEP_NUM_TASKS" in environ else RANK_VARIABLES
    return _first_number(environ, names)


def ranks_on_this_host(environ: Mapping[str, str]) -> int | None:
    """How many ranks share this machine, as far as the environment says."""
    found = _first_number(environ, ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    if found is None and "SLURM_STEP_TASKS_PER_NODE" in environ:
        found = _first_number({"n": re.split(r"[(,]", environ["SLURM_STEP_TASKS_PER_NODE"])[0]}, ("n",))
    return found


def _first_number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def rank_environment(environ: Mapping[str, str] | None = None, ranks: int | None = None) -> dict[str, str]:
    """What must stand in a rank's environment before MPI and torch are imported; what is set there already stays.

    Args:
        environ: of the rank, or of whoever starts it; this process's if not given.
        ranks: how many share this machine; found in ``environ`` if not given.

    Where ranks outnumber cores, MPI must not spin: MPICH's default is 200 times slower there than with its progress
    throttle, and Open MPI yields by itself only under its own launcher.  A worker computes in one thread.  Under
    ``mpirun --with-ft ulfm`` nobody may wait in MPI's finalisation for a rank that died: one such end in ten hung.
    """
    environ = os.environ if environ is None else environ
    ranks = ranks_on_this_host(environ) if ranks is None else ranks
    wanted = {"UCX_WARN_UNUSED_ENV_VARS": "n"}
    if ranks is not None and ranks > available_cores():
        wanted["MPIR_CVAR_CH4_PROGRESS_THROTTLE"] = "1"
        wanted["MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT"] = "16"
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if "OMPI_MCA_mpi_ft_enable" in environ:
        wanted["OMPI_MCA_async_mpi_finalize"] = "1"
    if (world_rank(environ) or 0) > 0:
        wanted |= worker_threads(environ)
    return {name: value for name, value in wanted.items() if name not in environ}


def worker_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """One thread to a worker, unless the user says otherwise."""
    return {} if any(name in environ for name in THREAD_VARIABLES) else dict.fromkeys(THREAD_VARIABLES, "1")


LAYOUT = re.compile(
    r"SLURM_.*(STEP|NTASKS|NPROCS|NODELIST|NNODES|NUM_NODES|TASKS_PER_NODE|CPUS_|PROCID|LOCALID|NODEID|GTIDS"
    r"|LAUNCH|SRUN|BIND|DISTRIBUTION|TASK_PID|TOPOLOGY|UMASK)"
)


def job_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm says of the job, without what it says of the tasks that it would start itself."""
    return {name: text for name, text in environ.items() if name.startswith("SLURM_") and not LAYOUT.match(name)}


def launch_command(
    mpi: Mpi, launcher: str, program: Sequence[str], ranks: int, environ: Mapping[str, str]
) -> list[str]:
    """The command line that starts ``program`` on ``ranks`` ranks of this machine, rank 0 being the learner.

    Inside a Slurm allocation too they are started here: several nodes are srun's business.  The ranks still see the
    job (its id, its end, its restarts), but not the layout of its tasks, which is not theirs.
    """
    hydra = mpi.family == HYDRA

    def some(count: int, own: Mapping[str, str]) -> list[str]:
        pairs = [["-env", name, text] if hydra else ["-x", f"{name}={text}"] for name, text in own.items()]
        return ["-n", str(count), *chain.from_iterable(pairs), *program]

    facts = job_facts(environ)
    command = [launcher, *([] if hydra else ["--oversubscribe", "--bind-to", "none"]), *some(1, facts)]
    return command if ranks == 1 else [*command, ":", *some(ranks - 1, facts | worker_threads(environ))]


def launcher_environment(mpi: Mpi, ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment to run ``launch_command`` in."""
    own = scrubbed_environment(environ)
    if mpi.family == OPENMPI and os.geteuid() == 0:
        own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return own | rank_environment(own, ranks)
