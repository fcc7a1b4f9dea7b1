"""Tables, model and figure of results.json:  python experiments/scaling/report.py

The model: rank 0 spends so many microseconds on a rollout message of an environment, a worker sends one every
``period``; the quotient is the number of workers that saturate it.  Up to there total steps grow with the workers,
beyond it they stay.  What a message costs is taken apart as ``a + b x bytes`` (least squares over the sizes measured
with CartPole): ranks between, which merge messages, would save the part ``a``.  Training is left out: it is the
learner's own, whatever the wire.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, panels, save, tell

HERE = Path(__file__).resolve().parent
MODELLED = (16, 64, 256, 1024, 4096)


def stored() -> dict[str, Any]:
    """What was measured."""
    return json.loads((HERE / "results.json").read_text())


def starting(results: dict[str, Any], name: str) -> dict[str, Any]:
    """The measurements of one kind, by their last word."""
    found = {key.split()[1]: value for key, value in results.items() if key.split()[0] == name}
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


@dataclass(frozen=True)
class Cost:
    """Microseconds of rank 0 for a message: ``a + b x bytes``."""

    a: float
    b: float

    def of(self, size: float) -> float:
        """For a message of so many bytes."""
        return self.a + self.b * size


def fitted(results: dict[str, Any]) -> Cost:
    """Relative errors are minimised, so that small messages count as much as large ones."""
    rows = [told["results"]["cartpole"] for told in starting(results, "message").values()]
    size, cost = (np.array([row[key] for row in rows]) for key in ("message_bytes", "us_per_message"))
    design = np.stack([np.ones_like(size), size], 1) / cost[:, None]
    (a, b), *_ = np.linalg.lstsq(design, np.ones_like(cost), rcond=None)
    return Cost(float(max(a, 0.0)), float(b))


@dataclass(frozen=True)
class Load:
    """A worker of one environment: steps/s alone, bytes of a message, seconds between two, µs of rank 0 for one."""

    steps_per_s: float
    size: float
    period_s: float
    us: float

    @property
    def served(self) -> float:
        """How many such workers saturate rank 0."""
        return self.period_s * 1e6 / self.us


def loads(results: dict[str, Any]) -> dict[str, Load]:
    """By environment, the quickest first."""
    rows = results["env flood"]["results"]
    found = {}
    for env, row in rows.items():
        rate = row["worker_messages_per_s"]
        envs = 64 if env == "cartpole" else 16
        steps = rate * envs * results["env flood"]["options"]["num_steps"]
        found[env] = Load(steps, row["message_bytes"], 1 / rate, row["us_per_message"])
    return dict(sorted(found.items(), key=lambda item: -item[1].steps_per_s))


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    if not rows:
        return "*Not measured yet.*"
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def tables() -> dict[str, str]:
    """By name, as the pages ask for them."""
    results = stored()
    cost, by_env = fitted(results), loads(results)
    workers = [
        [count, env, f"{row['steps_per_s']:,.0f}", f"{row['limit_steps_per_s']:,.0f}", f"{row['ratio_to_limit']:.3f}",
         f"{row['learner_us']:.0f}", f"{100 * row['learner_cpu']:.1f} %"]
        for count, told in starting(results, "workers").items() for env, row in told["results"].items()
    ]  # fmt: skip
    messages = [
        [steps, f"{row['message_bytes'] / 1e3:,.0f}", f"{row['us_per_message']:.0f}",
         f"{cost.of(row['message_bytes']):.0f}", f"{row['workers_served']:,.0f}"]
        for steps, told in starting(results, "message").items() for row in told["results"].values()
    ]  # fmt: skip
    flood = [
        [count, f"{told['us_per_message']:.0f}", f"{told['results']['cartpole']['cpu_us_per_message']:.0f}"]
        for count, told in starting(results, "flood").items()
    ]
    envs = [
        [env, f"{load.steps_per_s:,.0f}", f"{load.size / 1e3:,.0f}", f"{1e3 * load.period_s:,.1f}",
         f"{results['env flood']['results'][env]['us_per_message']:.0f}", f"{ratio_of(results, env)}"]
        for env, load in by_env.items()
    ]  # fmt: skip
    policies = [
        [size, f"{told['always']['weight_bytes'] / 1e3:,.0f}",
         f"{told['aps']['cpu_us'] - told['never']['cpu_us']:.0f}",
         f"{told['always']['cpu_us'] - told['never']['cpu_us']:.0f}"]
        for size, told in starting(results, "policy").items()
    ]  # fmt: skip
    model, fan_out = [], []
    for env, load in by_env.items():
        served = load.served
        merged = load.period_s * 1e6 / max(load.us - cost.a, cost.b * load.size / 2)
        shares = [f"{min(1.0, served / count):.2f}" for count in MODELLED]
        fan_out.append(f"- {env}: from {served:,.0f} workers on, to at most {merged / served:.1f} times as many")
        model.append([env, *shares, f"{served:,.0f}", f"{merged:,.0f}"])
    return {
        "workers": table(
            ["workers", "environment", "steps/s", "limit", "ratio", "µs of rank 0 a message", "rank 0's core"], workers
        ),
        "message": table(["steps", "kB", "µs a message", "model", "workers served"], messages),
        "flood": table(["workers that flood", "µs a message", "of them processor time"], flood),
        "envs": table(
            ["environment", "steps/s of a worker", "kB a message", "ms between two", "µs a message", "ratio"], envs
        ),
        "policy": table(["hidden units", "weights, kB", "µs a probe", "µs of weights"], policies),
        "model": table(
            ["environment", *(f"{count:,}" for count in MODELLED), "saturated at", "with merged messages"], model
        ),
        "fanout": "\n".join(fan_out),
        "fit": f"Rank 0 spends {cost.a:.0f} µs + {1e3 * cost.b:.3f} µs for each kB on a message "
        f"({1e-3 / cost.b:.1f} GB/s); the two parts are equal at {cost.a / cost.b / 1e3:,.0f} kB.",
    }


def ratio_of(results: dict[str, Any], env: str) -> str:
    """The ratio to the limit with two workers, where it was measured."""
    for name in (f"env {env}", "workers 2"):
        if env in results.get(name, {}).get("results", {}):
            return f"{results[name]['results'][env]['ratio_to_limit']:.3f}"
    return ""


def draw(path: Path = HERE / "scaling.png") -> Path:
    """Ratio against workers, cost against message size, and the model."""
    results = stored()
    cost, by_env = fitted(results), loads(results)
    figure, ((left, middle, right),) = panels(1, 3, (13, 3.8))
    measured = starting(results, "workers")
    for env in ("cartpole", "lunarlander"):
        counts = [int(count) for count in measured]
        left.plot(counts, [told["results"][env]["ratio_to_limit"] for told in measured.values()], "o-", label=env)
    left.axhline(1.0, color="0.7", linewidth=1)
    left.set(xscale="log", xlabel="workers, on two cores", ylabel="steps/s of the limit", ylim=(0, 1.15))
    left.set_xticks([int(count) for count in measured], list(measured))
    left.legend()
    rows = [told["results"]["cartpole"] for told in starting(results, "message").values()]
    size = np.array([row["message_bytes"] for row in rows])
    middle.plot(size / 1e3, [row["us_per_message"] for row in rows], "o", label="measured")
    line = np.geomspace(size.min(), size.max(), 50)
    middle.plot(line / 1e3, [cost.of(x) for x in line], "-", label="a + b x bytes")
    middle.set(xscale="log", yscale="log", xlabel="kB a message", ylabel="µs of rank 0")
    middle.legend()
    counts = np.geomspace(1, 4096, 200)
    for env, load in by_env.items():
        right.plot(counts, np.minimum(counts, load.served) * load.steps_per_s, label=env)
    right.set(xscale="log", yscale="log", xlabel="workers, each on a core of its own", ylabel="steps/s, model")
    right.legend()
    return save(figure, path)


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    tell(tables(), draw())
