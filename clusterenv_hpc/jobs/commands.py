"""The commands on jobs: watch, cancel, logs and list (submit has a file of its own).

A job is named by its number or by its run: a path, a name below runs/, the start of only one name, or ``latest``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clusterenv_hpc.jobs import record, slurm
from clusterenv_hpc.jobs.aftermath import OVER
from clusterenv_hpc.jobs.record import Target, find
from clusterenv_hpc.jobs.slurm import JobInfo, SlurmError
from clusterenv_hpc.jobs.submit import submit

__all__ = ["cancel", "list_jobs", "logs", "submit", "watch"]

PATIENCE = 20
"""Questions to Slurm that may go wrong in a row before a watch gives up."""

TAIL_BYTES = 1 << 16


def watch(argv: Sequence[str]) -> int:
    """Follows a job until it ends: its state and the live metrics of its run.  Returns 0 if it ended well, else 1."""
    parser = _parser("watch", "follow a job until it ends; Ctrl-C ends the watching, not the job")
    parser.add_argument("job", metavar="JOB|RUN")
    parser.add_argument("--interval", type=_positive, default=5.0, metavar="S", help="seconds between two looks (5)")
    parser.add_argument("--once", action="store_true", help="say how things stand, and end")
    args = parser.parse_args(list(argv))
    job, target = _with_job(args.job)
    elements = _elements(target)
    line, failures = _Line(), 0
    while True:
        try:
            infos = slurm.look_all(job) if elements else [slurm.look(job)]
            failures = 0
        except SlurmError as error:
            failures += 1
            if failures >= PATIENCE or args.once:
                raise
            line.show(f"{error}; asking again")
            time.sleep(args.interval)
            continue
        target = Target(job, target.directory or record.directory_of(job))
        over = not any(info.active for info in infos)
        stand = _counts(infos) if elements else describe(infos[0]) + _progress(target.directory)
        line.show(stand, keep=over or args.once)
        if over or args.once:
            if elements:
                _show_elements(elements, infos)
            elif over:
                print("\n".join(_ending(infos[0], target.directory)))
            runs: list[Path | None] = [directory for _, directory in elements] or [target.directory]
            return 0 if not over or _ended_well(infos, runs) else 1
        time.sleep(args.interval)


def cancel(argv: Sequence[str]) -> int:
    """Ends jobs: their runs save what they have, and are not requeued."""
    parser = _parser("cancel", "end jobs; their runs save first, and stay where they are")
    parser.add_argument("jobs", metavar="JOB|RUN", nargs="+")
    args = parser.parse_args(list(argv))
    targets = [_with_job(text) for text in args.jobs]  # a wrong name is told before anything is cancelled
    code = 0
    for job, target in targets:
        info = slurm.look(job)
        if info.state == "UNKNOWN" and target.directory is None:
            print(f"clusterenv-hpc: {_unknown(job)}", file=sys.stderr)
            code = 1
        elif not info.active:
            print(f"job {job} is over already: {info.state}")
        else:
            slurm.cancel([job])
            print(f"job {job} cancelled ({target.name})")
    return code


def logs(argv: Sequence[str]) -> int:
    """Prints the end of what a job has printed, and follows it where asked."""
    parser = _parser("logs", "show what a job has printed")
    parser.add_argument("job", metavar="JOB|RUN")
    parser.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="the last N lines (50); 0: all")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends, or Ctrl-C")
    args = parser.parse_args(list(argv))
    target = find(args.job)
    path = output_of(target)
    if path is None:
        raise record.NotFoundError(f"{args.job}: has printed nothing yet, or its output is not known")
    data = path.read_bytes()
    lines = data.decode(errors="replace").splitlines(keepends=True)
    sys.stdout.write("".join(lines[-args.lines :] if args.lines > 0 else lines))
    sys.stdout.flush()
    return _follow(path, len(data), target) if args.follow else 0


def list_jobs(argv: Sequence[str]) -> int:
    """Shows this user's jobs that wait or run, each with its run."""
    _parser("list", "your jobs that wait or run, and their runs").parse_args(list(argv))
    jobs = slurm.mine()
    if not jobs:
        print("no jobs wait or run")
        return 0
    rows = [("JOB", "STATE", "ELAPSED", "LEFT", "NODES", "RUN")]
    for info in jobs:
        run = record.directory_of(info.job)
        times = (_clock(info.elapsed_s), _clock(info.left_s))
        rows.append((info.job, info.state, *times, info.nodes or f"({info.reason})", _short(run) or info.name))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[-1]]))
    return 0


def _with_job(text: str) -> tuple[str, Target]:
    """The job that ``text`` means, and its run.  Raises NotFoundError."""
    target = find(text)
    if target.job is None:
        raise record.NotFoundError(f"{text}: no job of this run is known; it was not submitted to Slurm from here")
    return target.job, target


def _unknown(job: str) -> str:
    return f"job {job}: Slurm does not know it, or has forgotten it, and no run below {record.RUNS.resolve()} names it"


def output_of(target: Target) -> Path | None:
    """The file that the newest job of ``target`` prints to, if it is there."""
    candidates: list[Path] = []
    if target.directory is not None:
        number = (target.job or "").replace("+0", "")
        for folder in (target.directory, target.directory.parent):
            candidates += [folder / f"slurm-{number}.out", *sorted(folder.glob(f"slurm-{number}_*.out"))]
        if (found := next((path for path in candidates if path.is_file()), None)) is not None:
            return found
    if target.job is not None:
        try:
            output = slurm.look(target.job).output
        except SlurmError:
            output = None
        if output and Path(output).is_file():
            return Path(output)
    if target.directory is not None:
        patterns = ("slurm-*.out", "submitit/*/*_0_log.out")  # of a launched job: the learner's
        found_here = (path for pattern in patterns for path in target.directory.glob(pattern))
        older = sorted(found_here, key=lambda path: path.stat().st_mtime)
        return older[-1] if older else None
    return None


def read_rows(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, oldest first; one that is being written is left out.

    Args:
        last: only so many of the newest, without reading the whole file.
    """
    try:
        with open(path, "rb") as file:
            if last is not None:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return []
    rows = []
    for line in lines if last is None else lines[-last:]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_summary(directory: Path) -> dict[str, Any] | None:
    """summary.json, if it is there and whole."""
    try:
        summary = json.loads((directory / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def describe(info: JobInfo) -> str:
    """A job's state in a few words: ``RUNNING on node[1-3], 0:42 elapsed, 9:18 left``."""
    if info.state == "RUNNING":
        left = f", {_clock(info.left_s)} left" if info.left_s is not None else ""
        text = f"{info.state} on {info.nodes}, {_clock(info.elapsed_s)} elapsed{left}"
    else:
        text = info.state + (f" ({info.reason})" if info.reason else "")
    return text + (f", restart {info.restarts}" if info.restarts else "")


def _progress(directory: Path | None) -> str:
    """The newest record of a run, as far as it says something."""
    rows = read_rows(directory / "metrics.jsonl", last=1) if directory is not None else []
    if directory is None or not rows:
        return ""
    row, summary = rows[-1], read_summary(directory) or {}
    total = f"/{summary['total_steps']:,}" if isinstance(summary.get("total_steps"), int) else ""
    parts = [f"{row['env_steps']:,}{total} steps"] if "env_steps" in row else []
    shown: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("return_mean", lambda value: f"return {value:.1f}"),
        ("steps_per_s", lambda value: f"{value:,.0f} steps/s"),
        ("lag_mean", lambda value: f"lag {value:.1f}"),
        ("weights_saved", lambda value: f"{value:.0%} of weight messages saved"),
    )
    for name, text in shown:
        value = row.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            parts.append(text(value))
    return "  |  " + ", ".join(parts) if parts else ""


def _ending(info: JobInfo, directory: Path | None) -> list[str]:
    """What is said of a job that is over."""
    lines = []
    if info.state == "UNKNOWN":
        forgotten = "Slurm has forgotten this job; what is known is in the run's directory"
        lines.append(forgotten if directory is not None else _unknown(info.job))
    summary = read_summary(directory) if directory is not None else None
    if summary is not None:
        keys = ("exit_reason", "env_steps", "updates", "return_mean", "eval_return_mean", "resumed_from")
        lines.append("  ".join(f"{key}={_plain(summary[key])}" for key in keys if summary.get(key) is not None))
    if directory is not None:
        lines.append(f"run:  {directory}")
        output = output_of(Target(info.job, directory))
        if info.state != "COMPLETED" and output is not None:
            lines.append(f"logs: {output}")
    return lines


def _elements(target: Target) -> list[tuple[str, Path]]:
    """Job and directory of each element, where ``target`` is a sweep."""
    if target.directory is None or not (target.directory / "sweep.tsv").is_file():
        return []
    rows = [line.split("\t") for line in (target.directory / "sweep.tsv").read_text().splitlines()[1:]]
    return [(row[1], target.directory / row[2]) for row in rows if len(row) == 4]


def _show_elements(elements: Sequence[tuple[str, Path]], infos: Sequence[JobInfo]) -> None:
    known = {info.job: info for info in infos}
    waiting = known.get(elements[0][0].partition("_")[0])  # Slurm keeps those that wait as one
    for job, directory in elements:
        info = known.get(job) or waiting or JobInfo(job)
        print(f"{job}  {directory.name}  {describe(info)}{_progress(directory)}")


def _ended_well(infos: Sequence[JobInfo], runs: Sequence[Path | None]) -> bool:
    """Whether Slurm says so; or the runs, where Slurm has forgotten their job."""
    if any(info.state != "UNKNOWN" for info in infos):
        return all(info.state == "COMPLETED" for info in infos)
    summaries = [read_summary(run) or {} if run is not None else {} for run in runs]
    return all(summary.get("exit_reason") in OVER for summary in summaries)


def _counts(infos: Sequence[JobInfo]) -> str:
    """How many elements of an array are in which state."""
    counts = Counter[str]()
    for info in infos:
        counts[info.state] += info.count
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def _follow(path: Path, position: int, target: Target) -> int:
    """Prints what is added to ``path`` until the job is over."""
    asked, over = 0.0, False
    while True:
        with open(path, "rb") as file:
            file.seek(position)
            data = file.read()
        position += len(data)
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()
        if over:
            return 0
        if target.job is not None and time.monotonic() - asked > 5.0:
            asked = time.monotonic()
            with contextlib.suppress(SlurmError):  # what the job prints goes on coming
                over = not slurm.look(target.job).active
        time.sleep(0.5)


class _Line:
    """One line that is written over on a terminal; elsewhere a line whenever the text has changed."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, text: str, keep: bool = False) -> None:
        if sys.stdout.isatty():
            sys.stdout.write(f"\r\x1b[K{text}" + ("\n" if keep else ""))
        elif text != self._last:
            sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        sys.stdout.flush()
        self._last = text


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(directory: Path | None) -> str:
    if directory is None:
        return ""
    try:
        return str(directory.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(directory)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{secs:02}" if hours or days else f"{minutes}:{secs:02}"
    return f"{days}-{clock}" if days else clock


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: expected seconds above 0")
    return value


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"clusterenv-hpc {name}", description=about, allow_abbrev=False)
