"""All methods on virtual time, to 10,000 workers, beside the theory: simulated.json and simulated.png.

    python experiments/nigt/simulated.py               what is missing, then the table and the figure
    python experiments/nigt/simulated.py sqrt equal    only these scenarios
    python experiments/nigt/simulated.py --draw        store, print and draw what there is so far

Every scenario is one call of ``clusterenv-hpc simulate``, which keeps its results cell by cell under
``runs/experiments/nigt-simulated/``: a call that is stopped goes on where it was.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from clusterenv_hpc.bench.command import circumstances
from clusterenv_hpc.gradients import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, store

HERE = Path(__file__).resolve().parent
STORE = HERE / "simulated.json"
RUNS = Path("runs", "experiments", "nigt-simulated")
METHODS = ("rennala_nigt", "malenia_nigt", "sync_nigt", "m_sync_nigt", "rennala_pg", "afedpg")
COMMON = [
    "sigma=1",
    "epsilon=0.05",
    "M=20",
    "seeds=3",
    "alphas=0.25,0.125,0.0625,0.03125,0.015625,0.00390625",
    "max_gradients=300000",
]
MANY = "workers=10,100,1000,10000"
SCENARIOS = {
    "equal": [MANY, "times=equal"],
    "sqrt": [MANY, "times=sqrt", "communication=same"],
    "costly": [MANY, "times=sqrt", "communication=same", "communication_scale=13"],
    "straggler": [MANY, "times=straggler", "straggler=100"],
    "two_tasks": ["problem=two_tasks", "sigma=0.5", "workers=2", "times=straggler", "straggler=10"],
}
"""The factor on costly communication is d^(1/4) for a policy of some 30,000 weights."""
KEPT = ("workers", "method", "alpha", "time", "low", "high", "updates", "gradients", "stale", "theory_round")


def words_of(name: str) -> list[str]:
    """The overrides of one scenario."""
    own = {word.partition("=")[0] for word in SCENARIOS[name]}
    words = [word for word in COMMON if word.partition("=")[0] not in own]
    return [*words, *SCENARIOS[name], f"methods={','.join(METHODS)}"]


def run(name: str) -> bool:
    """One scenario: begun, continued, or read if it is done; whether it came to its end."""
    words = words_of(name)
    print(f"== {name}: clusterenv-hpc simulate {shlex.join(words)}", flush=True)
    return simulate.main([*words, f"out={RUNS / name}"]) == 0


def collect(name: str) -> dict[str, Any] | None:
    """What there is of a scenario by now."""
    path = RUNS / name / "results.json"
    if not path.exists():
        return None
    cells = json.loads(path.read_text())["cells"]
    facts = circumstances([])
    facts["command"] = shlex.join(["clusterenv-hpc", "simulate", *words_of(name)])
    return {**facts, "cells": [{key: cell[key] for key in KEPT} for cell in cells]}


def table(results: dict[str, Any]) -> str:
    """Markdown: the virtual time of each method, and Rennala's gain beside the theory's."""
    lines = [
        "| scenario | workers | " + " | ".join(METHODS) + " | rennala_nigt against sync_nigt: measured (round times) |",
        "|---" * (len(METHODS) + 3) + "|",
    ]
    for name, told in results.items():
        by_key = {(cell["workers"], cell["method"]): cell for cell in told["cells"]}
        for workers in sorted({cell["workers"] for cell in told["cells"]}):
            row = {method: by_key.get((workers, method)) for method in METHODS}
            times = ["not run" if c is None else f"{c['time']:,.4g}" if c["time"] else "-" for c in row.values()]
            rennala, sync = row["rennala_nigt"], row["sync_nigt"]
            gain = "-"
            if rennala and sync and rennala["time"] and sync["time"]:
                gain = f"{sync['time'] / rennala['time']:.2f}"
                if "communication=" not in told["command"]:
                    gain += f" ({sync['theory_round'] / rennala['theory_round']:.2f})"
            lines.append(f"| {name} | {workers:,} | " + " | ".join(times) + f" | {gain} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Time against workers, a panel for each scenario; dashed, the theory's time of a round, scaled to the line."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [name for name in results if name != "two_tasks"]
    figure = Figure(figsize=(4.2 * len(shown), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.atleast_1d(figure.subplots(1, len(shown), sharey=True))
    for axes, name in zip(panels, shown, strict=True):
        for number, method in enumerate(METHODS):
            line = [cell for cell in results[name]["cells"] if cell["method"] == method and cell["time"]]
            line.sort(key=lambda cell: cell["workers"])
            if not line:
                continue
            n, took = (np.array([cell[key] for cell in line], dtype=float) for key in ("workers", "time"))
            axes.plot(n, took, marker="o", markersize=4, color=f"C{number}", label=method)
            expected = np.array([cell["theory_round"] for cell in line], dtype=float)
            scale = np.exp(np.mean(np.log(took / expected)))
            axes.plot(n, scale * expected, color=f"C{number}", linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(name)
        axes.set_xlabel("workers")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("virtual time until ||grad J|| <= 0.05")
    handles = {h.get_label(): h for axes in panels for h in axes.get_legend_handles_labels()[0]}
    figure.legend(handles=list(handles.values()), loc="outside upper center", ncols=len(handles), fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run what is missing; store all that there is."""
    parser = command_line(__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)} (default: all)")
    parser.add_argument("--draw", action="store_true", help="run nothing: store, print and draw what there is")
    given = parser.parse_args()
    if unknown := [name for name in given.scenarios if name not in SCENARIOS]:
        parser.error(f"{unknown[0]}: allowed: {', '.join(SCENARIOS)}")
    results: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    ended = True
    for name in [] if given.draw else given.scenarios or list(SCENARIOS):
        ended = run(name) and ended
    for name in SCENARIOS:  # what an interrupted call has left, too
        if (found := collect(name)) is not None and len(found["cells"]) > len(results.get(name, {}).get("cells", ())):
            results[name] = found
    store(STORE, results)
    results = {name: results[name] for name in SCENARIOS if name in results}
    print(table(results))
    draw(results, HERE / "simulated.png")
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main())
