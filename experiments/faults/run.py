"""What a fault costs a run, in steps and in seconds:  python experiments/faults/run.py [--only CASE]

Each case trains PPO on CartPole with two workers and a checkpoint every second, does something to it halfway, starts
it again with ``resume=true``, and compares what the metrics said before with where it went on.  The full disk is a
tmpfs of two megabytes, and needs root; the slow file system is an fsync that takes half a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterenv_hpc.bench.command import circumstances

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, store

HERE = Path(__file__).resolve().parent
STORE = HERE / "results.json"
TOTAL, HALFWAY = 160_000, 60_000
WORDS = [
    "env=cartpole", "workers=2", f"total_steps={TOTAL}", "eval.episodes=0", "log.progress=lines",
    "log.tensorboard=false", "checkpoint.every_s=1", "seed=1",
]  # fmt: skip
SLOW = "import os, time\n_fsync = os.fsync\ndef slow(fd):\n    time.sleep(0.5)\n    _fsync(fd)\nos.fsync = slow\n"


@dataclass(frozen=True)
class Case:
    """Which signal goes to which rank (None: to what was started), and what is done to the file system."""

    signal: signal.Signals | None = None
    rank: int | None = None
    disk: str = ""


CASES = {
    "learner killed (kill -9)": Case(signal.SIGKILL, 0),
    "worker 1 killed (kill -9)": Case(signal.SIGKILL, 1),
    "worker 2 killed (kill -9)": Case(signal.SIGKILL, 2),
    "preempted (SIGTERM)": Case(signal.SIGTERM),
    "preempted (SIGUSR2)": Case(signal.SIGUSR2),
    "disk full": Case(disk="full"),
    "usual file system": Case(disk="usual"),
    "slow file system": Case(disk="slow"),
}


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics so far, whole lines only."""
    with contextlib.suppress(OSError):
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def steps_of(run: Path) -> int:
    """Environment steps, as the newest row says."""
    told = rows(run)
    return told[-1]["env_steps"] if told else 0


def processes(mark: str) -> list[int]:
    """Those that a case has started."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
    return found


def rank_process(mark: str, rank: int) -> int:
    """The Python process of a rank; MPICH tells each its number."""
    for pid in processes(mark):
        with contextlib.suppress(OSError):
            environ = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
            command = Path("/proc", str(pid), "cmdline").read_bytes()
            if f"PMI_RANK={rank}".encode() in environ and b"python" in command.split(b"\0")[0]:
                return pid
    raise RuntimeError(f"no process of rank {rank}")


@contextlib.contextmanager
def place(case: Case) -> Iterator[Path]:
    """A folder for the run."""
    with tempfile.TemporaryDirectory() as folder:
        if case.disk != "full":
            yield Path(folder)
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def start(run: Path, mark: str, *more: str, path: str = "") -> subprocess.Popen[str]:
    """The run's command."""
    environ = {**os.environ, **dict([mark.split("=")]), "OMP_NUM_THREADS": "1"}
    if path:
        environ["PYTHONPATH"] = path
    return subprocess.Popen(
        [sys.executable, "-m", "clusterenv_hpc.cli", "train", *WORDS, f"run_dir={run}", *more],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def wait_until(what: Any, seconds: float) -> bool:
    """Whether ``what()`` became true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.05)
    return False


def measure(case: Case) -> dict[str, Any]:
    """One case from its start to the resumed run's end."""
    mark = f"CLUSTERENV_HPC_FAULT={uuid.uuid4().hex}"
    with place(case) as folder, tempfile.TemporaryDirectory() as patch:
        run = folder / "run"
        if case.disk == "slow":
            Path(patch, "sitecustomize.py").write_text(SLOW)
        process = start(run, mark, path=patch if case.disk == "slow" else "")
        if case.disk in ("usual", "slow"):
            said, _ = process.communicate(timeout=150)
            summary = json.loads((run / "summary.json").read_text())
            return {"exit_code": process.returncode, "steps_per_s": summary["steps_per_s"], "steps_lost": 0}
        wait_until(lambda: process.poll() is not None or steps_of(run) >= HALFWAY, 90)
        if case.disk == "full":  # as if somebody else had filled it
            free = os.statvfs(folder)
            with contextlib.suppress(OSError), (folder / "other").open("wb") as other:
                other.write(bytes(free.f_bavail * free.f_frsize + (1 << 20)))
        hit = time.monotonic()
        if case.signal is not None:
            os.kill(process.pid if case.rank is None else rank_process(mark, case.rank), case.signal)
        said, _ = process.communicate(timeout=60)
        ended_s = time.monotonic() - hit
        wait_until(lambda: not processes(mark), 10)
        left = len(processes(mark))
        before = steps_of(run)
        (folder / "other").unlink(missing_ok=True)
        began = time.monotonic()
        again = start(run, mark, "resume=true")
        wait_until(lambda: again.poll() is not None or steps_of(run) > before, 60)
        caught_up_s = time.monotonic() - began
        more, _ = again.communicate(timeout=120)
        summary = json.loads((run / "summary.json").read_text())
    at = re.search(r"goes on from \S+ at ([\d,]+) steps", more)
    resumed_at = int(at[1].replace(",", "")) if at else 0
    return {
        "exit_code": process.returncode, "message": said.strip().splitlines()[-1][-300:] if said.strip() else "",
        "ended_s": ended_s, "processes_left": left, "steps_before": before, "resumed_at": resumed_at,
        "steps_lost": before - resumed_at, "caught_up_s": caught_up_s, "resumed_exit_code": again.returncode,
        "env_steps": summary["env_steps"], "exit_reason": summary["exit_reason"],
    }  # fmt: skip


def main() -> int:
    """Runs the cases that are missing."""
    words = command_line(__doc__, resumable=True)
    words.add_argument("--only", default="", help="cases whose name holds this")
    given, began = words.parse_args(), time.monotonic()
    results: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    for name, case in CASES.items():
        if name in results or given.only not in name:
            continue
        if time.monotonic() - began > given.seconds:
            print("more is missing: run this again")
            return 3
        facts = circumstances([])
        facts["command"] = f"python experiments/faults/run.py --only '{name}'"
        results[name] = {**measure(case), **facts}
        print(name, {key: value for key, value in results[name].items() if key not in facts}, flush=True)
        store(STORE, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
