"""Which jobs a run directory belongs to: ``job.json`` remembers them, so that a job finds its run and a run its job."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterenv_hpc.files import write_atomically
from clusterenv_hpc.jobs.slurm import JOB, SlurmError, look

RUNS = Path("runs")
"""Where runs are that were not told otherwise: below the current directory."""

FILE = "job.json"


class NotFoundError(ValueError):
    """No job or run of that name."""

    exit_code = 2


@dataclass(frozen=True)
class Target:
    """A job and its run's directory, as far as they are known."""

    job: str | None
    directory: Path | None

    @property
    def name(self) -> str:
        """For people."""
        return self.directory.name if self.directory is not None else f"job {self.job}"


def remember(directory: Path, job: str, **facts: Any) -> None:
    """Adds ``job`` to the directory's jobs, as the newest; what is known of it already is kept.

    Raises:
        OSError: the file cannot be written.
    """
    jobs = [entry for entry in read(directory) if entry["job"] != job]
    known = next((entry for entry in read(directory) if entry["job"] == job), {"job": job, "since": _now()})
    text = json.dumps({"jobs": [*jobs, {**known, **facts}]}, indent=2) + "\n"
    write_atomically(directory / FILE, text.encode())


def read(directory: Path) -> list[dict[str, Any]]:
    """The directory's jobs, oldest first; each has at least ``job``."""
    try:
        jobs = json.loads((directory / FILE).read_text())["jobs"]
        return [entry for entry in jobs if isinstance(entry, dict) and JOB.fullmatch(str(entry.get("job", "")))]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def find(text: str, runs: Path = RUNS) -> Target:
    """The job and run that ``text`` means: a job's number, a run's path, name or unique start of a name, ``latest``.

    Raises:
        NotFoundError: there is none, or more than one.
    """
    if JOB.fullmatch(text):
        return Target(text, directory_of(text, runs))
    for path in (Path(text), runs / text):
        if _holds(path):
            return _target(path)
    known = list(_directories(runs))
    if text == "latest" and known:
        return _target(max(filter(_holds, runs.glob("*")), key=lambda path: path.stat().st_mtime))
    found = [path for path in known if text and path.name.startswith(text)]
    found = [path for path in found if path.name == text] or found
    if len(found) == 1:
        return _target(found[0])
    if found:
        raise NotFoundError(f"{text}: several runs begin so: {', '.join(path.name for path in found)}")
    names = ", ".join(path.name for path in known[-8:]) or f"none in {runs.resolve()}"
    raise NotFoundError(
        f"{text}: no such job or run; expected a job's number, a run's path or name, or latest; runs: {names}"
    )


def directory_of(job: str, runs: Path = RUNS) -> Path | None:
    """The run directory of ``job``: the one that remembers it, else the one its output goes to; None if neither."""
    for path in _directories(runs):
        if any(entry["job"] in (job, job.partition("+")[0]) for entry in read(path)):
            return path
    with contextlib.suppress(SlurmError):
        output = look(job).output
        if output and _holds(Path(output).parent):
            return Path(output).parent
    return None


def _target(path: Path) -> Target:
    jobs = read(path)
    return Target(jobs[-1]["job"] if jobs else None, path)


def _directories(runs: Path) -> Iterator[Path]:
    """Runs, and the elements of sweeps within them."""
    for path in sorted(runs.glob("*")):
        if _holds(path):
            yield path
            yield from (inner for inner in sorted(path.glob("*/")) if _holds(inner))


def _holds(path: Path) -> bool:
    return (path / FILE).is_file() or (path / "config.yaml").is_file()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
