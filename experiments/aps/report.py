"""The tables and the figure of ``results.json``:  python experiments/aps/report.py"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, panels, save, tell
from statistics_of_seeds import bootstrap_interval, interquartile_mean

HERE = Path(__file__).resolve().parent


def grouped(results: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Runs by case and rule."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, run in sorted(results.items()):
        case, rule, _ = name.rsplit("-", 2)
        found.setdefault((case, rule), []).append(run)
    return found


def row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the table says of one case and rule."""
    greedy = [run["eval_return_mean"] for run in runs]
    sampled = [run["return_mean"] for run in runs]
    possible = sum(run["updates"] * run["workers"] for run in runs)
    return {
        "seeds": len(runs),
        "greedy": interquartile_mean(greedy),
        "greedy_interval": bootstrap_interval(greedy),
        "greedy_by_seed": greedy,
        "sampled": interquartile_mean(sampled),
        "messages": sum(run["weight_messages"] for run in runs) / len(runs),
        "share": sum(run["weight_messages"] for run in runs) / possible,
        "weight_kb": sum(run["weight_bytes"] for run in runs) / len(runs) / 1e3,
        "probe_kb": sum(run["probe_bytes"] for run in runs) / len(runs) / 1e3,
    }


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| env | sync | seeds | greedy return (IQM, 95 % interval) | last-100 sampled return | weight messages | of "
        "`always` | weights, kB | probes, kB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (case, rule), told in rows.items():
        low, high = told["greedy_interval"]
        lines.append(
            f"| {case} | {rule} | {told['seeds']} | {told['greedy']:.0f} ({low:.0f} to {high:.0f}) | "
            f"{told['sampled']:.0f} | {told['messages']:.0f} | {100 * told['share']:.1f} % | "
            f"{told['weight_kb']:,.0f} | {told['probe_kb']:,.0f} |"
        )
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """By name, as the pages ask for them."""
    return {"returns": table(stored()), "tried": table(stored("tried.json"))}


def stored(file: str = "results.json") -> dict[tuple[str, str], dict[str, Any]]:
    """A row for each case and rule of ``file``; tried.json holds recipes that were given up."""
    results = json.loads((HERE / file).read_text())
    return {key: row(runs) for key, runs in grouped(results).items()}


def draw(path: Path = HERE / "aps.png") -> Path:
    """Greedy return against bytes of weights and probes, a point for each seed and a mark for the mean."""
    rows = stored()
    cases = list(dict.fromkeys(case for case, _ in rows))
    figure, axes = panels(1, len(cases), (4.5 * len(cases), 3.6))
    for axis, case in zip(axes[0], cases, strict=True):
        for (other, rule), told in rows.items():
            if other != case:
                continue
            sent = told["weight_kb"] + told["probe_kb"]
            low, high = told["greedy_interval"]
            mark = axis.errorbar(
                sent, told["greedy"], [[max(0.0, told["greedy"] - low)], [max(0.0, high - told["greedy"])]],
                marker="o", capsize=4, label=rule,
            )  # fmt: skip
            color = mark.lines[0].get_color()
            axis.plot([sent] * told["seeds"], told["greedy_by_seed"], ".", color=color, alpha=0.4)
        axis.set_xscale("log")
        axis.set_xlabel("weights and probes sent, kB a run")
        axis.set_ylabel("greedy return")
        axis.set_title(case)
        axis.legend()
    return save(figure, path)


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    tell(tables(), draw())
