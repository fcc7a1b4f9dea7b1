"""What a learner's work costs, against workers, message size, environment and policy:

    python experiments/scaling/run.py                 all that is missing of results.json
    python experiments/scaling/run.py --for 150       begins no other measurement after so many seconds

All is measured by ``clusterenv-hpc bench`` and by ``weights.py``, each in a run of its own; ``report.py`` draws.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, store

HERE = Path(__file__).resolve().parent
STORE = HERE / "results.json"

WORKERS = (1, 2, 4, 8, 16)
SHORT = ["seconds=0.6", "repeats=3"]
LONGER = ["seconds=3", "repeats=2"]
"""Where ranks share the cores: in less time a worker of LunarLander sends but a rollout or two."""


def measurements() -> Iterator[tuple[str, list[str]]]:
    """Name and command of each, what the model needs first."""
    bench = [sys.executable, "-m", "clusterenv_hpc.cli", "bench"]
    for num_steps in (8, 32, 128, 512):
        yield f"message {num_steps}", [*bench, "learner", "env=cartpole", f"num_steps={num_steps}", *SHORT]
    envs = "env=cartpole,acrobot,lunarlander,hopper,humanoid"
    yield "env flood", [*bench, "learner", envs, "seconds=0.6", "repeats=1"]
    for workers in WORKERS:
        yield f"workers {workers}", [*bench, "rollout", f"workers={workers}", *(SHORT if workers <= 2 else LONGER)]
    for hidden in (64, 256, 1024):
        yield f"policy {hidden}", [sys.executable, str(HERE / "weights.py"), str(hidden)]
    for workers in WORKERS[::2]:
        yield f"flood {workers}", [*bench, "learner", "env=cartpole", f"workers={workers}", *SHORT]
    for env in ("acrobot", "hopper", "humanoid"):
        yield f"env {env}", [*bench, "rollout", f"env={env}", "workers=2", *SHORT]


def measure(command: list[str]) -> dict[str, Any] | None:
    """The JSON that ``command`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        done = subprocess.run([*command, f"json={file}"], stdout=subprocess.DEVNULL, timeout=280)
        if done.returncode or not file.exists():
            print(f"exit code {done.returncode}: {' '.join(command)}", file=sys.stderr)
            return None
        return json.loads(file.read_text())


def main() -> int:
    """0 when all is there, 3 if time was up before, 1 if something failed."""
    words = command_line(__doc__, resumable=True)
    words.add_argument("--only", default="", help="measurements whose name begins so")
    given, began = words.parse_args(), time.monotonic()
    results: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    failed = 0
    for name, command in measurements():
        if name in results or not name.startswith(given.only):
            continue
        if time.monotonic() - began > given.seconds:
            print("more is missing: run this again")
            return 3
        print(f"== {name}", flush=True)
        told = measure(command)
        failed += told is None
        if told is not None:
            results[name] = told
            store(STORE, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
