"""What a run adds up to, over all the times it was started."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterenv_hpc.rollout import Episodes, Rollout
from clusterenv_hpc.stats import Stats

WIRE = ("weight_messages", "weight_bytes", "weight_requests", "probe_bytes", "rollout_bytes", "env_restarts")
"""Counters of :class:`~clusterenv_hpc.stats.Stats` that are carried over a resume."""


@dataclass
class Tally:
    """The counters of one run; ``state_dict`` and ``load_state_dict`` carry them over a resume.

    Args:
        window: episodes in the recent mean return.
        workers: workers, real or logical: what ``sync=always`` would send weights to after each update.
    """

    window: int
    workers: int
    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    wall_s: float = 0.0
    lag_sum: float = 0.0
    lag_count: int = 0
    lag_max: int = 0
    kl_sum: float = 0.0
    kl_count: int = 0
    idle_s: float = 0.0
    asked_for_weights: int = 0
    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WIRE, 0))
    wire: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WIRE, 0))

    def __post_init__(self) -> None:
        self.returns: deque[float] = deque(maxlen=self.window)
        self.lengths: deque[int] = deque(maxlen=self.window)
        self._kl_seen = (0.0, 0)

    def add(
        self,
        rollout: Rollout,
        stats: Stats,
        seconds: float,
        *,
        idle_s: float = 0.0,
        published: bool = True,
        telling: Episodes | None = None,
    ) -> dict[str, Any]:
        """Counts one update on ``rollout``, which took ``seconds`` with its collection; returns the update's record.

        idle_s: how long of that the learner waited.  published: whether workers can hear of the result.
        telling: the episodes whose returns say how good the policy is; default: all that ended.
        """
        telling = rollout.episodes if telling is None else telling
        steps = rollout.env_steps
        lag = rollout.lag[rollout.valid]
        kl_sum, kl_count = stats.kl_sum - self._kl_seen[0], stats.kl_count - self._kl_seen[1]
        self._kl_seen = (stats.kl_sum, stats.kl_count)
        self.env_steps += steps
        self.updates += 1
        self.idle_s += idle_s
        self.asked_for_weights += self.workers * published
        self.wall_s += seconds
        self.episodes += len(rollout.episodes)
        self.returns.extend(telling.returns.tolist())
        self.lengths.extend(telling.lengths.tolist())
        self.lag_sum += float(lag.sum())
        self.lag_count += lag.size
        self.lag_max = max(self.lag_max, int(lag.max(initial=0)))
        self.kl_sum += kl_sum
        self.kl_count += kl_count
        self.wire = {name: self.before[name] + getattr(stats, name) for name in WIRE}
        return {
            "update": self.updates,
            "env_steps": self.env_steps,
            "wall_s": self.wall_s,
            "steps_per_s": steps / seconds,
            "idle_share": idle_s / seconds,
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "length_mean": float(np.mean(self.lengths)) if self.lengths else math.nan,
            "episodes": self.episodes,
            **self.wire,
            "weights_saved": self.weights_saved,
            "lag_mean": float(lag.mean()) if lag.size else math.nan,
            "lag_max": int(lag.max(initial=0)),
            "kl_mean": kl_sum / kl_count if kl_count else math.nan,
            "kl_readings": kl_count,
        }

    @property
    def settled(self) -> bool:
        """Whether there are ``window`` episodes."""
        return len(self.returns) >= self.window

    @property
    def return_mean(self) -> float:
        """Mean return of the last ``window`` episodes, as sampled; NaN before the first has ended."""
        return float(np.mean(self.returns)) if self.returns else math.nan

    @property
    def return_std(self) -> float:
        """Their standard deviation."""
        return float(np.std(self.returns)) if self.returns else math.nan

    @property
    def weights_saved(self) -> float:
        """The share of weight messages that ``sync=always`` would have sent and this run did not."""
        if not self.asked_for_weights:
            return 0.0
        return max(0.0, 1.0 - self.wire["weight_messages"] / self.asked_for_weights)

    def summary(self) -> dict[str, Any]:
        """The counters, under the names of summary.json."""
        return {
            "env_steps": self.env_steps,
            "updates": self.updates,
            "wall_s": self.wall_s,
            "steps_per_s": self.env_steps / self.wall_s if self.wall_s else 0.0,
            "idle_share": self.idle_s / self.wall_s if self.wall_s else 0.0,
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "episodes": self.episodes,
            **self.wire,
            "weights_saved": self.weights_saved,
            "lag_mean": self.lag_sum / self.lag_count if self.lag_count else 0.0,
            "lag_max": self.lag_max,
            "kl_mean": self.kl_sum / self.kl_count if self.kl_count else math.nan,
        }

    _PLAIN = (
        "env_steps", "updates", "episodes", "wall_s", "lag_sum", "lag_count", "lag_max", "kl_sum", "kl_count",
        "idle_s", "asked_for_weights",
    )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers and lists."""
        plain = {name: getattr(self, name) for name in self._PLAIN}
        return {**plain, "wire": dict(self.wire), "returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state_dict`` gave, with statistics of the wire that begin anew."""
        for name in self._PLAIN:
            setattr(self, name, state[name])
        self.before = {name: state["wire"].get(name, 0) for name in WIRE}
        self.wire = dict(self.before)
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self._kl_seen = (0.0, 0)
