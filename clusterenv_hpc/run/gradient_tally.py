"""What a run of a gradient method adds up to, over all the times it was started."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from clusterenv_hpc.gradients.links import GradientStats
from clusterenv_hpc.gradients.updates import Units, Update
from clusterenv_hpc.run.counters import Counters


@dataclass
class GradientTally(Counters):
    """The counters of one run.

    Gradients are counted in trajectories, environment steps only where their gradient was used.  ``window`` episodes,
    about: whole updates are taken until there are so many.
    """

    WIRE = ("weight_messages", "weight_bytes", "gradient_messages", "gradient_bytes", "control_bytes")

    used: int = 0
    stale: int = 0
    rejected: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
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
        units, done, step = update.units, update.aggregate, update.step
        self._count(units.env_steps, units.episodes, seconds, idle_s, done.lag, _wire(stats))
        self.used += done.tally.used
        self.stale += done.tally.stale
        self.rejected += done.tally.rejected
        self.cancelled = self._cancelled_before + sum(stats.cancelled.values())
        self.lag_sum += done.lag
        for worker in range(self.workers):
            self.used_by[worker] += int(done.counts[worker])
            self.not_finite_by[worker] = self._not_finite_before[worker] + not_finite.get(worker, 0)
        self._remember(units)
        return {
            **self._record(units.env_steps, seconds, idle_s),
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
        }

    def _remember(self, units: Units) -> None:
        if not units.episodes:
            return
        variance = units.return_std * units.return_std
        self._recent.append((units.episodes, units.return_mean, variance, units.length_mean))
        while sum(one[0] for one in self._recent) - self._recent[0][0] >= self.window:
            self._recent.popleft()

    @property
    def settled(self) -> bool:
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
        if not self._recent:
            return math.nan
        mean, total = self.return_mean, self.recent_episodes
        squares = sum(n * (variance + (own - mean) * (own - mean)) for n, own, variance, _ in self._recent)
        return math.sqrt(squares / total)

    @property
    def length_mean(self) -> float:
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
            **super().summary(),
            **self._counts(),
            "weight_requests": 0,
            "probe_bytes": 0,
            "rollout_bytes": 0,
            "lag_mean": self.lag_sum / self.updates if self.updates else 0.0,
            "kl_mean": math.nan,
        }

    def state_dict(self) -> dict[str, Any]:
        lists = {"used_by": list(self.used_by), "not_finite_by": list(self.not_finite_by)}
        return {**super().state_dict(), **lists, "recent": [list(one) for one in self._recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state_dict`` gave; workers that were not there begin at 0, those that left are left."""
        super().load_state_dict(state)
        self._cancelled_before = self.cancelled
        for name in ("used_by", "not_finite_by"):
            setattr(self, name, (state[name] + [0] * self.workers)[: self.workers])
        self._not_finite_before = list(self.not_finite_by)
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
