"""What a run of a gradient method adds up to, over all the times it was started."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from clusterenv_hpc.gradients.links import GradientStats
from clusterenv_hpc.gradients.updates import Units, Update

WIRE = ("weight_messages", "weight_bytes", "gradient_messages", "gradient_bytes", "control_bytes")
"""Counters of :class:`GradientStats` that are carried over a resume."""


@dataclass
class GradientTally:
    """The counters of one run; ``state_dict`` and ``load_state_dict`` carry them over a resume.

    Gradients are counted in trajectories, environment steps only where their gradient was used.

    Args:
        window: episodes in the recent mean return, about: whole updates are taken until there are so many.
        workers: workers, real or logical.
    """

    window: int
    workers: int
    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    wall_s: float = 0.0
    idle_s: float = 0.0
    used: int = 0
    stale: int = 0
    rejected: int = 0
    cancelled: int = 0
    lag_sum: int = 0
    lag_max: int = 0
    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WIRE, 0))
    wire: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WIRE, 0))

    def __post_init__(self) -> None:
        self.used_by = [0] * self.workers
        self.not_finite_by = [0] * self.workers
        self._cancelled_before = 0
        self._not_finite_before = list(self.not_finite_by)
        self._recent: deque[tuple[int, float, float, float]] = deque()  # episodes, mean, variance, length

    def add(
        self, update: Update, stats: GradientStats, not_finite: dict[int, int], seconds: float, idle_s: float
    ) -> dict[str, Any]:
        """Counts one update, which took ``seconds``, and of these waited for ``idle_s``; returns its record.

        not_finite: by worker, gradients refused since the run was last started.
        """
        units, done = update.units, update.aggregate
        self.env_steps += units.env_steps
        self.updates += 1
        self.episodes += units.episodes
        self.wall_s += seconds
        self.idle_s += idle_s
        self.used += done.tally.used
        self.stale += done.tally.stale
        self.rejected += done.tally.rejected
        self.cancelled = self._cancelled_before + sum(stats.cancelled.values())
        self.lag_sum += done.lag
        self.lag_max = max(self.lag_max, done.lag)
        for worker in range(self.workers):
            self.used_by[worker] += int(done.counts[worker])
            self.not_finite_by[worker] = self._not_finite_before[worker] + not_finite.get(worker, 0)
        self._remember(units)
        self.wire = {name: self.before[name] + count for name, count in _wire(stats).items()}
        step = update.step
        return {
            "update": self.updates,
            "env_steps": self.env_steps,
            "wall_s": self.wall_s,
            "steps_per_s": units.env_steps / seconds,
            "idle_share": idle_s / seconds,
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "length_mean": self.length_mean,
            "episodes": self.episodes,
            "update_return_mean": units.return_mean,
            **self._counts(),
            "used": done.tally.used,
            "stale": done.tally.stale,
            "rejected": done.tally.rejected,
            "counts": done.counts.tolist(),
            "returns_by_worker": [one.return_mean for one in update.by_worker],
            "gradient_norm": step.gradient_norm,
            "direction_norm": step.direction_norm,
            "moved": step.moved,
            "lag_mean": float(done.lag),
            "lag_max": done.lag,
            **self.wire,
        }

    def _remember(self, units: Units) -> None:
        if not units.episodes:
            return
        self._recent.append((units.episodes, units.return_mean, units.return_std**2, units.length_mean))
        while sum(one[0] for one in self._recent) - self._recent[0][0] >= self.window:
            self._recent.popleft()

    @property
    def settled(self) -> bool:
        """Whether there are ``window`` episodes."""
        return self.recent_episodes >= self.window

    @property
    def recent_episodes(self) -> int:
        """How many the recent mean return is of."""
        return sum(count for count, *_ in self._recent)

    @property
    def return_mean(self) -> float:
        """Mean return of about the last ``window`` episodes, cut at the horizon; NaN before the first."""
        return self._mean(1)

    @property
    def return_std(self) -> float:
        """Their standard deviation."""
        if not self._recent:
            return math.nan
        mean, total = self.return_mean, self.recent_episodes
        return math.sqrt(sum(n * (variance + (own - mean) ** 2) for n, own, variance, _ in self._recent) / total)

    @property
    def length_mean(self) -> float:
        """Their mean length."""
        return self._mean(3)

    def _mean(self, place: int) -> float:
        if not self._recent:
            return math.nan
        return sum(one[0] * one[place] for one in self._recent) / self.recent_episodes

    @property
    def shares(self) -> list[float]:
        """Of all gradients that were used, each worker's part."""
        total = sum(self.used_by)
        return [count / total if total else 0.0 for count in self.used_by]

    def _counts(self) -> dict[str, Any]:
        return {
            "gradients_used": self.used,
            "gradients_stale": self.stale,
            "gradients_rejected": self.rejected,
            "gradients_dropped": self.stale + self.rejected,
            "units_cancelled": self.cancelled,
            "shares": self.shares,
            "not_finite": list(self.not_finite_by),
        }

    def summary(self) -> dict[str, Any]:
        """The counters, under the names of summary.json; what a gradient method has nothing of is 0 or NaN."""
        return {
            "env_steps": self.env_steps,
            "updates": self.updates,
            "wall_s": self.wall_s,
            "steps_per_s": self.env_steps / self.wall_s if self.wall_s else 0.0,
            "idle_share": self.idle_s / self.wall_s if self.wall_s else 0.0,
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "episodes": self.episodes,
            **self._counts(),
            **self.wire,
            "weight_requests": 0,
            "probe_bytes": 0,
            "rollout_bytes": 0,
            "lag_mean": self.lag_sum / self.updates if self.updates else 0.0,
            "lag_max": self.lag_max,
            "kl_mean": math.nan,
        }

    _PLAIN = (
        "env_steps", "updates", "episodes", "wall_s", "idle_s", "used", "stale", "rejected", "cancelled", "lag_sum",
        "lag_max",
    )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers and lists."""
        plain = {name: getattr(self, name) for name in self._PLAIN}
        lists = {"used_by": list(self.used_by), "not_finite_by": list(self.not_finite_by)}
        return {**plain, **lists, "wire": dict(self.wire), "recent": [list(one) for one in self._recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state_dict`` gave; workers that were not there begin at 0, those that left are left."""
        for name in self._PLAIN:
            setattr(self, name, state[name])
        self._cancelled_before = self.cancelled
        for name in ("used_by", "not_finite_by"):
            setattr(self, name, (state[name] + [0] * self.workers)[: self.workers])
        self._not_finite_before = list(self.not_finite_by)
        self.before = {name: state["wire"].get(name, 0) for name in WIRE}
        self.wire = dict(self.before)
        self._recent = deque(
            (int(n), float(mean), float(var), float(length)) for n, mean, var, length in state["recent"]
        )


def _wire(stats: GradientStats) -> dict[str, int]:
    """Messages and bytes so far: points to the workers, gradients (or sums) and counts to the learner."""
    points, gradients = stats.sent["point"], [stats.received["gradient"], stats.received["sum"]]
    return {
        "weight_messages": points.messages,
        "weight_bytes": points.bytes,
        "gradient_messages": sum(one.messages for one in gradients),
        "gradient_bytes": sum(one.bytes for one in gradients),
        "control_bytes": stats.sent["control"].bytes + stats.received["count"].bytes,
    }
