"""``clusterenv-hpc train``: reads the command line, and takes this process's role.

Started plainly it starts one learner and ``workers`` worker ranks on this machine, or with ``workers=0`` trains in this
process.  Started by srun or an MPI launcher it is one rank: the learner on rank 0, a worker on the others.
Imports torch and MPI only once it is known that this process needs them.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from clusterenv_hpc.jobs.config import SlurmConfig
from clusterenv_hpc.jobs.environment import in_mpi_world, world_problem
from clusterenv_hpc.run.config import GROUPS, ConfigError, choices, compose, quoted, resume, to_yaml
from clusterenv_hpc.run.errors import abort_world, describe, exit_code
from clusterenv_hpc.run.launch import launch_ranks, rank_environment
from clusterenv_hpc.run.owner import Ownership, forget_the_dead
from clusterenv_hpc.run.run_dir import asked_for, claim
from clusterenv_hpc.run.schema import DEFAULT_WORKERS, VARIANTS, Config, EnvConfig, PolicyConfig


def main(argv: list[str]) -> int:
    """Runs the command with ``argv``, what stands behind ``train``; returns the exit code."""
    if any(word in ("-h", "--help", "help") for word in argv):
        print(usage())
        return 0
    overrides = [word for word in argv if word != "--cfg"]
    for word in overrides:
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such option; allowed: key=value, --cfg and --help")
    if in_mpi_world():
        return start_rank(overrides, show=len(overrides) < len(argv))
    config = asked(overrides)
    if len(overrides) < len(argv):
        print(to_yaml(continued(config, overrides)), end="")
        return 0
    run = claim(config)
    try:
        config = continued(config, overrides)
        workers = DEFAULT_WORKERS if config.workers is None else config.workers
        config = dataclasses.replace(config, workers=workers, run_dir=str(run.path), name=run.path.name)
        if workers == 0:
            from clusterenv_hpc.run.train import learn

            with Ownership(run.path) as owner:
                return learn(config, run, owner=owner)
        told = [word for word in overrides if not word.startswith(("run_dir=", "workers="))]
        ranks_argv = ["train", *told, f"workers={workers}", f"run_dir={quoted(str(run.path))}"]
        return launch_ranks(ranks_argv, config.other_ranks, str(run.path))
    finally:
        forget_the_dead(run.path)  # a learner that was killed at its start gives nothing back itself
        run.release_if_empty()


def start_rank(overrides: Sequence[str], show: bool = False) -> int:
    """One rank's life, as srun or an MPI launcher started it."""
    os.environ |= rank_environment()  # before MPI and torch are imported, which read it
    from clusterenv_hpc.comm.mpi import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    try:
        if problem := world_problem(size, os.environ, MPI.get_vendor()[0]):
            raise ConfigError(problem)
        config = continued(asked(overrides), overrides)
        config = dataclasses.replace(config, workers=workers_here(config, size))
        if show:
            if rank == 0:
                print(to_yaml(config), end="", flush=True)
            return 0
        from clusterenv_hpc.comm.world import set_aside

        training, aside = set_aside(comm) if config.eval_workers else (comm, None)
        if training is None:
            from clusterenv_hpc.run.evaluator import serve_evaluations

            assert aside is not None
            return serve_evaluations(config, aside)
        if rank != 0:
            from clusterenv_hpc.run.train import work

            return work(config, training)
        from clusterenv_hpc.run.train import learn

        run = claim(config)
        owner = Ownership(run.path)
    except Exception as error:
        return give_up(error, comm)
    config = dataclasses.replace(config, run_dir=str(run.path), name=run.path.name)
    try:
        return learn(config, run, training if size > 1 else None, aside, owner)
    finally:
        owner.release()
        run.release_if_empty()


def workers_here(config: Config, size: int) -> int:
    """Worker ranks in a world of ``size``.  Raises ConfigError where another number was asked for."""
    workers, rest = divmod(size - 1 - config.eval_workers, span := config.env.ranks)
    if config.eval_workers and workers < 1:
        raise ConfigError(f"eval_workers=1: the launcher has started {size} ranks; allowed: at least {2 + span} ranks")
    if span > 1 and (rest or workers < 1):
        raise ConfigError(
            f"env.ranks={span}: the launcher has started {size} ranks; allowed: {1 + config.eval_workers} + W x {span} "
            "for W workers"
        )
    if config.workers is not None and config.workers != workers and not (config.resume and size > 1):
        evaluator = ", one evaluator" if config.eval_workers else ""
        raise ConfigError(
            f"workers={config.workers}: the launcher has started {size} ranks, one learner{evaluator} and {workers} "
            f"workers{f' of {span} ranks' * (span > 1)}; allowed: workers={workers}, or leave it out, or start "
            f"{config.other_ranks + 1} ranks"
        )
    return workers


def give_up(error: Exception, comm: Any) -> int:
    """Tells why no rank can start, once: all ranks read the same command line, so rank 0 speaks if it can."""
    import time

    rank, size = comm.Get_rank(), comm.Get_size()
    if rank != 0:
        time.sleep(1.5)
    where = f"rank {rank} ({socket.gethostname()}): " if size > 1 and rank != 0 else ""
    print(f"clusterenv-hpc: {where}{describe(error)}", file=sys.stderr, flush=True)
    abort_world(comm, exit_code(error))
    return exit_code(error)


def asked(overrides: Sequence[str]) -> Config:
    """What the words ask for; they may speak of keys that only the stored run they resume has."""
    where = compose([word for word in overrides if word.startswith(("run_dir=", "resume="))], check_env=False)
    if where.resume and where.run_dir is not None and asked_for(where).holds_a_run():
        return resume(asked_for(where).config, overrides)
    return compose(overrides)


def continued(config: Config, overrides: Sequence[str]) -> Config:
    """The stored configuration with ``overrides`` on top, where ``config`` resumes a run; else ``config`` itself."""
    if not config.resume:
        return config
    run = asked_for(config)
    return resume(run.config, overrides) if run.holds_a_run() else config


def usage() -> str:
    """The text of ``train --help``: groups, their choices, and every key with its meaning."""
    lines = [
        "usage: clusterenv-hpc train [GROUP=CHOICE ...] [KEY=VALUE ...] [--cfg]",
        "",
        "Trains a policy, and evaluates it at the end.  Started plainly it starts its own ranks; under srun or",
        "mpiexec it is one of them.  --cfg prints the configuration that the other words make, and starts nothing.",
        "",
        "examples:",
        "  clusterenv-hpc train env=cartpole",
        "  clusterenv-hpc train env=lunarlander sync=aps sync.delta=0.3 workers=2 seed=3",
        "  clusterenv-hpc train env.id=mypackage:MyEnv-v0 'env.kwargs={size: 8}' policy.hidden=[128,128]",
        "  clusterenv-hpc train run_dir=runs/lunarlander-ppo-aps-s1 resume=true total_steps=2e6",
        "",
        "groups:",
    ]
    for group in GROUPS:
        lines.append(f"  {group + '=':<10}{'|'.join(choices(group))}")
    lines += ["", "keys, with their defaults where env and algo choose no others:"]
    lines += _keys(Config)
    for title, schema, prefix in (
        ("env", EnvConfig, "env."),
        ("policy", PolicyConfig, "policy."),
        *(
            (f"{group}={name}", schema, f"{group}.")
            for group, (_, variants) in VARIANTS.items()
            for name, schema in variants.items()
        ),
        ("slurm, for clusterenv-hpc submit", SlurmConfig, "slurm."),
    ):
        lines += ["", f"{title}:", *_keys(schema, prefix)]
    return "\n".join(lines)


def _keys(schema: Any, prefix: str = "") -> list[str]:
    """A line for each key of ``schema``; nested ones follow under their path, groups have their own paragraph."""
    lines, nested = [], []
    for spec in dataclasses.fields(schema):
        if "help" in spec.metadata:
            default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
            shown = {"None": "null", "True": "true", "False": "false", "{}": "{}"}.get(str(default), default)
            words = spec.metadata["choices"]
            allowed = f" ({', '.join(words)})" if len(words) > 1 else ""
            lines.append(f"  {f'{prefix}{spec.name}={shown}':<33} {spec.metadata['help']}{allowed}")
        elif spec.default_factory is not dataclasses.MISSING and f"{prefix}{spec.name}" not in GROUPS:
            nested += _keys(spec.default_factory, f"{prefix}{spec.name}.")
    return lines + nested
