"""What Slurm and MPI launchers put into the environment, read in this one place.

Slurm's own words: a *job* is an allocation, an *array* a family of jobs, a *step* one ``srun`` within a job, a *task*
one process of a step.  All of it was looked at on Slurm 22.05 with srun (pmi2, pmix, none), MPICH's mpiexec, Open MPI's
mpirun, arrays and heterogeneous jobs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_NODES = 100_000
"""Node lists that name more are taken for garbage."""


class SlurmEnvironmentError(ValueError):
    """A SLURM_* variable is malformed, or two of them contradict each other."""

    exit_code = 2


@dataclass(frozen=True)
class SlurmJob:
    """This process's place in Slurm; None where Slurm does not say.

    job_id: of this job; for an array element the element's own number, which is not ``array_job_id``.
    array_job_id, array_task_id: both or neither.
    het_size: components of a heterogeneous job.  het_job_ids: their numbers.
    nodes: of the job (in a heterogeneous step: of all components that take part).
    ntasks: tasks asked for; within a step, tasks of the step.
    step_id, step_tasks: None outside of a step: in the batch script, or in salloc's shell.
    procid, localid, nodeid: this task among its step's, among its node's, and its node's number.  Under mpiexec or
        mpirun these belong to the launcher's helper on the node, and are no ranks.
    end_time: seconds since 1970 when the time limit strikes.
    restart_count: how often the job was requeued.
    """

    job_id: int
    array_job_id: int | None = None
    array_task_id: int | None = None
    het_size: int | None = None
    het_job_ids: tuple[int, ...] = ()
    name: str | None = None
    partition: str | None = None
    cluster: str | None = None
    nodes: tuple[str, ...] = ()
    node: str | None = None
    ntasks: int | None = None
    cpus_per_task: int | None = None
    step_id: str | None = None
    step_tasks: int | None = None
    procid: int | None = None
    localid: int | None = None
    nodeid: int | None = None
    end_time: float | None = None
    restart_count: int = 0
    submit_dir: str | None = None

    @property
    def label(self) -> str:
        """The job as Slurm's commands take it: ``123``, or ``120_3`` (the bare number could mean a whole array)."""
        return str(self.job_id) if self.array_job_id is None else f"{self.array_job_id}_{self.array_task_id}"

    def time_left(self, now: float) -> float | None:
        """Seconds until the time limit, never below 0."""
        return None if self.end_time is None else max(0.0, self.end_time - now)


def read_slurm(environ: Mapping[str, str] | None = None) -> SlurmJob | None:
    """What ``environ`` (this process's if None) says of a Slurm job; None outside of one.

    Raises:
        SlurmEnvironmentError: a number is none, a node list cannot be read, or two variables contradict each other.
    """
    environ = os.environ if environ is None else environ
    job_id = _number(environ, "SLURM_JOB_ID", least=1)
    older = _number(environ, "SLURM_JOBID", least=1)
    if job_id is None:
        if older is None:
            return None
        job_id = older
    elif older not in (None, job_id):
        raise SlurmEnvironmentError(
            f"SLURM_JOB_ID is {job_id}, SLURM_JOBID is {older}: two jobs' variables are mixed; unset one of them"
        )
    components = _number(environ, "SLURM_HET_SIZE", least=1)
    numbers = (_number(environ, f"SLURM_JOB_ID_HET_GROUP_{group}", least=1) for group in range(components or 0))
    job = SlurmJob(
        job_id=job_id,
        array_job_id=_number(environ, "SLURM_ARRAY_JOB_ID", least=1),
        array_task_id=_number(environ, "SLURM_ARRAY_TASK_ID"),
        het_size=components,
        het_job_ids=tuple(number for number in numbers if number is not None),
        name=_text(environ, "SLURM_JOB_NAME"),
        partition=_text(environ, "SLURM_JOB_PARTITION"),
        cluster=_text(environ, "SLURM_CLUSTER_NAME"),
        nodes=tuple(_nodes(environ, "SLURM_JOB_NODELIST")),
        node=_text(environ, "SLURMD_NODENAME"),
        ntasks=_number(environ, "SLURM_NTASKS", least=1),
        cpus_per_task=_number(environ, "SLURM_CPUS_PER_TASK", least=1),
        step_id=_text(environ, "SLURM_STEP_ID"),
        step_tasks=_number(environ, "SLURM_STEP_NUM_TASKS", least=1),
        procid=_number(environ, "SLURM_PROCID"),
        localid=_number(environ, "SLURM_LOCALID"),
        nodeid=_number(environ, "SLURM_NODEID"),
        end_time=_number(environ, "SLURM_JOB_END_TIME"),
        restart_count=_number(environ, "SLURM_RESTART_COUNT") or 0,
        submit_dir=_text(environ, "SLURM_SUBMIT_DIR"),
    )
    _check(job, _number(environ, "SLURM_JOB_NUM_NODES", least=1))
    return job


def _check(job: SlurmJob, num_nodes: int | None) -> None:
    if (job.array_job_id is None) != (job.array_task_id is None):
        there, missing = ("JOB", "TASK") if job.array_task_id is None else ("TASK", "JOB")
        raise SlurmEnvironmentError(
            f"SLURM_ARRAY_{there}_ID is set but SLURM_ARRAY_{missing}_ID is not; expected both, or neither"
        )
    if num_nodes is not None and job.nodes and num_nodes != len(job.nodes):
        names = ",".join(job.nodes[:8])
        raise SlurmEnvironmentError(
            f"SLURM_JOB_NUM_NODES is {num_nodes}, but SLURM_JOB_NODELIST names {len(job.nodes)}: {names}"
        )
    if job.step_id is not None:
        for name, value, total in (("PROCID", job.procid, job.step_tasks), ("LOCALID", job.localid, job.step_tasks)):
            if value is not None and total is not None and value >= total:
                raise SlurmEnvironmentError(
                    f"SLURM_{name} is {value}, but SLURM_STEP_NUM_TASKS is {total}; expected 0 to {total - 1}"
                )


def expand_nodelist(text: str) -> list[str]:
    """The names that a Slurm node list stands for: ``a[1-3,07],b`` is a1, a2, a3, a07, b.

    Raises:
        SlurmEnvironmentError: the list cannot be read.
    """
    names: list[str] = []
    for entry in _split(text):
        names += _expand(entry, text)
        if len(names) > MAX_NODES:
            raise SlurmEnvironmentError(f"node list {text[:80]!r} names more than {MAX_NODES} nodes")
    return names


def _split(text: str) -> Iterator[str]:
    """At the commas outside of brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text + ","):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise SlurmEnvironmentError(f"node list {text[:80]!r}: brackets do not match")
        if letter == "," and depth == 0:
            if place == start:
                raise SlurmEnvironmentError(f"node list {text[:80]!r}: an empty name")
            yield text[start:place]
            start = place + 1
    if depth:
        raise SlurmEnvironmentError(f"node list {text[:80]!r}: brackets do not match")


def _expand(entry: str, whole: str) -> list[str]:
    before, bracket, rest = entry.partition("[")
    if not re.fullmatch(r"[\w.-]*", before):
        raise SlurmEnvironmentError(f"node list {whole[:80]!r}: {before!r} is no part of a host's name")
    if not bracket:
        return [before]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for part in inside.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not 0 <= int(last) - int(first) <= MAX_NODES:
            raise SlurmEnvironmentError(f"node list {whole[:80]!r}: {part!r} is no range; expected like 1-8 or 07")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    tails = _expand(after, whole)
    if len(numbers) * len(tails) > MAX_NODES:
        raise SlurmEnvironmentError(f"node list {whole[:80]!r} names more than {MAX_NODES} nodes")
    return [f"{before}{number}{tail}" for number in numbers for tail in tails]


def launched_ranks(environ: Mapping[str, str] | None = None) -> int | None:
    """How many processes the nearest launcher says it started together with this one; None where nobody did.

    mpiexec and mpirun inside a batch script start a helper on each node through srun, whose count of tasks is
    inherited by the ranks and means nothing to them: so what MPI's own launchers say comes first.  A batch script and
    the shell of salloc are not launched in this sense; the shell of ``srun --pty bash`` is a launch of one.

    Raises:
        SlurmEnvironmentError: the number is none.
    """
    environ = os.environ if environ is None else environ
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (size := _number(environ, name, least=1)) is not None:
            return size
    return _number(environ, "SLURM_STEP_NUM_TASKS", least=1) if "SLURM_STEP_ID" in environ else None


def in_mpi_world(environ: Mapping[str, str] | None = None) -> bool:
    """Whether an MPI launcher or srun started this process as one rank of several; MPI is not touched.

    A Slurm step of one task is no such world: the shell of ``srun --pty bash`` is one, and there a plain start
    shall start its own ranks.  Raises SlurmEnvironmentError where a launcher's number is none.
    """
    environ = os.environ if environ is None else environ
    ranks = launched_ranks(environ)
    if ranks is None:
        return environ.get("PMIX_RANK", "").isdigit()
    return ranks > 1 or "SLURM_STEP_ID" not in environ


def world_problem(comm_size: int, environ: Mapping[str, str] | None = None, vendor: str | None = None) -> str | None:
    """What is wrong when ``COMM_WORLD`` has ``comm_size`` ranks in this environment, and what to do; None if nothing.

    An MPI that does not understand its launcher starts as many worlds of one rank as there are processes, silently.

    Args:
        vendor: of the MPI library, as ``mpi4py.MPI.get_vendor()`` names it, to name the one right setting.

    Raises:
        SlurmEnvironmentError: the environment cannot be read.
    """
    environ = os.environ if environ is None else environ
    started = launched_ranks(environ)
    if started is None or started == comm_size:
        return None
    by_mpiexec = "OMPI_COMM_WORLD_SIZE" in environ or ("PMI_SIZE" in environ and "PMI_JOBID" not in environ)
    by_srun = "SLURM_STEP_ID" in environ and (not by_mpiexec or _mpi_type(environ) is not None)
    if by_srun and "OMPI_COMM_WORLD_SIZE" not in environ:
        return _srun_problem(comm_size, started, _mpi_type(environ), vendor)
    mpi = vendor or "the MPI library"
    if comm_size == 1:
        return (
            f"mpiexec started {started} processes, but each is alone in an MPI world of its own: it belongs to another "
            f"MPI than {mpi}. Start them with the mpiexec that came with {mpi}; clusterenv-hpc doctor shows it"
        )
    return f"mpiexec started {started} processes, but the MPI world has {comm_size} ranks; start all of them together"


def _srun_problem(comm_size: int, started: int, used: str | None, vendor: str | None) -> str:
    if comm_size != 1:
        return (
            f"srun started {started} tasks, but the MPI world has {comm_size} ranks; "
            f"start one program on all tasks of the step (in a heterogeneous job: srun --het-group=0,1,...)"
        )
    fitting = {"MPICH": "pmi2", "Intel MPI": "pmi2", "MVAPICH": "pmi2", "MVAPICH2": "pmi2", "Open MPI": "pmix"}
    if vendor in fitting and fitting[vendor] != used:
        fix = f"--mpi={fitting[vendor]}"
    elif used in ("pmi2", "pmix"):
        fix = f"--mpi={'pmix' if used == 'pmi2' else 'pmi2'}"
    else:
        fix = "--mpi=pmi2 (MPICH, Intel MPI) or --mpi=pmix (Open MPI)"
    return (
        f"srun started {started} tasks, but each is alone in an MPI world of its own: {vendor or 'MPI'} does not speak "
        f"--mpi={used or 'none'}. Start with srun {fix} (slurm.mpi=... for clusterenv-hpc submit); "
        f"srun --mpi=list shows what this Slurm has"
    )


def _mpi_type(environ: Mapping[str, str]) -> str | None:
    """The PMI that srun was asked for."""
    found = environ.get("SLURM_MPI_TYPE") or None
    return re.sub(r"_v\d+$", "", found) if found else None


OF_A_JOB = re.compile(r"SLURM_(?!CONF$)|SLURMD_|SRUN_|SALLOC_")
OF_A_WORLD = re.compile(
    r"PMI_|PMIX_(?!MCA_)|HYDRA_|HYDI_|MPI_LOCAL|PRTE_|OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT)"
    r"|OMPI_MCA_(orte_|ess|pmix$|initial_wdir$|shmem_RUNTIME_QUERY_hint$|mpi_oversubscribe$)"
)
"""What launchers set for their processes; what users set for Open MPI (OMPI_MCA_btl and the like) is not among it."""


def scrubbed_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """``environ`` without the traces of a job or an MPI world around this process, for what it submits or starts.

    sbatch and srun take every SLURM_* for an option.  SLURM_CONF, which names the cluster, is kept; SBATCH_* are a
    user's own defaults, except inside a job, where they were that job's.
    """
    environ = os.environ if environ is None else environ
    inside = "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ
    return {
        name: value
        for name, value in environ.items()
        if not (OF_A_JOB.match(name) or OF_A_WORLD.match(name) or (inside and name.startswith("SBATCH_")))
    }


def _text(environ: Mapping[str, str], name: str) -> str | None:
    return environ.get(name) or None


def _number(environ: Mapping[str, str], name: str, *, least: int = 0) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        raise SlurmEnvironmentError(f"{name} is {text[:80]!r}; expected an integer of at least {least}")
    return int(text)


def _nodes(environ: Mapping[str, str], name: str) -> list[str]:
    text = environ.get(name, "").strip()
    if not text or text == "(null)":
        return []
    try:
        return expand_nodelist(text)
    except SlurmEnvironmentError as error:
        raise SlurmEnvironmentError(f"{name}: {error}") from None
