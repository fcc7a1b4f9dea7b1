"""When a worker asks for new weights: adaptive policy synchronization (APS) and the rules it is compared with.

APS (arXiv 2507.10990): a worker that acts with a local copy of the policy asks for weights only when
``mean_s KL(pi_local(.|s) || pi_learner(.|s)) > delta`` over states of its own latest data, or when its copy is
more than ``max_lag`` versions old.  The mean over states, not the sum, so that ``delta`` (in nats) means the
same for any number of environments.

Everything here is pure: a rule is asked, it answers, and holds no state of its own.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class SyncRule:
    """Decides on the worker whether to request weights.

    ``needs_divergence`` says whether the learner should send probes, so that the worker can measure
    the KL divergence; without them a worker only learns which version is the newest.
    """

    name: ClassVar[str] = ""
    needs_divergence: ClassVar[bool] = False

    def wants_weights(self, lag: int, kl: float | None) -> bool:
        """Whether to send a request.

        Args:
            lag: how many versions the local policy is behind the newest known; 0 means up to date.
            kl: mean KL(local || learner) in nats at the newest version, or None if it was not measured.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """The rule as plain values, for the handshake and for summaries."""
        return {"name": self.name, **asdict(self)}


def _whole_positive(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a whole number of versions, at least 1; got {value!r}")


@dataclass(frozen=True)
class APS(SyncRule):
    """Adaptive policy synchronization: request when the divergence exceeds ``delta`` or the lag ``max_lag``.

    Args:
        delta: in nats, >= 0; 0 asks at any measurable drift.
        max_lag: in versions; None for no limit.
    """

    delta: float = 0.1
    max_lag: int | None = 100

    name: ClassVar[str] = "aps"
    needs_divergence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (
            isinstance(self.delta, bool)
            or not isinstance(self.delta, (int, float))
            or not self.delta >= 0
            or math.isinf(self.delta)
        ):
            raise ValueError(f"delta must be a finite number of nats, at least 0; got {self.delta!r}")
        if self.max_lag is not None:
            _whole_positive("max_lag", self.max_lag)

    def wants_weights(self, lag: int, kl: float | None) -> bool:
        if lag <= 0:
            return False
        if self.max_lag is not None and lag > self.max_lag:
            return True
        # A divergence that is not a number means that one of the policies is broken: new weights can only help.
        return kl is not None and not kl <= self.delta


@dataclass(frozen=True)
class Always(SyncRule):
    """Request every new version."""

    name: ClassVar[str] = "always"

    def wants_weights(self, lag: int, kl: float | None) -> bool:
        return lag > 0


@dataclass(frozen=True)
class EveryK(SyncRule):
    """Request when ``k`` versions behind."""

    k: int = 10

    name: ClassVar[str] = "every_k"

    def __post_init__(self) -> None:
        _whole_positive("k", self.k)

    def wants_weights(self, lag: int, kl: float | None) -> bool:
        return lag >= self.k


@dataclass(frozen=True)
class Never(SyncRule):
    """Keep the first weights for ever: the lower end that the other rules are compared with."""

    name: ClassVar[str] = "never"

    def wants_weights(self, lag: int, kl: float | None) -> bool:
        return False
