"""The directory of a run: where it lies, how it is named, how it is found again.

    runs/lunarlander-ppo-aps-s1/
      config.yaml  metrics.jsonl  events.out.tfevents.*  checkpoints/  summary.json  log.txt

A run is keyed by its name, not by a date, so that a requeued job or a second command finds it.  Only the learner
writes here.  Imports neither torch nor MPI.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterenv_hpc.run.config import ConfigError
from clusterenv_hpc.run.schema import Config
from clusterenv_hpc.run.tasks import gradient_method

RUNS = Path("runs")
"""Where runs are kept that were not told otherwise: below the current directory."""


@dataclass(frozen=True)
class RunDir:
    """The paths within one run's directory."""

    path: Path

    @property
    def config(self) -> Path:
        """The whole configuration; a directory with this file holds a run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object for each update."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """What the run came to, rewritten while it goes on."""
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        """What was said, with times."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """A folder of checkpoints."""
        return self.path / "checkpoints"

    def holds_a_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists()

    def release_if_empty(self) -> None:
        """Give a name back that was claimed for a run which never began."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def run_name(config: Config) -> str:
    """The name asked for, or one like ``lunarlander-ppo-aps-s1``."""
    if config.name is not None:
        return config.name
    env = config.env.name or re.sub(r"[^a-z0-9]+", "_", config.env.id.rpartition(":")[2].lower()).strip("_")
    how = config.gradients.transport if gradient_method(config) else config.sync.rule
    return f"{env}-{config.algo.name}-{how}-s{config.seed}"


def claim(config: Config) -> RunDir:
    """The directory for this run, made if need be.

    Without ``run_dir`` and ``resume`` a name that is taken gets -2, -3, ...; with either, the directory is that one.
    Raises ConfigError where a run would be overwritten, or the directory cannot be written.
    """
    if config.run_dir is None and not config.resume:
        return _claim_free(run_name(config))
    run = asked_for(config)
    if run.holds_a_run() and not config.resume:
        raise ConfigError(
            f"run_dir={run.path}: holds a run, which is not overwritten; allowed: resume=true, or another run_dir"
        )
    if not run.holds_a_run() and any(run.checkpoints.glob("*.pt")):
        raise ConfigError(
            f"run_dir={run.path}: holds checkpoints but no config.yaml, so nobody knows what they are of; put the file "
            "back, or choose another run_dir"
        )
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={run.path}: cannot be made: {error.strerror or error}") from error
    return _writable(run)


def asked_for(config: Config) -> RunDir:
    """The directory that ``run_dir``, or the run's name, means; nothing is made."""
    return RunDir(Path(config.run_dir).expanduser() if config.run_dir is not None else RUNS / run_name(config))


def _claim_free(name: str) -> RunDir:
    try:
        RUNS.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={RUNS / name}: cannot be made: {error.strerror or error}") from error
    for number in range(1, 10_000):
        run = RunDir(RUNS / (name if number == 1 else f"{name}-{number}"))
        try:
            run.path.mkdir()  # fails where it exists, so that two starts at once get two names
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run_dir={run.path}: cannot be made: {error.strerror or error}") from error
        return _writable(run)
    raise ConfigError(f"name={name}: ten thousand runs of that name; choose another name or run_dir")


def _writable(run: RunDir) -> RunDir:
    if not os.access(run.path, os.W_OK | os.X_OK):
        raise ConfigError(f"run_dir={run.path}: cannot be written to; expected a directory you may write")
    return run


def find(text: str) -> RunDir:
    """The run that ``text`` means: a path, a name below runs/ or in a sweep there, its start, or ``latest``.

    Raises ConfigError where there is none, or more than one.
    """
    for path in (Path(text).expanduser(), RUNS / text):
        if RunDir(path).holds_a_run():
            return RunDir(path)
    known = list(_known())
    if text == "latest" and known:
        return max(known, key=lambda run: run.config.stat().st_mtime)
    found = [run for run in known if text and run.path.name.startswith(text)]
    found = [run for run in found if run.path.name == text] or found
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(run.path.relative_to(RUNS)) for run in found)
        raise ConfigError(f"{text}: several runs begin so: {names}")
    if Path(text).is_dir():
        raise ConfigError(f"{text}: holds no run (no config.yaml); expected the directory of a run")
    names = ", ".join(str(run.path.relative_to(RUNS)) for run in known) or f"none in {RUNS.resolve()}"
    raise ConfigError(
        f"{text}: no such run; expected its path, its name or the start of that, or latest; known: {names}"
    )


def _known() -> Iterator[RunDir]:
    """The runs below runs/, those of sweeps among them."""
    for run in map(RunDir, sorted(RUNS.glob("*"))):
        if run.holds_a_run():
            yield run
        else:
            yield from (inner for inner in map(RunDir, sorted(run.path.glob("*"))) if inner.holds_a_run())
