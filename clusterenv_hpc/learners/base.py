"""What learners have in common, so that an algorithm's file is about the algorithm."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import gymnasium
import torch
from torch import Tensor, nn

from ..policies.protocol import PolicyError, distribution_of
from ..rollout import Episodes, Rollout
from ..settings import checked


class Scheduled(Protocol):
    """The settings that :class:`LearnerBase` reads."""

    @property
    def name(self) -> str: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_schedule(self) -> str: ...


class LearnerBase:
    """A policy trained in place on one device, and a generator for all that is random here.

    device: where to train; defaults to where the policy is.  The policy is moved there.
    meanwhile: called between gradient steps, so that messages move while a long update goes on.
    """

    def __init__(
        self,
        policy: nn.Module,
        config: Scheduled,
        action_space: gymnasium.Space[Any],
        device: torch.device | str | None,
        seed: int,
    ) -> None:
        self.policy = policy
        self.distribution = distribution_of(policy, action_space)
        checked(config)
        self._schedule = config
        first = next(policy.parameters(), None)
        if first is None:
            raise PolicyError(f"{type(policy).__name__} has no parameters; there is nothing to train.")
        self.device = first.device if device is None else torch.device(device)
        policy.to(self.device)
        self.generator = torch.Generator().manual_seed(seed)
        self.meanwhile: Callable[[], object] = nothing

    def rate(self, progress: float, start: float | None = None) -> float:
        """The learning rate at ``progress`` in [0, 1] of the run, from ``start`` or the config's own."""
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress={progress!r} is not allowed; expected the share of the run done, from 0 to 1.")
        rate = self._schedule.learning_rate if start is None else start
        return rate * (1.0 - progress if self._schedule.lr_schedule == "linear" else 1.0)

    def finite(self, metrics: Mapping[str, float]) -> None:
        """Raise ``FloatingPointError`` where a metric is NaN or infinite."""
        if bad := [key for key, value in metrics.items() if not math.isfinite(value)]:
            raise FloatingPointError(
                f"{self._schedule.name}: {', '.join(bad)} stopped being finite; the policy in memory is lost, the last "
                "checkpoint is not. Try a smaller learning rate or reward_scale."
            )

    def demand_finite(self, rollout: Rollout, rows: Any, good: Tensor) -> None:
        """Raise ``FloatingPointError`` naming the environment of the first row for which ``good [M]`` is False."""
        if bool(good.all()):
            return
        column = int(rows[int((~good).nonzero()[0])]) % rollout.num_envs
        raise FloatingPointError(
            f"The policy's outputs stopped being finite, first for environment {int(rollout.rows[column])} of worker "
            f"rank {int(rollout.ranks[column])}: its observations or the policy's weights hold NaN or infinity."
        )

    def telling(self, rollout: Rollout) -> Episodes:
        """All of them."""
        return rollout.episodes

    def state_dict(self) -> dict[str, Any]:
        """Policy and generator, as a snapshot; a learner adds what else it has."""
        return {"policy": copy.deepcopy(self.policy.state_dict()), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state_dict`` was taken."""
        self.policy.load_state_dict(state["policy"])
        self.generator.set_state(state["generator"].cpu())


def nothing() -> None:
    """Nobody wants to do anything meanwhile."""
