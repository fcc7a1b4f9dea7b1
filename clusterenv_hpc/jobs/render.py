"""From a job's configuration to the script that sbatch is given.

A script is complete: it holds every override, names its own run directory and resumes what it finds there, so that a
requeued job goes on, and so that a person can submit it again by hand.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterenv_hpc.jobs.config import SlurmConfig, SlurmConfigError, check


@dataclass(frozen=True)
class Launch:
    """How the ranks are started: by srun, or by a launcher of the MPI's own.

    mpi: srun's ``--mpi``; None leaves it to the site.  program: mpiexec or mpirun, for the launchers other than srun.
    openmpi: whether that is Open MPI's.
    """

    mpi: str | None = None
    program: str = "mpiexec"
    openmpi: bool = False


@dataclass(frozen=True)
class Run:
    """One run of a job: its name, its directory, and the words behind ``train``."""

    name: str
    directory: Path
    words: tuple[str, ...]


def render(config: SlurmConfig, run: Run, launch: Launch, *, python: str, workers: int) -> str:
    """The script for one run.

    Args:
        python: on the nodes, where the configuration names no other.
        workers: of the run; how many ranks are asked for where the configuration does not say.

    Raises:
        SlurmConfigError: a value cannot be written into a script.
    """
    script = _Script(check(config), launch, python, workers)
    choice = [f"run_dir={_text(run.directory)}", f"overrides=({_words(run.words)})"]
    return script.text(run.name, f"{_pattern(run.directory)}/slurm-%j.out", (), choice)


def render_array(
    config: SlurmConfig, name: str, directory: Path, runs: Sequence[Run], launch: Launch, *, python: str, workers: int
) -> str:
    """The script of a job array with one element for each of ``runs``; what it says of itself goes to ``directory``.

    Raises:
        SlurmConfigError: a value cannot be written into a script.
    """
    script = _Script(check(config), launch, python, workers)
    if config.heterogeneous:
        raise SlurmConfigError("slurm.learner: Slurm has no arrays of heterogeneous jobs; submit the runs one by one")
    limit = f"%{config.array_limit}" if config.array_limit else ""
    choice = ["case $SLURM_ARRAY_TASK_ID in"]
    for number, run in enumerate(runs):
        choice.append(f"  {number}) run_dir={_text(run.directory)}; overrides=({_words(run.words)}) ;;")
    choice += ['  *) echo "this array has no element $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;', "esac"]
    array = (f"--array=0-{len(runs) - 1}{limit}",)
    return script.text(name, f"{_pattern(directory)}/slurm-%A_%a.out", array, choice)


@dataclass(frozen=True)
class _Script:
    config: SlurmConfig
    launch: Launch
    python: str
    workers: int

    def text(self, name: str, output: str, more: Sequence[str], choice: Sequence[str]) -> str:
        """The script; ``choice`` are the shell lines that set run_dir and overrides."""
        config = self.config
        after = f"--max-restarts={config.max_restarts if config.requeue else 0} --after=$SECONDS"
        options = [_option("job-name", config.job_name or name), _option("output", output), "--open-mode=append", *more]
        options += self._once()
        if config.heterogeneous:
            options += [*self._learner(), "hetjob", *self._shared(), *self._workers()]
        else:
            options += [*self._shared(), *self._tasks(config.ranks(self.workers)), *self._place()]
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "# Written by clusterenv-hpc submit.",
            "",
            *(f"module load {shlex.quote(module)} || exit 1" for module in config.modules),
            *(f"export {name}={_text(value)}" for name, value in config.env.items()),
            *config.setup,
            *choice,
            f"python={_text(config.python or self.python)}",
            'train=("$python" -m clusterenv_hpc.cli train "${overrides[@]}")',
            "",
            *(self._srun() if config.launcher == "srun" else self._mpiexec()),
            "",
            "# A job that lost a rank goes back to the queue, and on from its last checkpoint.",
            f'exec "$python" -m clusterenv_hpc.jobs.aftermath "$code" "$run_dir" {after}',
        ]
        return "\n".join(lines) + "\n"

    def _once(self) -> Iterator[str]:
        """Options of the whole job."""
        config = self.config
        yield from _options(
            ("begin", config.begin), ("dependency", config.dependency), ("nice", config.nice),
            ("mail-type", config.mail_type), ("mail-user", config.mail_user),
        )  # fmt: skip

    def _shared(self) -> Iterator[str]:
        """Options that every component of a job needs."""
        config = self.config
        yield from _options(("time", config.time))
        yield "--requeue" if config.requeue else "--no-requeue"
        if config.lead_s:  # B: to the script alone, where the launcher would not survive the signal
            yield f"--signal={'' if config.launcher == 'srun' else 'B:'}{config.signal}@{config.lead_s}"
        yield from config.sbatch

    def _tasks(self, ranks: int) -> Iterator[str]:
        config = self.config
        told = config.nodes is not None and config.ntasks_per_node is not None and config.ntasks is None
        yield from _options(
            ("nodes", config.nodes), ("ntasks", None if told else ranks), ("ntasks-per-node", config.ntasks_per_node),
            ("cpus-per-task", config.cpus_per_task),
        )  # fmt: skip

    def _place(self) -> Iterator[str]:
        """Where the ranks run: all of them, or the workers of a heterogeneous job."""
        config = self.config
        yield from _options(
            ("partition", config.partition), ("account", config.account), ("qos", config.qos),
            ("reservation", config.reservation), ("constraint", config.constraint), ("mem", config.mem),
            ("mem-per-cpu", config.mem_per_cpu), ("gpus", config.gpus), ("gpus-per-node", config.gpus_per_node),
            ("gres", config.gres), ("exclusive", config.exclusive), ("nodelist", config.nodelist),
            ("exclude", config.exclude),
        )  # fmt: skip

    def _workers(self) -> Iterator[str]:
        yield from self._tasks(self.config.worker_tasks(self.workers))
        yield from self._place()

    def _learner(self) -> Iterator[str]:
        config, learner = self.config, self.config.learner
        yield from self._shared()
        yield from _options(
            ("nodes", 1), ("ntasks", 1), ("cpus-per-task", config.learner_cpus or config.cpus_per_task),
            ("partition", learner.partition or config.partition), ("account", learner.account or config.account),
            ("qos", learner.qos or config.qos), ("reservation", config.reservation),
            ("constraint", learner.constraint), ("mem", learner.mem), ("gpus-per-node", learner.gpus),
            ("gres", learner.gres), ("exclusive", learner.exclusive),
        )  # fmt: skip

    def _srun(self) -> Iterator[str]:
        """The lines that run the ranks through srun and leave their exit code in ``code``."""
        config = self.config
        common = ["--kill-on-bad-exit=1"]
        common += _options(
            ("mpi", self.launch.mpi), ("distribution", config.distribution), ("cpu-bind", config.cpu_bind)
        )
        common += config.srun_args
        yield "trap : TERM  # it is for the ranks, which save; this shell stays to see how they end"
        if config.heterogeneous:
            for group, cpus in enumerate((config.learner_cpus or config.cpus_per_task, config.cpus_per_task)):
                words = [f"--het-group={group}", *_options(("cpus-per-task", cpus)), *common]
                yield f'{"  :" if group else "srun"} {_words(words)} "${{train[@]}}"{"" if group else " " + chr(92)}'
        else:
            # From Slurm 22.05 on srun does not take cpus-per-task over from the job.
            words = ["srun", *_options(("cpus-per-task", config.cpus_per_task)), *common]
            yield f'{_words(words)} "${{train[@]}}"'
        yield "code=$?"

    def _mpiexec(self) -> Iterator[str]:
        """The same through the MPI's own launcher, which would die of Slurm's signal, and its helpers with it."""
        config, launch = self.config, self.launch
        words = [launch.program]
        if config.launcher == "ulfm":
            words += ["--with-ft", "ulfm", "--bind-to", "none"]
        elif launch.openmpi:  # after SIGTERM it would grant the ranks one second
            words += ["--bind-to", "none", "--mca", "odls_base_sigkill_timeout", str(max(config.lead_s, 30))]
        words += ["-n", str(config.ranks(self.workers)), *config.srun_args]
        yield "# Slurm's signal would end the launcher: this shell takes it, and leaves the learner a notice."
        yield 'export CLUSTERENV_HPC_NOTICE="${TMPDIR:-/tmp}/clusterenv-hpc-$SLURM_JOB_ID.notice"'
        yield 'rm -f "$CLUSTERENV_HPC_NOTICE" "$CLUSTERENV_HPC_NOTICE.over"'
        yield f"trap 'echo {config.signal} >\"$CLUSTERENV_HPC_NOTICE\"' {config.signal}"
        if config.signal != "TERM":
            yield "trap : TERM"
        yield f'{_words(words)} "${{train[@]}}" &'
        yield "launcher=$!"
        if config.launcher == "ulfm":
            yield "# After a rank's death this launcher may outlast the learner, but by 15 s at most."
            yield "patience=15"
            yield "while kill -0 $launcher 2>/dev/null; do"
            yield "  sleep 1"
            yield '  [ -e "$CLUSTERENV_HPC_NOTICE.over" ] || continue'
            yield "  patience=$((patience - 1))"
            yield "  [ $patience -gt 0 ] || kill -KILL $launcher"
            yield "done"
        else:
            yield "while kill -0 $launcher 2>/dev/null; do wait $launcher; done # a signal ends the wait early"
        yield "wait $launcher"
        yield "code=$?"
        yield 'rm -f "$CLUSTERENV_HPC_NOTICE" "$CLUSTERENV_HPC_NOTICE.over"'


def hydra_override(key: str, value: str) -> str:
    """``key=value`` for Hydra's command line, whatever ``value`` holds.

    Raises:
        SlurmConfigError: ``value`` holds ``${``, which Hydra would resolve.
    """
    if "${" in value:
        raise SlurmConfigError(f"{key}={value}: allowed: a value without ${{")
    if re.fullmatch(r"/[\w./+-]*", value, re.ASCII):
        return f"{key}={value}"
    # Within quotes a backslash is itself, except before a quote.
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"{key}='{quoted}'"


def _options(*pairs: tuple[str, Any]) -> list[str]:
    return [_option(name, value) for name, value in pairs if value not in (None, False)]


def _option(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name}={_text(str(value))}"


def _pattern(directory: Path) -> str:
    """A path in which Slurm shall replace nothing."""
    return str(directory).replace("%", "%%")


def _words(words: Sequence[str]) -> str:
    return " ".join(_text(word) for word in words)


def _text(value: Any) -> str:
    """For the shell, and for sbatch, which reads quotes as a shell does."""
    text = str(value)
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise SlurmConfigError(f"{text!r}: a line of a script cannot hold control characters")
    return shlex.quote(text)
