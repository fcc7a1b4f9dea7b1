"""Tables and figure of results.json:  python experiments/peers/report.py"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, panels, save, tell

HERE = Path(__file__).resolve().parent
ENVS = ("cartpole", "lunarlander")


def grouped() -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Measurements by what, environment and system."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for name, told in json.loads((HERE / "results.json").read_text()).items():
        system, what, env, _ = name.split(" | ")
        found.setdefault((what, env, system), []).append(told)
    return found


def median(told: list[dict[str, Any]], key: str) -> float | None:
    """Over the repeats that gave it."""
    values = [one[key] for one in told if one.get(key) is not None]
    return statistics.median(values) if values else None


def number(value: float | None, digits: int = 0) -> str:
    """For a table."""
    return "" if value is None else f"{value:,.{digits}f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    if not rows:
        return "*Not measured yet.*"
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def systems(what: str) -> list[str]:
    """Those that were measured, the quickest on CartPole first."""
    found = grouped()
    names = dict.fromkeys(system for kind, _, system in found if kind == what)
    rate = {name: median(found.get((what, "cartpole", name), []), "steps_per_s") or 0.0 for name in names}
    return sorted(names, key=lambda name: -rate[name])


def tables() -> dict[str, str]:
    """By name, as the pages ask for them."""
    found = grouped()
    collect = []
    for system in systems("collect"):
        told = [found.get(("collect", env, system), []) for env in ENVS]
        collect.append(
            [
                system,
                *(number(median(one, "steps_per_s")) for one in told),
                number(median(told[0] or told[1], "peak_mb")),
            ]
        )
    train = []
    for system in systems("train"):
        row = [system]
        for env in ENVS:
            told = found.get(("train", env, system), [])
            row += [number(median(told, "steps_per_s")), solved(told)]
        train.append([*row, number(median(found.get(("train", "cartpole", system), []), "peak_mb"))])
    errors = [
        f"- {system}, {what} {env}: `{' '.join(told['error'].split())[-300:]}`"
        for (what, env, system), several in found.items() for told in several[:1] if "error" in told
    ]  # fmt: skip
    return {
        "collect": table(["system", "CartPole-v1, steps/s", "LunarLander-v3, steps/s", "peak memory, MB"], collect),
        "train": table(
            ["system", "CartPole-v1, steps/s", "seconds (steps) to 475", "LunarLander-v3, steps/s",
             "seconds (steps) to 200", "peak memory, MB"], train,
        ),
        "errors": "\n".join(errors) or "None of them failed to install or to run.",
    }  # fmt: skip


def solved(told: list[dict[str, Any]]) -> str:
    """Median time and steps over the seeds that reached the target, and how many did."""
    ran = [one for one in told if "steps_per_s" in one]
    there = [one for one in ran if one["solved_s"] is not None]
    if not ran:
        return "" if not told else "failed"
    if not there:
        last = statistics.median(one["last_return"] for one in ran)
        return f"not in {ran[0]['seconds']:.0f} s (return {last:.0f})"
    share = "" if len(there) == len(ran) else f", {len(there)} of {len(ran)} seeds"
    return f"{median(there, 'solved_s'):.1f} ({number(median(there, 'solved_steps'))}){share}"


def draw(path: Path = HERE / "peers.png") -> Path:
    """Steps per second of collection and of training."""
    found = grouped()
    figure, axes = panels(1, 2, (12, 4.2))
    for axis, what in zip(axes[0], ("collect", "train"), strict=True):
        names = systems(what)[::-1]
        for offset, env in enumerate(ENVS):
            rates = [median(found.get((what, env, name), []), "steps_per_s") or float("nan") for name in names]
            axis.barh([i + 0.38 * (0.5 - offset) for i in range(len(names))], rates, height=0.36, label=env)
        axis.set_yticks(range(len(names)), names)
        axis.set(xscale="log", xlabel="steps/s", title={"collect": "collection", "train": "training"}[what])
    axes[0, 0].legend()
    return save(figure, path)


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    tell(tables(), draw())
