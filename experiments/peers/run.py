"""The same work for every peer, in turn:  python experiments/peers/run.py [--only TEXT] [--for SECONDS]

Repeats are the outer loop, so that whatever else the machine does meets all peers alike.  What is in results.json
already is not measured again (delete it there to repeat it); what fails is stored with the end of its output.
Peak memory is that of all processes of a measurement together, shared pages counted once (PSS).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
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

from environments import HERE, install, python_of

from clusterenv_hpc.bench.command import circumstances

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, store

STORE = HERE / "results.json"
ROUND = (("collect", "cartpole"), ("collect", "lunarlander"), ("train", "cartpole"))
COLLECT_S, TRAIN_S = 4.0, {"cartpole": 45.0, "lunarlander": 120.0}
START_S = 90.0
"""For imports, and for daemons that want to be started."""


@dataclass(frozen=True)
class Entry:
    """A way of doing the work: which environment it needs (None: this one), which driver, which variant of it."""

    peer: str | None
    driver: str
    variant: str
    does: tuple[str, ...] = ("collect", "train")
    envs: tuple[str, ...] = ("cartpole", "lunarlander")


ENTRIES = {
    "clusterenv_hpc": Entry(None, "ours", "sync"),
    "clusterenv_hpc, vector entry point": Entry(None, "ours", "vector", envs=("cartpole",)),
    "clusterenv_hpc, APS": Entry(None, "ours", "aps", does=("train",)),
    "Gymnasium AsyncVectorEnv": Entry("gymnasium", "gymnasium_vector", "async"),
    "Gymnasium, vector entry point": Entry("gymnasium", "gymnasium_vector", "vector", envs=("cartpole",)),
    "EnvPool": Entry("envpool", "envpool_threads", ""),
    "Stable-Baselines3, one process": Entry("sb3", "sb3_ppo", "dummy"),
    "Stable-Baselines3, a process each": Entry("sb3", "sb3_ppo", "subproc", does=("collect",)),
    "TorchRL": Entry("torchrl", "torchrl_ppo", ""),
    "RLlib": Entry("rllib", "rllib_ppo", ""),
    "Sample Factory": Entry("sample_factory", "sample_factory_appo", "", does=("train",)),
}


def measurements(repeats: int, lunar_seeds: int) -> Iterator[tuple[str, Entry, dict[str, Any]]]:
    """Name, entry and request of each, in the order in which they are made: each repeat goes through all peers."""
    rounds = [(what, env, r) for r in range(1, repeats + 1) for what, env in ROUND]
    rounds += [("train", "lunarlander", r) for r in range(1, lunar_seeds + 1)]
    for what, env, repeat in rounds:
        for name, entry in ENTRIES.items():
            if what in entry.does and env in entry.envs:
                seconds = COLLECT_S if what == "collect" else TRAIN_S[env]
                asked = {"what": what, "env": env, "seconds": seconds, "seed": repeat, "variant": entry.variant}
                yield f"{name} | {what} | {env} | {repeat}", entry, asked


def marked(mark: str) -> list[int]:
    """The processes that were started with ``mark`` in their environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
    return found


def proportional_kb(pids: list[int]) -> int:
    """Their memory, each shared page divided among those that share it, in kB."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total


def measure(entry: Entry, asked: dict[str, Any]) -> dict[str, Any]:
    """One driver's answer, with peak memory; or ``error``."""
    mark = f"CLUSTERENV_HPC_PEER={uuid.uuid4().hex}"
    environ = {**os.environ, **dict([mark.split("=")]), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    python = Path(sys.executable) if entry.peer is None else python_of(entry.peer)
    driver = HERE / "drivers" / f"{entry.driver}.py"
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said.txt")
        with said.open("w") as out:
            process = subprocess.Popen(
                [str(python), str(driver), json.dumps(asked)], env=environ, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        peak = watched(process, mark, asked["seconds"] + START_S, said)
        output = said.read_text(errors="replace")
    for line in reversed(output.splitlines()):
        if line.startswith("{") and '"steps_per_s"' in line:
            return {**json.loads(line), "peak_mb": round(peak / 1e3, 1)}
    return {"error": output[-1500:] or f"no answer, exit code {process.returncode}"}


def watched(process: subprocess.Popen[bytes], mark: str, limit_s: float, said: Path) -> int:
    """Waits until it has answered, or for ``limit_s``; ends what is left of it; the peak memory in kB."""
    peak, began, answered = 0, time.monotonic(), None
    try:
        while process.poll() is None:
            time.sleep(1.0)
            peak, now = max(peak, proportional_kb(marked(mark))), time.monotonic()
            if answered is None and '"steps_per_s"' in said.read_text(errors="replace"):
                answered = now
            if now - began > limit_s or (answered is not None and now - answered > 5.0):  # said all, does not leave
                break
    finally:  # of an interrupted call as well
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return peak


def main() -> int:
    """Measures what is missing; 3 if time was up before, 1 if something failed."""
    words = command_line(__doc__, resumable=True)
    words.add_argument("--only", default="", help="measurements whose name holds this")
    words.add_argument("--repeats", type=int, default=3, help="of each collection, and seeds of CartPole")
    words.add_argument("--lunar-seeds", type=int, default=1, help="trainings of LunarLander")
    given, began = words.parse_args(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left of the measurement under way
    results: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    failed = 0
    for name, entry, asked in measurements(given.repeats, given.lunar_seeds):
        if given.only not in name or name in results:
            continue
        if time.monotonic() - began > given.seconds:
            print("more is missing: run this again", flush=True)
            return 3
        error = install(entry.peer) if entry.peer else None
        told = measure(entry, asked) if error is None else {"error": error}
        facts = circumstances([])
        facts["command"] = shlex.join(["python", f"drivers/{entry.driver}.py", json.dumps(asked)])
        facts["versions"] = versions_of(entry) if error is None else {}
        results[name] = {**asked, **told, **facts}
        failed += "error" in told
        shown = {key: value for key, value in told.items() if key in ("steps_per_s", "solved_s", "peak_mb", "error")}
        print(f"{name}: {shown}", flush=True)
        store(STORE, results)
    return 1 if failed else 0


def versions_of(entry: Entry) -> dict[str, str]:
    """The pinned requirements of a peer, or this package's own circumstances."""
    if entry.peer is None:
        return circumstances([])["versions"]
    lines = (HERE / "requirements" / f"{entry.peer}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


if __name__ == "__main__":
    sys.exit(main())
