"""The tables and the figure of ``results.json`` and ``tried.json``:  python experiments/async/report.py"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, panels, save, tell

HERE = Path(__file__).resolve().parent

WANTED = {
    "cartpole": 475.0,
    "acrobot": -90.0,
    "lunarlander": 200.0,
    "pendulum": -250.0,
    "catch": 0.95,
}
"""Greedy returns that count as solved; HalfCheetah is only to learn."""


def results(file: str = "results.json") -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Runs by case and rule, in the order of their seeds; tried.json holds recipes that were given up."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, run in sorted(json.loads((HERE / file).read_text()).items()):
        case, rule, _ = name.rsplit("-", 2)
        found.setdefault((case, rule), []).append(run)
    return found


def mean(runs: list[dict[str, Any]], key: str) -> float:
    """Over the seeds."""
    return sum(run[key] for run in runs) / len(runs)


def returns() -> str:
    """What each recipe reaches."""
    lines = [
        "| env | algo | greedy return by seed | mean | wanted | env steps | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for (case, rule), runs in results().items():
        if rule != "aps":
            continue
        env, algo = case.split("_", 1)
        digits = 2 if env == "catch" else 0
        each = ", ".join(f"{run['eval_return_mean']:.{digits}f}" for run in runs)
        wanted = f"{WANTED[env]:g}" if env in WANTED else ""
        lines.append(
            f"| {env} | {algo} | {each} | {mean(runs, 'eval_return_mean'):.{digits}f} | {wanted} | "
            f"{mean(runs, 'env_steps'):,.0f} | {mean(runs, 'wall_s'):.0f} |"
        )
    return "\n".join(lines)


def shares(file: str = "results.json") -> dict[str, float]:
    """Weight messages of APS as a share of those of ``sync=always``, by case; over all seeds together."""
    found, told = results(file), {}
    for (case, rule), runs in found.items():
        if rule == "aps" and (full := found.get((case, "always"))):
            told[case] = mean(runs, "weight_messages") / mean(full, "weight_messages")
    return told


def messages(file: str = "results.json") -> str:
    """APS beside ``sync=always``, from the same recipes."""
    lines = [
        "| env | algo | sync | greedy return by seed | mean | weight messages | of `always` | mean lag |",
        "|---|---|---|---|---|---|---|---|",
    ]
    told = shares(file)
    for (case, rule), runs in results(file).items():
        if case not in told:
            continue
        env, algo = case.split("_", 1)
        each = ", ".join(f"{run['eval_return_mean']:.0f}" for run in runs)
        share = 1.0 if rule == "always" else told[case]
        lines.append(
            f"| {env} | {algo} | {rule} | {each} | {mean(runs, 'eval_return_mean'):.0f} | "
            f"{mean(runs, 'weight_messages'):,.0f} | {100 * share:.1f} % | {mean(runs, 'lag_mean'):.0f} |"
        )
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Markdown by name."""
    return {"returns": returns(), "messages": messages(), "tried": messages("tried.json")}


def draw(path: Path = HERE / "async.png") -> Path:
    """Greedy return against weight messages, a point for each seed."""
    found, cases = results(), list(shares())
    envs = list(dict.fromkeys(case.split("_")[0] for case in cases))
    figure, axes = panels(1, max(1, len(envs)), (4.5 * max(1, len(envs)), 3.6))
    for axis, env in zip(axes[0], envs, strict=False):
        for number, case in enumerate(case for case in cases if case.startswith(env)):
            for rule, marker in (("always", "x"), ("aps", "o")):
                runs = found[case, rule]
                axis.plot(
                    [run["weight_messages"] for run in runs], [run["eval_return_mean"] for run in runs], marker,
                    color=f"C{number}", label=f"{case.split('_')[1]}, {rule}",
                )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel("weight messages in a run")
        axis.set_ylabel("greedy return")
        axis.set_title(env)
        axis.legend(fontsize="small")
    return save(figure, path)


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    tell(tables(), draw())
