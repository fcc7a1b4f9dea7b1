"""What the tests on a real Slurm cluster share: giving it work, waiting for it, looking at what came out."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterenv_hpc.jobs import slurm
from clusterenv_hpc.jobs.slurm import JobInfo

REPOSITORY = Path(__file__).parents[1]
DEVCLUSTER = REPOSITORY / "slurm/devcluster"

BRIEF = (
    "eval.episodes=0", "algo.minibatch_size=32", "algo.num_steps=16", "envs_per_worker=4", "log.tensorboard=false",
    "log.every_s=0.5", "checkpoint.every_s=0.5",
)  # fmt: skip
"""What keeps a run short; a later word overrides."""

FAST = ("env=cartpole", "total_steps=2000", *BRIEF)
SLOW = ("env.id=slow_env:SlowCartPole-v0", "env.kwargs={delay_s: 0.005}", *BRIEF, "envs_per_worker=2")
"""About 200 steps a second for each worker."""


@dataclass(frozen=True)
class Submitted:
    """A job and its run's directory."""

    job: str
    directory: Path

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty before it is there."""
        try:
            return json.loads((self.directory / "summary.json").read_text())
        except (OSError, ValueError):
            return {}

    @property
    def log(self) -> str:
        """What the run has written into log.txt."""
        path = self.directory / "log.txt"
        return path.read_text() if path.exists() else ""

    @property
    def printed(self) -> str:
        """What the job has printed."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("slurm-*.out")))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return sorted(self.directory.glob("checkpoints/update-*.pt"))

    def check_continuous(self) -> None:
        """Every update once, in order, and no step lost or counted twice."""
        rows = self.metrics
        assert [row["update"] for row in rows] == list(range(1, len(rows) + 1))
        steps = [row["env_steps"] for row in rows]
        assert all(later > earlier for earlier, later in itertools.pairwise(steps))
        assert (steps[-1], len(rows)) == (self.summary["env_steps"], self.summary["updates"])


class Cluster:
    """The cluster, and how to give it work."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder, self.environ = folder, environ
        self.jobs: list[str] = []

    def run(
        self, *words: str, cwd: Path, timeout_s: float = 60.0, env: dict[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A command with the cluster in reach."""
        done = subprocess.run(
            words, cwd=cwd, env={**os.environ, **self.environ, **(env or {})}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def command(self, *words: str, cwd: Path, python: str = sys.executable, **settings: Any) -> Any:
        """``clusterenv-hpc WORDS``."""
        return self.run(python, "-m", "clusterenv_hpc.cli", *words, cwd=cwd, **settings)

    def submit(self, *words: str, cwd: Path, python: str = sys.executable) -> Submitted:
        """``clusterenv-hpc submit WORDS``."""
        said = self.command("submit", *words, cwd=cwd, python=python).stdout
        found = re.search(r"^job (\d+):.*\n(?:.*\n)*runs?: +(.*)$", said, re.MULTILINE)
        assert found, said
        self.jobs.append(found[1])
        return Submitted(found[1], Path(found[2]))

    def sbatch(self, *words: str, cwd: Path, env: dict[str, str] | None = None) -> str:
        """``sbatch WORDS``; the job's number."""
        job = self.run("sbatch", "--parsable", *words, cwd=cwd, env=env).stdout.strip()
        self.jobs.append(job)
        return job

    def wait(self, job: str, timeout_s: float = 90.0) -> JobInfo:
        """Waits for the job's end, over requeues; what Slurm says of it then."""
        deadline, freed = time.monotonic() + timeout_s, set[int | None]()
        while (info := slurm.look(job)).active:
            if info.state == "PENDING" and info.reason == "BeginTime" and info.restarts not in freed:
                freed.add(info.restarts)
                self.start_soon(job)
            assert time.monotonic() < deadline, f"job {job} is still {info} after {timeout_s} s\n{self.output(info)}"
            time.sleep(0.3)
        return info

    def start_soon(self, job: str) -> None:
        """Spares a requeued job its two minutes; within the same second Slurm would not start it again, but end it."""
        subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now+3"], capture_output=True, timeout=20)

    def completed(self, submitted: Submitted, timeout_s: float = 90.0) -> Submitted:
        """The same, once its job has ended well and its run has come to its end."""
        info = self.wait(submitted.job, timeout_s)
        assert info.state == "COMPLETED", f"{info}\n{submitted.printed}"
        assert submitted.summary.get("exit_reason") == "completed", submitted.printed
        return submitted

    def output(self, info: JobInfo) -> str:
        """What a job has printed."""
        return Path(info.output).read_text() if info.output and Path(info.output).exists() else "(no output)"

    def node(self, what: str, number: int) -> None:
        """Kills or starts a node."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERENV_HPC_TEST")}
        environ["DEVCLUSTER_DIR"] = str(self.folder)
        subprocess.run([DEVCLUSTER / "node", what, str(number)], env=environ, check=True, timeout=60)


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Waits until ``condition`` gives something true, and gives that."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what() if callable(what) else what}"
        time.sleep(0.2)
    return found


def under_way(submitted: Submitted) -> Path:
    """Waits for a run's first checkpoint; its path."""
    return until(lambda: submitted.checkpoints, lambda: f"a checkpoint\n{submitted.printed}")[0]


def rank_process(submitted: Submitted, rank: int) -> int:
    """The process id of a rank, as the machine sees it."""
    names = (b"PMI_RANK=%d" % rank, b"OMPI_COMM_WORLD_RANK=%d" % rank, b"PMIX_RANK=%d" % rank)
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path("/proc", entry, "environ").read_bytes().split(b"\0")
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        trains = b"train" in words and Path(os.fsdecode(words[0])).name.startswith("python")
        if trains and f"SLURM_JOB_ID={submitted.job}".encode() in environ and any(name in environ for name in names):
            return int(entry)
    raise AssertionError(f"no process of rank {rank} of job {submitted.job}")


def python_with(name: str, wheels: Sequence[str]) -> str:
    """The Python of a virtual environment that has ``wheels``, and everything else from this one; kept in .cache/."""
    folder = REPOSITORY / ".cache/venvs" / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"
    made, python = folder / ".made", folder / "bin/python"
    key = f"{sys.prefix} {' '.join(wheels)}"
    if not made.exists() or made.read_text() != key:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", folder], check=True, timeout=120)
        (site,) = folder.glob("lib/python*/site-packages")
        inherited = next(path for path in sys.path if path.endswith("site-packages"))
        (site / "inherited.pth").write_text(f"import site; site.addsitedir({inherited!r})\n")
        if wheels:
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", *wheels]
            subprocess.run(pip, check=True, timeout=300, stdin=subprocess.DEVNULL)
        made.write_text(key)
    return str(python)
