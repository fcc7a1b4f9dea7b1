"""A submitit executor for a configuration: the ``slurm`` group in submitit's words."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clusterenv_hpc.jobs import slurm
from clusterenv_hpc.jobs.choose import choose_launch
from clusterenv_hpc.jobs.config import SlurmConfig, SlurmConfigError, seconds
from clusterenv_hpc.jobs.environment import scrubbed_environment

LONG_MINUTES = 60 * 24 * 30
"""submitit's time limit of a process on this machine, where none is asked for."""

LEFT_OUT = "left-out"
"""Stands for what submitit would set by itself, such as five minutes, and a site's own default shall decide."""

FOLDER = "submitit"
"""Below the run's directory: what submitit keeps of a job, and what its tasks print."""


def ranks_of(config: SlurmConfig, workers: int) -> tuple[int, int]:
    """Nodes of a job, and tasks on each: submitit starts as many on every node.

    Raises:
        SlurmConfigError: the configuration asks for something else.
    """
    nodes = config.nodes or 1
    if config.ntasks is not None and config.ntasks % nodes:
        raise SlurmConfigError(
            f"slurm.ntasks={config.ntasks}: submitit starts equal tasks on each of {nodes} nodes; allowed: a multiple "
            f"of {nodes}, or slurm.ntasks_per_node instead, or clusterenv-hpc submit"
        )
    return nodes, config.ntasks_per_node or -(-config.ranks(workers) // nodes)


def make_executor(config: SlurmConfig, cluster: str, directories: Sequence[Path], workers: int) -> Any:
    """A submitit executor that starts one run in each of ``directories``.

    Args:
        cluster: ``slurm``, ``local`` or ``debug``.
        workers: of a run, where the configuration does not say how many tasks there are.

    Raises:
        SlurmConfigError: submitit cannot start what the configuration asks for.
        SlurmError: there is no Slurm here.
        LaunchError: there is no MPI.
    """
    from submitit import AutoExecutor

    limit = seconds(config.time)
    minutes = None if limit is None else max(1, round(limit / 60))
    folder = directories[0] / FOLDER
    if cluster != "slurm":
        executor = AutoExecutor(folder=folder / "%j", cluster=cluster)
        executor.update_parameters(timeout_min=minutes or LONG_MINUTES, stderr_to_stdout=False)
        return executor
    if not slurm.available():
        raise slurm.SlurmError(
            "sbatch: no such command on PATH; this machine has no Slurm, or its module is not loaded; "
            "allowed without: cluster='local' or cluster='debug'"
        )
    if config.heterogeneous or config.launcher != "srun":
        raise SlurmConfigError(
            "launch: submitit starts equal tasks by srun; allowed: without slurm.learner, slurm.learner_cpus and "
            "slurm.launcher; clusterenv-hpc submit takes them"
        )
    executor = AutoExecutor(folder=folder / "%j", cluster="slurm", slurm_python=config.python or sys.executable)
    executor.update_parameters(**_parameters(config, directories, workers, minutes))
    return executor


def _parameters(config: SlurmConfig, directories: Sequence[Path], workers: int, minutes: int | None) -> dict[str, Any]:
    """submitit's parameters for a job; null keys are left out."""
    mpi = choose_launch(config).mpi
    nodes, per_node = ranks_of(config, workers)
    srun = ["--kill-on-bad-exit=1", *([f"--mpi={mpi}"] if mpi else []), *config.srun_args]
    srun += [f"--cpus-per-task={config.cpus_per_task}"] if config.cpus_per_task else []
    srun += [f"--distribution={config.distribution}"] if config.distribution else []
    srun += [f"--cpu-bind={config.cpu_bind}"] if config.cpu_bind else []
    more: dict[str, Any] = {
        "requeue" if config.requeue else "no-requeue": True,
        "reservation": config.reservation,
        "gpus": config.gpus,
        "gpus-per-node": config.gpus_per_node,
        "begin": config.begin,
        "nice": config.nice,
        "time": config.time or LEFT_OUT,
        "signal": f"{config.signal}@{config.lead_s}" if config.lead_s else LEFT_OUT,
        "wckey": LEFT_OUT,
    }
    for line in config.sbatch:
        name, _, value = line.lstrip("-").partition("=")
        more[name] = " ".join(shlex.split(value)) or True  # submitit quotes it itself
    choice = [f"  {number}) run_dir={shlex.quote(str(path))} ;;" for number, path in enumerate(directories)]
    setup = [f"module load {shlex.quote(module)} || exit 1" for module in config.modules]
    setup += [f"export {name}={shlex.quote(str(value))}" for name, value in config.env.items()]
    setup += [*config.setup, "trap : TERM", "case ${SLURM_ARRAY_TASK_ID:-0} in", *choice, "esac"]
    after = f"--max-restarts={config.max_restarts if config.requeue else 0} --after=$SECONDS"
    python = shlex.quote(config.python or sys.executable)
    found: dict[str, Any] = {
        "name": config.job_name or directories[0].name,
        "nodes": nodes,
        "tasks_per_node": per_node,
        "cpus_per_task": config.cpus_per_task,
        "slurm_time": minutes,
        "slurm_partition": config.partition,
        "slurm_account": config.account,
        "slurm_qos": config.qos,
        "slurm_constraint": config.constraint,
        "slurm_mem": config.mem,
        "slurm_mem_per_cpu": config.mem_per_cpu,
        "slurm_gres": config.gres,
        "slurm_exclusive": config.exclusive or None,
        "slurm_nodelist": config.nodelist,
        "slurm_exclude": config.exclude,
        "slurm_mail_type": config.mail_type,
        "slurm_mail_user": config.mail_user,
        "slurm_dependency": config.dependency,
        "slurm_array_parallelism": config.array_limit,
        "slurm_srun_args": srun,
        "slurm_setup": setup,
        "slurm_teardown": [f'exec {python} -m clusterenv_hpc.jobs.aftermath "$?" "$run_dir" {after}'],
        "slurm_additional_parameters": {name: value for name, value in more.items() if value is not None},
    }
    return {name: value for name, value in found.items() if value is not None}


@contextlib.contextmanager
def submitting() -> Iterator[None]:
    """Within it submitit submits through this package's call of sbatch, which has a deadline.

    And free of a job around this process: a notebook may itself run in one, whose variables sbatch takes for options.
    """
    from submitit.slurm.slurm import SlurmExecutor

    before, command = dict(os.environ), SlurmExecutor._make_submission_command
    own: Any = SlurmExecutor  # also of the executor that submitit makes for an array by itself
    os.environ.clear()
    os.environ.update(scrubbed_environment(before))
    own._make_submission_command = _submit
    try:
        yield
    finally:
        own._make_submission_command = command
        os.environ.clear()
        os.environ.update(before)


def _submit(executor: Any, path: Path) -> list[str]:
    """Hands submitit's script to sbatch, and leaves submitit to print the answer."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.endswith(f"={LEFT_OUT}\n")))
    return ["echo", f"Submitted batch job {slurm.submit(str(path))}"]
