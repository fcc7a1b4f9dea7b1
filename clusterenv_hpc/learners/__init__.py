"""Learners: what turns rollouts into better policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..algorithms import DQNConfig, SACConfig, TD3Config, VTraceConfig
from ..rollout import Episodes, Rollout
from .dqn import DQN
from .ppo import PPO, PPOConfig
from .replay import Replay
from .returns import gae, n_step, vtrace
from .sac import SAC
from .td3 import TD3
from .vtrace import VTrace


class Learner(Protocol):
    """What the run needs of a learning algorithm, whichever it is.

    A learner owns the policy's training: it changes the policy module's parameters in place.
    meanwhile: it calls this between gradient steps, so that messages move while a long update goes on.
    """

    meanwhile: Callable[[], object]

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """Learn from one rollout; ``progress`` in [0, 1] is the share of the run that is over.  Returns metrics."""
        ...

    def telling(self, rollout: Rollout) -> Episodes:
        """The episodes of a rollout whose returns say how good the policy is, where some workers explore on purpose."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on bit for bit, in plain tensors, numbers, strings and containers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        ...


__all__ = [
    "DQN",
    "PPO",
    "SAC",
    "TD3",
    "DQNConfig",
    "Learner",
    "PPOConfig",
    "Replay",
    "SACConfig",
    "TD3Config",
    "VTrace",
    "VTraceConfig",
    "gae",
    "n_step",
    "vtrace",
]
