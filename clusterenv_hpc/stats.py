"""What crossed the wire and what it was good for: ``envs.stats``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Traffic:
    """Messages and bytes of one kind in one direction."""

    messages: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Count one message of ``size`` bytes."""
        self.messages += 1
        self.bytes += size


@dataclass
class Stats:
    """Counted on the learner: what it sent when it sent it, what it received when it took it.

    sent, received: traffic by kind (``actions, step, rollout, weights, probe, request, infos, control``).
    requests: weight requests by worker rank.  kl_*: readings the workers reported, in nats.
    lag_*: versions between the behaviour policy and the learner's newest, by rollout.
    seconds: by worker rank and stage (``env``, ``policy``, ``wait``), as the workers measured it.
    restarts: by worker rank and environment, how often one that failed was built anew (``on_error="restart"``).
    rollouts_dropped: rollouts that were under way when the learner stopped asking.
    """

    sent: defaultdict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    received: defaultdict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    requests: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[int, defaultdict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    env_steps: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    restarts: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    kl_sum: float = 0.0
    kl_count: int = 0
    kl_last: float = float("nan")
    lag_sum: float = 0.0
    lag_count: int = 0
    lag_max: int = 0
    rollouts_dropped: int = 0

    @property
    def weight_messages(self) -> int:
        """How often weights were sent, the first ones included."""
        return self.sent["weights"].messages

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights sent."""
        return self.sent["weights"].bytes

    @property
    def weight_requests(self) -> int:
        """How often workers asked for weights."""
        return sum(self.requests.values())

    @property
    def probe_bytes(self) -> int:
        """Bytes of probes sent."""
        return self.sent["probe"].bytes

    @property
    def rollout_bytes(self) -> int:
        """Bytes of rollouts received."""
        return self.received["rollout"].bytes

    @property
    def env_restarts(self) -> int:
        """How often environments were built anew."""
        return sum(count for rows in self.restarts.values() for count in rows.values())

    @property
    def lag_mean(self) -> float:
        """Mean version lag of the rollouts taken so far (0 if there were none)."""
        return self.lag_sum / self.lag_count if self.lag_count else 0.0

    @property
    def kl_mean(self) -> float:
        """Mean of the workers' KL readings, NaN if there were none."""
        return self.kl_sum / self.kl_count if self.kl_count else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for metrics and JSON."""
        return {
            "weight_messages": self.weight_messages,
            "weight_bytes": self.weight_bytes,
            "weight_requests": self.weight_requests,
            "probe_bytes": self.probe_bytes,
            "rollout_bytes": self.rollout_bytes,
            "lag_mean": self.lag_mean,
            "lag_max": self.lag_max,
            "kl_mean": self.kl_mean,
            "kl_last": self.kl_last,
            "rollouts_dropped": self.rollouts_dropped,
            "env_restarts": self.env_restarts,
            "sent": {kind: vars(traffic).copy() for kind, traffic in self.sent.items()},
            "received": {kind: vars(traffic).copy() for kind, traffic in self.received.items()},
            "requests_by_rank": dict(self.requests),
            "env_steps_by_rank": dict(self.env_steps),
            "restarts_by_rank": {rank: dict(rows) for rank, rows in self.restarts.items()},
            "seconds_by_rank": {rank: dict(stages) for rank, stages in self.seconds.items()},
        }
