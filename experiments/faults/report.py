"""The table and the figure of results.json:  python experiments/faults/report.py"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, panels, save, tell

HERE = Path(__file__).resolve().parent


def stored() -> dict[str, dict[str, Any]]:
    """What was measured."""
    return json.loads((HERE / "results.json").read_text())


def tables() -> dict[str, str]:
    """By name, as the pages ask for them."""
    lines = [
        "| fault | exit code | over after, s | processes left | steps before | goes on at | steps lost "
        "| caught up after, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, told in stored().items():
        if "steps_before" not in told:
            continue
        lines.append(
            f"| {name} | {told['exit_code']} | {told['ended_s']:.1f} | {told['processes_left']} | "
            f"{told['steps_before']:,} | {told['resumed_at']:,} | {told['steps_lost']:,} | {told['caught_up_s']:.1f} |"
        )
    speeds = [
        f"| {name} | {told['steps_per_s']:,.0f} | {told['exit_code']} |"
        for name, told in stored().items()
        if "steps_per_s" in told
    ]
    return {
        "faults": "\n".join(lines),
        "slow": "\n".join(["| file system | steps/s | exit code |", "|---|---|---|", *speeds]),
    }


def draw(path: Path = HERE / "faults.png") -> Path:
    """Seconds until the run has caught up with what it had, and what part of that the restart is."""
    told = {name: one for name, one in stored().items() if "steps_before" in one}
    figure, ((axis,),) = panels(1, 1, (8, 3.2))
    ends = [one["ended_s"] for one in told.values()]
    axis.barh(list(told), ends, label="until every process is gone")
    axis.barh(list(told), [one["caught_up_s"] for one in told.values()], left=ends, label="start again and catch up")
    axis.set_xlabel("seconds")
    axis.invert_yaxis()
    axis.legend()
    return save(figure, path)


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    tell(tables(), draw())
