"""``clusterenv-hpc submit``: from the command line to a job, or to a job array for a sweep."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterenv_hpc.jobs import record, slurm
from clusterenv_hpc.jobs.choose import choose_launch
from clusterenv_hpc.jobs.config import SlurmConfigError
from clusterenv_hpc.jobs.render import Run, hydra_override, render, render_array
from clusterenv_hpc.jobs.sweep import expand

OWN = ("run_dir", "resume", "name")
"""Keys that the script sets itself, for each run."""

SCRIPT = "job.sbatch"
TABLE = "sweep.tsv"

USAGE = """\
usage: clusterenv-hpc submit [GROUP=CHOICE ...] [KEY=VALUE ...] [--dry-run]
       clusterenv-hpc submit -m KEY=VALUE,VALUE ... [--dry-run]

Writes an sbatch script, submits it, prints the job's number and the run's directory, and returns.  The words are those
of `clusterenv-hpc train`, and slurm.KEY=VALUE for the job.  With -m one job array runs all combinations.

  clusterenv-hpc submit env=lunarlander slurm=cpu slurm.nodes=4 slurm.time=2:00:00
  clusterenv-hpc submit env=cartpole slurm=cpu -m seed=1,2,3 sync=aps,always
"""


def submit(argv: Sequence[str]) -> int:
    """The command; returns its exit code, which is sbatch's where that refused."""
    parser = argparse.ArgumentParser(prog="clusterenv-hpc submit", usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(list(argv))
    if args.help:
        print(USAGE, end="")
        return 0
    job: _Single | _Array
    job = _Array(args.overrides) if args.multirun else _Single(args.overrides)
    if args.dry_run:
        print(job.script(job.planned()), end="")
        return 0
    directory = job.claim()
    try:
        path = directory / SCRIPT
        path.write_text(job.script(directory))
        number = slurm.submit(str(path))
    except BaseException as error:
        if not isinstance(error, slurm.SlurmUncertain):  # else the job may be there, and needs its directory
            job.release(directory)
        if isinstance(error, slurm.SlurmRefused):  # as it came
            sys.stderr.write(error.said if error.said.endswith("\n") else error.said + "\n")
            print(f"clusterenv-hpc: sbatch refused the job (exit code {error.exit_code})", file=sys.stderr)
            return error.exit_code
        raise
    job.submitted(directory, number)
    return 0


def _words(overrides: Sequence[str], directory: Path) -> tuple[str, ...]:
    """The words of a run that finds its own directory again, and goes on there if it was there before."""
    kept = [word for word in overrides if word.partition("=")[0] not in OWN]
    return (*kept, hydra_override("run_dir", str(directory)), "resume=true")


def checked(config: Any, ranks: int) -> Any:
    """``config``, if what it says of its workers fits a job of ``ranks``.

    Raises:
        SlurmConfigError: it does not.
    """
    workers, rest = divmod(ranks - 1 - config.eval_workers, span := config.env.ranks)
    if span > 1 and (rest or workers < 1):
        raise SlurmConfigError(
            f"env.ranks={span}: the job has {ranks} ranks; allowed: {1 + config.eval_workers} + W x {span} for W "
            "workers"
        )
    if config.workers is not None and config.workers != workers:
        evaluator = ", one evaluator" if config.eval_workers else ""
        raise SlurmConfigError(
            f"workers={config.workers}: the job has {ranks} ranks, one learner{evaluator} and {workers} workers; "
            f"allowed: workers={workers}, or leave it out"
        )
    if config.eval_workers and workers < 1:
        raise SlurmConfigError(f"eval_workers=1: the job has {ranks} ranks; allowed: at least 3 ranks")
    return config


def _checked(config: Any) -> Any:
    return checked(config, config.slurm.ranks(config.other_ranks))


class _Single:
    """One run."""

    def __init__(self, overrides: Sequence[str]) -> None:
        from clusterenv_hpc.run.config import compose

        self.overrides = tuple(overrides)
        self.config = _checked(compose(self.overrides))
        self.launch = choose_launch(self.config.slurm)

    def planned(self) -> Path:
        """The directory, if nothing stands in its way."""
        from clusterenv_hpc.run.run_dir import RUNS, run_name

        config = self.config
        return Path(config.run_dir if config.run_dir is not None else RUNS / run_name(config)).absolute()

    def claim(self) -> Path:
        """The directory, made.  Raises ConfigError."""
        from clusterenv_hpc.run.run_dir import claim

        return Path(claim(self.config).path).absolute()

    def script(self, directory: Path) -> str:
        words = _words(self.overrides, directory)
        run = Run(directory.name, directory, words)
        return render(self.config.slurm, run, self.launch, python=sys.executable, workers=self.config.other_ranks)

    def submitted(self, directory: Path, number: str) -> None:
        print(f"job {number}: {self.config.slurm.ranks(self.config.other_ranks)} ranks")
        print(f"run:    {directory}")
        print(f"watch:  clusterenv-hpc watch {number}", flush=True)
        record.remember(directory, number)

    def release(self, directory: Path) -> None:
        _release(directory)


class _Array:
    """A sweep."""

    def __init__(self, overrides: Sequence[str]) -> None:
        from clusterenv_hpc.run.config import compose

        self.elements = expand(overrides)
        self.configs = [_checked(compose(element.overrides)) for element in self.elements]
        first = self.configs[0]
        if any(config.slurm != first.slurm for config in self.configs):
            raise SlurmConfigError("-m: slurm keys cannot vary within one job array; submit twice instead")
        if any(config.other_ranks != first.other_ranks for config in self.configs) and not first.slurm.ntasks:
            raise SlurmConfigError("-m: workers cannot vary within one job array; submit twice instead")
        self.launch = choose_launch(first.slurm)

    def _name(self) -> str:
        from clusterenv_hpc.run.run_dir import run_name

        config = self.configs[0]
        return str(config.name or re.sub(r"-s\d+$", "", run_name(config)) + "-sweep")

    def planned(self) -> Path:
        from clusterenv_hpc.run.run_dir import RUNS

        return Path(RUNS / self._name()).absolute()

    def claim(self) -> Path:
        from clusterenv_hpc.run.run_dir import claim

        return Path(claim(dataclasses.replace(self.configs[0], name=self._name())).path).absolute()

    def runs(self, directory: Path) -> list[Run]:
        """The runs, in directories named after what varies."""
        width, runs = len(str(len(self.elements) - 1)), []
        for number, element in enumerate(self.elements):
            slug = re.sub(r"[^A-Za-z0-9.+-]+", "-", "_".join(element.varied)).strip("-")
            name = f"{number:0{width}}-{slug}"[:80].rstrip("-")
            runs.append(Run(name, directory / name, _words(element.overrides, directory / name)))
        return runs

    def script(self, directory: Path) -> str:
        config = self.configs[0]
        return render_array(
            config.slurm, directory.name, directory, self.runs(directory), self.launch,
            python=sys.executable, workers=config.other_ranks,
        )  # fmt: skip

    def submitted(self, directory: Path, number: str) -> None:
        config = self.configs[0]
        print(f"job {number}: an array of {len(self.elements)}, {config.slurm.ranks(config.other_ranks)} ranks each")
        table = [("element", "job", "run", "overrides")]
        for element, run in enumerate(self.runs(directory)):
            job = f"{number}_{element}"
            run.directory.mkdir(exist_ok=True)
            record.remember(run.directory, job)
            table.append((str(element), job, run.name, " ".join(self.elements[element].varied)))
        (directory / TABLE).write_text("".join("\t".join(row) + "\n" for row in table))
        record.remember(directory, number)
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        for row in table:
            print("  " + "  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[3]]))
        print(f"runs:   {directory}")
        print(f"watch:  clusterenv-hpc watch {number}")

    def release(self, directory: Path) -> None:
        _release(directory)


def _release(directory: Path) -> None:
    """Takes the directory of a job that was not submitted back, unless a run is in it."""
    with contextlib.suppress(OSError):
        (directory / SCRIPT).unlink(missing_ok=True)
        directory.rmdir()
