"""The tables and the figure of ``results.json``:  python experiments/deltas/report.py"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, panels, save, tell
from statistics_of_seeds import bootstrap_interval, interquartile_mean

HERE = Path(__file__).resolve().parent
Rows = dict[str, dict[str, Any]]


def stored() -> dict[str, Rows]:
    """For each case, what each rule came to; rules in the order of sweep.yaml."""
    import yaml

    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    sweep = yaml.safe_load((HERE / "sweep.yaml").read_text())
    found: dict[str, Rows] = {}
    for case in sweep["cases"]:
        for rule in sweep["rules"]:
            names = [f"{case}-{rule}-s{seed}" for seed in sweep["seeds"]]
            if runs := [results[name] for name in names if name in results]:
                found.setdefault(case, {})[rule] = row(runs)
    return {case: rows for case, rows in found.items() if "always" in rows}


def row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; returns as interquartile mean with its interval."""
    greedy = [run["eval_return_mean"] for run in runs]

    def mean(key: str) -> float:
        return sum(run[key] for run in runs) / len(runs)

    return {
        "seeds": len(runs),
        "greedy": interquartile_mean(greedy),
        "interval": bootstrap_interval(greedy),
        "messages": mean("weight_messages"),
        "bytes": mean("weight_bytes") + mean("probe_bytes"),
        "weight_bytes": mean("weight_bytes"),
        "lag": mean("lag_mean"),
    }


def equals_always(told: dict[str, Any], always: dict[str, Any]) -> bool:
    """Whether a return is not worse than that of always: at least the lower end of its interval."""
    return bool(told["greedy"] >= always["interval"][0])


def delta_of(rule: str) -> float | None:
    """What ``sync.delta`` was, where there is one."""
    return float(rule.removeprefix("delta_")) if rule.startswith("delta_") else None


def table(rows: Rows) -> str:
    """One case, in Markdown."""
    always = rows["always"]
    lines = [
        "| sync | seeds | greedy return (IQM, 95 % interval) | weight messages | of `always` | kB of weights and "
        "probes | fewer bytes | mean lag |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rule, told in rows.items():
        low, high = told["interval"]
        share = 100 * told["messages"] / always["messages"]
        lines.append(
            f"| {rule.replace('_', ' ')} | {told['seeds']} | {told['greedy']:.0f} ({low:.0f} to {high:.0f}) | "
            f"{told['messages']:,.0f} | {share:.1f} % | {told['bytes'] / 1e3:,.0f} | "
            f"{always['bytes'] / told['bytes']:.1f} x | {told['lag']:.1f} |"
        )
    return "\n".join(lines)


def headline(found: dict[str, Rows]) -> str:
    """For each case the largest delta whose return is not worse than that of always."""
    lines = [
        "| case | largest delta at the return of `always` | greedy return | of `always` | messages | bytes of "
        "weights | bytes with probes |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, rows in found.items():
        always, best = rows["always"], None
        for rule, told in rows.items():
            if delta_of(rule) is not None and equals_always(told, always):
                best = rule
        if best is None:
            lines.append(f"| {case} | none | | {always['greedy']:.0f} | | | |")
            continue
        told = rows[best]
        fewer = " | ".join(f"{always[key] / told[key]:.0f} x fewer" for key in ("messages", "weight_bytes", "bytes"))
        lines.append(f"| {case} | {delta_of(best):g} | {told['greedy']:.0f} | {always['greedy']:.0f} | {fewer} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """By name, as the pages ask for them."""
    found = stored()
    return {case: table(rows) for case, rows in found.items()} | {"headline": headline(found)}


def draw(path: Path = HERE / "deltas.png") -> Path:
    """Return and share of the messages against delta, a column for each case; always and never as lines."""
    found = stored()
    figure, axes = panels(2, len(found), (3.2 * len(found), 5.2), sharex=True)
    for (upper, lower), (case, rows) in zip(axes.T, found.items(), strict=True):
        swept = [(delta, told) for rule, told in rows.items() if (delta := delta_of(rule)) is not None]
        deltas, greedy = [delta for delta, _ in swept], [told["greedy"] for _, told in swept]
        upper.plot(deltas, greedy, "o-", label="aps")
        ends = [told["interval"] for _, told in swept]
        upper.fill_between(deltas, [low for low, _ in ends], [high for _, high in ends], alpha=0.2)
        for rule, style in (("always", "-"), ("never", ":")):
            if rule in rows:
                upper.axhline(rows[rule]["greedy"], linestyle=style, color="0.5", label=rule)
        upper.set_title(case)
        lower.plot(deltas, [100 * told["messages"] / rows["always"]["messages"] for _, told in swept], "o-")
        lower.axhline(5.0, linestyle="--", color="0.7")
        lower.set(xscale="log", yscale="log", xlabel="delta, nats")
    axes[0, 0].set_ylabel("greedy return")
    axes[1, 0].set_ylabel("weight messages, % of always")
    axes[0, 0].legend()
    return save(figure, path)


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    tell(tables(), draw())
