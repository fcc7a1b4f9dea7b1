"""What SAC and TD3 share: an actor that travels to the workers, twin critics that stay here, and their optimizers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, cast

import gymnasium
import torch
from torch import nn

from ..algorithms import SACConfig, TD3Config
from ..policies.continuous import DeterministicActor, GaussianActor, TwinCritic
from ..policies.protocol import PolicyError
from .off_policy import OffPolicyLearner, frozen_copy
from .optimizer import FlatAdam

Actor = TypeVar("Actor", GaussianActor, DeterministicActor)
Config = TypeVar("Config", SACConfig, TD3Config)


class ContinuousLearner(OffPolicyLearner, Generic[Actor, Config]):
    """A learner from a replay that trains ``policy``, an actor of the kind ``ACTOR``, in place; the critics stay here.

    Critics see actions as they are within their bounds, scaled to [-1, 1].
    """

    ACTOR: ClassVar[type[nn.Module]]
    """The policy that the learner trains."""

    def __init__(
        self,
        policy: nn.Module,
        config: Config,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, config, action_space, num_envs, device, seed)
        if not isinstance(policy, self.ACTOR):
            raise PolicyError(
                f"{config.name.upper()} needs a policy of its own kind, {self.ACTOR.__name__}; got "
                f"{type(policy).__name__}"
            )
        self.config: Config = config
        self.actor: Actor = cast("Actor", policy)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            critic = TwinCritic(observation_space, self.actor.size, (config.critic_hidden,) * 2)
        self.critic = critic.to(self.device)
        self._target_critic = frozen_copy(self.critic)
        self._critic_optimizer = self.adam(self.critic.parameters(), config.learning_rate)
        self._actor_optimizer = self.adam(policy.parameters(), config.actor_learning_rate)
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """What an algorithm has beyond that."""

    def adam(self, parameters: Any, rate: float) -> FlatAdam:
        """An optimizer with the run's settings and this step size."""
        return FlatAdam(parameters, rate, self.config.adam_eps, self.config.max_grad_norm)

    def start(self, progress: float) -> None:
        self._critic_optimizer.start(self.rate(progress))
        self._actor_optimizer.start(self.rate(progress, self.config.actor_learning_rate))

    def stateful(self) -> dict[str, Any]:
        """What a checkpoint holds beside the base's own: modules and optimizers by name."""
        return {
            "critic": self.critic,
            "target_critic": self._target_critic,
            "critic_optimizer": self._critic_optimizer,
            "actor_optimizer": self._actor_optimizer,
        }

    def state_dict(self) -> dict[str, Any]:
        """As of the base, with all of ``stateful``."""
        own: dict[str, Any] = {}
        for name, part in self.stateful().items():
            state = part.state_dict()
            own[name] = {key: tensor.clone() for key, tensor in state.items()} if isinstance(part, nn.Module) else state
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        super().load_state_dict(state)
        for name, part in self.stateful().items():
            part.load_state_dict(state[name])
