"""What a run adds up to, over all the times it was started."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterenv_hpc.rollout import Episodes, Rollout
from clusterenv_hpc.run.counters import Counters
from clusterenv_hpc.stats import Stats


@dataclass
class Tally(Counters):
    """The counters of one run; ``workers`` is what ``sync=always`` would send weights to after each update."""

    WIRE = ("weight_messages", "weight_bytes", "weight_requests", "probe_bytes", "rollout_bytes", "env_restarts")

    lag_count: int = 0
    kl_sum: float = 0.0
    kl_count: int = 0
    asked_for_weights: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
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
        lag = rollout.lag[rollout.valid]
        lag_max = int(lag.max(initial=0))
        kl_sum, kl_count = stats.kl_sum - self._kl_seen[0], stats.kl_count - self._kl_seen[1]
        self._kl_seen = (stats.kl_sum, stats.kl_count)
        wire = {name: getattr(stats, name) for name in self.WIRE}
        self._count(rollout.env_steps, len(rollout.episodes), seconds, idle_s, lag_max, wire)
        self.asked_for_weights += self.workers * published
        self.returns.extend(telling.returns.tolist())
        self.lengths.extend(telling.lengths.tolist())
        self.lag_sum += float(lag.sum())
        self.lag_count += lag.size
        self.kl_sum += kl_sum
        self.kl_count += kl_count
        return {
            **self._record(rollout.env_steps, seconds, idle_s),
            "weights_saved": self.weights_saved,
            "lag_mean": float(lag.mean()) if lag.size else math.nan,
            "lag_max": lag_max,
            "kl_mean": kl_sum / kl_count if kl_count else math.nan,
            "kl_readings": kl_count,
        }

    @property
    def settled(self) -> bool:
        return len(self.returns) >= self.window

    @property
    def return_mean(self) -> float:
        return float(np.mean(self.returns)) if self.returns else math.nan

    @property
    def return_std(self) -> float:
        return float(np.std(self.returns)) if self.returns else math.nan

    @property
    def length_mean(self) -> float:
        return float(np.mean(self.lengths)) if self.lengths else math.nan

    @property
    def weights_saved(self) -> float:
        """The share of weight messages that ``sync=always`` would have sent and this run did not."""
        if not self.asked_for_weights:
            return 0.0
        return max(0.0, 1.0 - self.wire["weight_messages"] / self.asked_for_weights)

    def summary(self) -> dict[str, Any]:
        return {
            **super().summary(),
            "weights_saved": self.weights_saved,
            "lag_mean": self.lag_sum / self.lag_count if self.lag_count else 0.0,
            "kl_mean": self.kl_sum / self.kl_count if self.kl_count else math.nan,
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self._kl_seen = (0.0, 0)
