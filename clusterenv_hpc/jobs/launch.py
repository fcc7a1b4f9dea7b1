"""Runs from a notebook, through submitit: ``job = launch(["env=lunarlander"], nodes=2)`` returns at once.

Every rank is a task of the job and runs the same few lines; nothing but a list of words is pickled.  A launched job
is interrupted, requeued and resumed like a submitted one: it finds its run's directory again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from clusterenv_hpc.jobs import record, slurm
from clusterenv_hpc.jobs.aftermath import OVER
from clusterenv_hpc.jobs.commands import output_of, read_rows, read_summary
from clusterenv_hpc.jobs.config import SlurmConfigError, check
from clusterenv_hpc.jobs.executor import FOLDER, make_executor, ranks_of, submitting
from clusterenv_hpc.jobs.record import Target
from clusterenv_hpc.jobs.render import hydra_override
from clusterenv_hpc.jobs.submit import checked

CLUSTERS = ("slurm", "local", "debug")

UNANSWERED_S = 300.0
"""How long Slurm may give no answer before waiting for a result ends."""

SAVE_S = 10.0
"""How long a run on this machine that is cancelled may save."""

LATE_S = 30.0
"""How long after a job's end its summary may still come: a shared folder shows new files late."""


class JobFailed(RuntimeError):
    """A launched job is over and its run is not; the message says what is known, and where to look."""


class TrainRank:
    """What submitit runs in each task: ``clusterenv-hpc train`` with these words."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def __call__(self) -> int:
        """One rank's life.  Raises JobFailed where it ends with an exit code."""
        from clusterenv_hpc.run.start import main

        try:
            code = main(self.words)
        except SystemExit as error:  # how a worker leaves
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if os.environ.get("SUBMITIT_EXECUTOR") == "local" and self._interrupted():
            from submitit import JobEnvironment

            JobEnvironment()._requeue(0)  # starts the task again
        if code:
            raise JobFailed(f"the rank ended with exit code {code}; its output says why")
        return 0

    def _interrupted(self) -> bool:
        """Whether the signal of submitit's time limit has stopped the run."""
        directory = next(word.partition("=")[2].strip("'") for word in self.words if word.startswith("run_dir="))
        return (read_summary(Path(directory)) or {}).get("exit_reason") == "SIGUSR2"

    def checkpoint(self) -> Any:
        """For a signal that comes before the run handles signals itself: start again, and resume."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class LaunchedJob:
    """A job that was launched.  ``job_id`` is Slurm's (or submitit's own), ``directory`` the run's."""

    def __init__(self, job: Any, directory: Path, cluster: str) -> None:
        self.job, self.directory, self.cluster = job, directory, cluster
        self._cancelled = self._failed = False

    def __repr__(self) -> str:
        state = "UNKNOWN"
        with contextlib.suppress(slurm.SlurmError):
            state = self.state
        return f"LaunchedJob({self.job_id}, {state}, {str(self.directory)!r})"

    @property
    def job_id(self) -> str:
        """As Slurm's commands take it."""
        return str(self.job.job_id)

    @property
    def state(self) -> str:
        """One of Slurm's long words, such as PENDING, RUNNING or COMPLETED; UNKNOWN where nobody knows.

        Raises:
            SlurmError: Slurm does not answer.
        """
        if self.cluster == "slurm":
            return slurm.look(self.job_id).state
        if self.cluster == "debug":
            if self._exit_reason in OVER:
                return "COMPLETED"
            return "CANCELLED" if self.job.cancelled else "FAILED" if self._failed else "PENDING"
        if (state := str(self.job.state)) == "RUNNING":
            return state
        if self._exit_reason in OVER:
            return "COMPLETED"
        return "CANCELLED" if self._cancelled else "FAILED" if state in ("FINISHED", "INTERRUPTED") else "UNKNOWN"

    @property
    def _exit_reason(self) -> str | None:
        return (self.summary() or {}).get("exit_reason")

    @property
    def done(self) -> bool:
        """Whether the job is over, well or not."""
        return self.state not in slurm.ACTIVE

    def metrics(self) -> list[dict[str, Any]]:
        """A row for each update so far: ``pandas.DataFrame(job.metrics())`` is a table.  Empty before the first."""
        return read_rows(self.directory / "metrics.jsonl")

    def summary(self) -> dict[str, Any] | None:
        """summary.json as it stands; None before it is first written."""
        return read_summary(self.directory)

    def plot(self, directory: str | Path | None = None) -> list[Path]:
        """Draws the run so far; returns the paths of the figures, in ``directory`` or the run's own.

        Raises:
            ConfigError: there is nothing to draw yet, or the directory cannot be written.
        """
        from clusterenv_hpc.run.figures import draw
        from clusterenv_hpc.run.run_dir import RunDir

        return draw([RunDir(self.directory)], Path(directory) if directory is not None else self.directory)

    def logs(self) -> str:
        """What the learner's rank has printed so far."""
        path = self._output()
        return path.read_text(errors="replace") if path is not None else ""

    def cancel(self) -> None:
        """Ends the job; its run saves what it has, and is not requeued.  Raises SlurmError."""
        if self.cluster == "slurm":
            slurm.cancel([self.job_id])
        elif not self.done:
            self._cancelled = True
            if self.cluster == "local" and self._exit_reason == "running":  # submitit would leave it one second to save
                self.job._process.terminate()
                deadline = time.monotonic() + SAVE_S
                while not self.done and time.monotonic() < deadline:
                    time.sleep(0.1)
            if not self.done:
                self.job.cancel()

    def result(self, timeout_s: float | None = None, *, every_s: float = 2.0) -> dict[str, Any]:
        """Waits until the run has come to its end, over requeues, and returns its summary.

        Args:
            timeout_s: how long to wait; None: as long as Slurm says that the job waits or runs.
            every_s: seconds between two looks.

        Raises:
            TimeoutError: the job is not over after ``timeout_s``.
            JobFailed: the job is over, but its run did not come to its end.
            SlurmError: Slurm has not answered for five minutes.
        """
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        answered, over = time.monotonic(), None
        if self.cluster == "debug" and not self.job.cancelled and (error := self.job.exception()) is not None:
            from clusterenv_hpc.run.errors import describe

            self._failed = True
            raise JobFailed(self._failure("FAILED", self.summary() or {"exit_reason": describe(error)})) from error
        while True:
            now = time.monotonic()
            try:
                state, answered = self.state, now
            except slurm.SlurmError:
                if now - answered > UNANSWERED_S:
                    raise
                state = "UNKNOWN"
            summary = self.summary() or {}
            if state not in slurm.ACTIVE:
                if summary.get("exit_reason") in OVER:
                    return summary
                over = over or (now if self.cluster == "slurm" else now - LATE_S)
                if (state != "UNKNOWN" and now - over > LATE_S) or now - over > UNANSWERED_S:
                    raise JobFailed(self._failure(state, summary))
                if state not in ("UNKNOWN", "COMPLETED"):
                    over -= LATE_S  # nothing more will come
            else:
                over = None
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"job {self.job_id} is {state} after {timeout_s:g} s; it goes on")
            time.sleep(every_s)

    def _failure(self, state: str, summary: Mapping[str, Any]) -> str:
        told = f", its run says: {summary['exit_reason']}" if summary.get("exit_reason") else ", its run says nothing"
        lines = [line for line in self._errors().strip().splitlines() if line.strip()]
        lines = [line for line in lines if line.startswith("clusterenv-hpc: ")] or lines  # behind ours stand tracebacks
        last = f"; last line: {lines[-1].strip()}" if lines else ""
        return f"job {self.job_id} is over ({state}){told}{last}; see {self._output() or self.directory}"

    def _output(self) -> Path | None:
        stdout = Path(self.job.task(0).paths.stdout)
        return stdout if stdout.is_file() else output_of(Target(self.job_id, self.directory))

    def _errors(self) -> str:
        path = Path(self.job.task(0).paths.stderr)
        return path.read_text(errors="replace") if path.is_file() else ""


@overload
def launch(overrides: Sequence[str], *, nodes: int | None = ..., cluster: str = ..., **keys: Any) -> LaunchedJob: ...
@overload
def launch(
    overrides: Sequence[Sequence[str]], *, nodes: int | None = ..., cluster: str = ..., **keys: Any
) -> list[LaunchedJob]: ...
def launch(
    overrides: Sequence[str] | Sequence[Sequence[str]],
    *,
    nodes: int | None = None,
    cluster: str = "slurm",
    **keys: Any,
) -> LaunchedJob | list[LaunchedJob]:
    """Starts a run, or with several lists of words a job array, and returns at once.

    Args:
        overrides: the words of ``clusterenv-hpc train``, such as ``["env=lunarlander", "seed=3"]``; or several such
            lists, which share their slurm keys.
        nodes: short for ``slurm.nodes``.
        cluster: ``slurm``; ``local``: a process on this machine, with ranks of its own; ``debug``: within ``result()``.
        keys: further slurm keys, as ``ntasks_per_node=2``.

    Raises:
        ConfigError, SlurmConfigError: a word, key or value that cannot be, as on the command line.
        SlurmError: there is no Slurm here, or it refuses the job; the message is Slurm's own.
    """
    from clusterenv_hpc.run.config import compose

    if cluster not in CLUSTERS:
        raise SlurmConfigError(f"cluster={cluster}: allowed: {', '.join(CLUSTERS)}")
    lists, several = _lists(overrides)
    keys = {**({"nodes": nodes} if nodes is not None else {}), **keys}
    told = [_override(name, value) for name, value in keys.items()]
    configs = [compose([*words, *told]) for words in lists]
    if any(config.slurm != configs[0].slurm for config in configs):
        raise SlurmConfigError("launch: slurm keys cannot vary within one job array; launch twice instead")
    config = check(configs[0].slurm)
    if cluster == "slurm":
        nodes_used, per_node = ranks_of(config, configs[0].other_ranks)
        for each in configs:
            checked(each, nodes_used * per_node)
    directories = [_claim(one) for one in configs]
    folders = [directory / FOLDER for directory in directories if not (directory / FOLDER).exists()]
    tasks = [
        TrainRank([*_own(words), *told, hydra_override("run_dir", str(directory)), "resume=true"])
        for words, directory in zip(lists, directories, strict=True)
    ]
    try:
        real = [path.resolve() for path in directories]
        if shared := next((path for path in real if real.count(path) > 1), None):
            raise SlurmConfigError(f"run_dir={shared}: several runs; allowed: a directory for each of them, or none")
        executor = make_executor(config, cluster, directories, configs[0].other_ranks)
        with submitting(), executor.batch() if several else contextlib.nullcontext():
            jobs = [executor.submit(task) for task in tasks]
    except slurm.SlurmUncertain:
        raise  # the job may be there, and needs its directory
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        for directory in directories:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise
    launched = [LaunchedJob(job, directory, cluster) for job, directory in zip(jobs, directories, strict=True)]
    for one in launched:
        if cluster == "slurm":
            with contextlib.suppress(OSError):  # the job is under way, and its handle is worth more
                record.remember(one.directory, one.job_id)
    return launched if several else launched[0]


def _lists(overrides: Any) -> tuple[list[list[str]], bool]:
    """The words of each run, and whether there may be several runs."""
    if isinstance(overrides, str | bytes) or not isinstance(overrides, Sequence):
        raise SlurmConfigError(f"launch({overrides!r}): allowed: a list of words, or a list of such lists")
    several = bool(overrides) and not isinstance(overrides[0], str)
    lists = list(overrides) if several else [overrides]
    for words in lists:
        if isinstance(words, str | bytes) or not isinstance(words, Sequence):
            raise SlurmConfigError(f"launch([..., {words!r}]): allowed: words alone, or lists of words alone")
        for word in words:
            if not isinstance(word, str):
                raise SlurmConfigError(f"launch([..., {word!r}]): allowed: words such as 'seed=3'")
    return [list(words) for words in lists], several


def _claim(config: Any) -> Path:
    from clusterenv_hpc.run.run_dir import claim

    return Path(claim(config).path).absolute()


def _own(words: Sequence[str]) -> list[str]:
    return [word for word in words if word.partition("=")[0] not in ("run_dir", "resume", "name")]


def _override(name: str, value: Any) -> str:
    return f"slurm.{name}={_hydra(value)}"


def _hydra(value: Any) -> str:
    """A Python value as Hydra's command line writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return hydra_override("", value)[1:]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return str(value)
