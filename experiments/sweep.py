"""Runs the trainings of an experiment one after another, and keeps what came out of each.

    python experiments/sweep.py experiments/aps            all that is missing
    python experiments/sweep.py experiments/aps cartpole   only the runs whose name begins so

An experiment's folder holds ``sweep.yaml``: ``cases`` (a name and overrides each), ``rules`` (likewise) and ``seeds``.
With ``only``, the named cases are run by the rules listed there alone.  Every combination is one run of
``clusterenv-hpc train`` under ``runs/experiments/``.  A run that was interrupted goes on from its checkpoint; one that
is in ``results.json`` already is not repeated.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from clusterenv_hpc.bench.command import circumstances

sys.path.insert(0, str(Path(__file__).resolve().parent))
from reporting import command_line, store

KEPT = (
    "env_id", "algo", "sync", "sync_settings", "seed", "workers", "num_envs", "env_steps", "updates", "wall_s",
    "steps_per_s", "return_mean", "return_std", "episodes", "weight_messages", "weight_bytes", "weight_requests",
    "probe_bytes", "rollout_bytes", "lag_mean", "lag_max", "kl_mean", "eval_return_mean", "eval_return_std",
    "eval_episodes", "exit_reason", "gradients_used", "units_cancelled", "shares",
)  # fmt: skip

FINISHED = ("completed", "solved")


def combinations(sweep: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Name and overrides of every run."""
    found = []
    for (case, base), (rule, extra), seed in itertools.product(
        sweep["cases"].items(), sweep["rules"].items(), sweep["seeds"]
    ):
        if rule in sweep.get("only", {}).get(case, sweep["rules"]):
            found.append((f"{case}-{rule}-s{seed}", [*base, *extra, f"seed={seed}"]))
    return found


def train(name: str, overrides: list[str], run_dir: Path) -> dict[str, Any] | None:
    """One run, begun or continued; its summary, or None if it did not end by itself."""
    command = [sys.executable, "-m", "clusterenv_hpc.cli", "train", *overrides, f"run_dir={run_dir}"]
    if list(run_dir.glob("checkpoints/*.pt")):
        command.append("resume=true")
    print(f"== {name}: {shlex.join(command[1:])}", flush=True)
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode or not (run_dir / "summary.json").exists():
        print(f"== {name} ended with exit code {done.returncode}", file=sys.stderr)
        return None
    summary = json.loads((run_dir / "summary.json").read_text())
    return summary if summary["exit_reason"] in FINISHED else None


def main() -> int:
    """Run what is missing; write ``results.json`` after each run."""
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="the experiment's folder, with a sweep.yaml")
    parser.add_argument("prefix", nargs="?", default="", help="CASE-RULE-sSEED or how it begins (default: all)")
    given = parser.parse_args()
    folder, wanted = given.folder, given.prefix
    described = folder / "sweep.yaml"
    if not described.is_file():
        parser.error(f"{described} is not there: expected a folder of experiments/ that holds a sweep.yaml")
    sweep = yaml.safe_load(described.read_text())
    if not any(name.startswith(wanted) for name, _ in combinations(sweep)):
        parser.error(f"no run of {described} begins with {wanted!r}; its cases: {', '.join(sweep['cases'])}")
    path = folder / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    failed = 0
    for name, overrides in combinations(sweep):
        if not name.startswith(wanted) or name in results:
            continue
        summary = train(name, overrides, Path("runs", "experiments", folder.name, name))
        if summary is None:
            failed += 1
            continue
        facts = circumstances([])
        facts["command"] = shlex.join(["clusterenv-hpc", "train", *overrides])
        results[name] = {**{key: summary[key] for key in KEPT if key in summary}, **facts}
        store(path, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
