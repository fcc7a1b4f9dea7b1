"""The tables of results.json and real/results.json, and the figure of the latter:  python experiments/nigt/report.py"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, panels, save, tell
from statistics_of_seeds import interquartile_mean

HERE = Path(__file__).resolve().parent
METHODS = ("sync_nigt", "m_sync_nigt", "rennala_nigt", "malenia_nigt", "rennala_pg", "afedpg")


def grouped(path: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Runs by case and method."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, run in sorted(json.loads(path.read_text()).items() if path.exists() else ()):
        case, method, _ = name.rsplit("-", 2)
        found.setdefault(case, {}).setdefault(method, []).append(run)
    return found


def same_gradients(cases: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Markdown: returns at the end of training, by method."""
    lines = ["| | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    for case, by_method in cases.items():
        row = []
        for method in METHODS:
            runs = by_method.get(method, [])
            sampled, greedy = ([run[key] for run in runs] for key in ("return_mean", "eval_return_mean"))
            row.append(f"{interquartile_mean(sampled):.1f} ({interquartile_mean(greedy):.1f})" if runs else "-")
        lines.append(f"| {case} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def real_times(cases: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Markdown: wall time, sampled return at the end, and the workers' shares."""
    lines = [
        "| scenario | method | seconds | updates | sampled (greedy) return | shares of the workers, % |",
        "|---" * 6 + "|",
    ]
    for case, by_method in cases.items():
        for method in METHODS:
            for run in by_method.get(method, []):
                shares = ", ".join(f"{100 * share:.0f}" for share in run["shares"])
                lines.append(
                    f"| {case} | {method} | {run['wall_s']:.1f} | {run['updates']} | {run['return_mean']:.1f} "
                    f"({run['eval_return_mean']:.1f}) | {shares} |"
                )
    return "\n".join(lines)


def draw(path: Path = HERE / "real.png") -> Path | None:
    """Bars: the time that as many gradients took, by scenario and method; None where no run is stored."""
    import numpy as np

    cases = grouped(HERE / "real" / "results.json")
    if not cases:
        return None
    figure, ((axes,),) = panels(1, 1, (8, 4))
    width = 0.8 / len(METHODS)
    for number, method in enumerate(METHODS):
        heights = [
            float(np.median([run["wall_s"] for run in by_method[method]])) if method in by_method else np.nan
            for by_method in cases.values()
        ]
        axes.bar(np.arange(len(cases)) + (number + 0.5) * width - 0.4, heights, width, label=method)
    axes.set_xticks(range(len(cases)), list(cases), fontsize="small")
    axes.set_ylabel("seconds for the same number of gradients")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3, axis="y")
    return save(figure, path)


def tables() -> dict[str, str]:
    """By name, as the pages ask for them."""
    return {
        "gradients": same_gradients(grouped(HERE / "results.json")),
        "real": real_times(grouped(HERE / "real" / "results.json")),
    }


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    tell(tables(), draw())
