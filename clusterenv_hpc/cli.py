"""The command ``clusterenv-hpc``: finds the sub-command, and turns what goes wrong into one line.

Each sub-command is imported only when it is called, so that help is quick and what needs neither torch nor MPI loads
neither.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

from clusterenv_hpc.run.errors import describe, exit_code, wants_traceback


@dataclass(frozen=True)
class Command:
    """Where a sub-command is (``module:function``, arguments in, exit code out) and what it does."""

    target: str
    help: str


COMMANDS = {
    "train": Command(
        "clusterenv_hpc.run.start:main", "train a policy, on this machine or as a rank under srun or mpiexec"
    ),
    "eval": Command("clusterenv_hpc.run.evaluate:main", "play whole episodes with a run's newest checkpoint"),
    "submit": Command("clusterenv_hpc.jobs.commands:submit", "submit a run to Slurm, or with -m a sweep as an array"),
    "watch": Command("clusterenv_hpc.jobs.commands:watch", "follow a job: its state and its run's live metrics"),
    "logs": Command("clusterenv_hpc.jobs.commands:logs", "show what a job has printed"),
    "cancel": Command("clusterenv_hpc.jobs.commands:cancel", "end jobs; their runs save first"),
    "list": Command("clusterenv_hpc.jobs.commands:list_jobs", "your jobs that wait or run, and their runs"),
    "plot": Command("clusterenv_hpc.run.figures:main", "draw a run's return, weight requests, lag, KL and steps/s"),
    "bench": Command("clusterenv_hpc.bench.command:main", "measure rollout, transport and learner on this machine"),
    "simulate": Command(
        "clusterenv_hpc.gradients.simulate:main",
        "simulate the aggregation rules on virtual time: time to a solution against workers and their speeds",
    ),
    "doctor": Command("clusterenv_hpc.run.doctor:main", "check what this machine can do, and say what to change"),
}

EXAMPLES = """\
examples:
  clusterenv-hpc train env=cartpole                       a run under runs/, with two worker ranks on this machine
  clusterenv-hpc train env=lunarlander sync=aps workers=4 seed=3
  clusterenv-hpc train env.id=mypackage:MyEnv-v0          any Gymnasium environment, by its id
  clusterenv-hpc train run_dir=runs/NAME resume=true      go on from the last checkpoint
  clusterenv-hpc train --help                             every group, choice and key
  clusterenv-hpc train env=cartpole algo=rennala_nigt workers=4
  clusterenv-hpc eval latest                              or a run's name, or the start of it
  clusterenv-hpc plot latest
  srun --mpi=pmi2 clusterenv-hpc train env=lunarlander    inside a Slurm allocation: one rank for each task
  clusterenv-hpc submit env=lunarlander slurm=cpu slurm.nodes=4 slurm.time=2:00:00
  clusterenv-hpc watch latest                             or a job's number
"""


def usage() -> str:
    """The text of ``--help``."""
    lines = [
        "usage: clusterenv-hpc COMMAND ...",
        "",
        "Distributed reinforcement learning on MPI ranks.",
        "",
        "commands:",
    ]
    width = max(map(len, COMMANDS))
    lines += [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "clusterenv-hpc COMMAND --help says more.", "", EXAMPLES])


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command.  Returns the exit code: 0, 2 for what cannot be asked so, 1 for what went wrong."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        from clusterenv_hpc import __version__

        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return _complain(f"{argv[0]}: no such command; {hint}allowed: {', '.join(COMMANDS)}", 2)
    try:
        module, _, function = COMMANDS[argv[0]].target.partition(":")
        return int(getattr(importlib.import_module(module), function)(argv[1:]))
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:  # the reader has seen enough: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if wants_traceback():
            traceback.print_exc()
        return _complain(describe(error), exit_code(error))


def _complain(text: str, code: int) -> int:
    print(f"clusterenv-hpc: {text}", file=sys.stderr)
    return code


def run() -> NoReturn:
    """The entry point of ``python -m clusterenv_hpc.cli``."""
    sys.exit(main())


if __name__ == "__main__":
    run()
