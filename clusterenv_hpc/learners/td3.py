"""TD3 for continuous actions (Fujimoto et al. 2018): DDPG with twin critics, smoothed targets and a delayed actor."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from ..algorithms import TD3Config
from ..policies.continuous import DeterministicActor
from .continuous import ContinuousLearner
from .off_policy import follow, frozen_copy
from .replay import Sample


class TD3(ContinuousLearner[DeterministicActor, TD3Config]):
    """Trains ``policy``, a :class:`DeterministicActor`, in place; the critics stay here."""

    METRICS: ClassVar[tuple[str, ...]] = ("critic_loss", "actor_loss", "value_mean", "grad_norm")
    ACTOR = DeterministicActor

    def set_up(self) -> None:
        self._target_actor = frozen_copy(self.actor)
        self._actor_loss = torch.zeros((), device=self.device)  # of its latest step: not every step is one

    def learn(self, sample: Sample, progress: float) -> Tensor:
        targets = self.targets(sample)
        values = self.critic(sample.observations, self.actor.normalized(sample.actions))
        critic_loss = mse_loss(values, targets.expand_as(values))
        norm = self._critic_optimizer.step(critic_loss)
        if (self.gradient_steps + 1) % self.config.actor_every == 0:
            actor_loss = -self.critic(sample.observations, self.actor.action(sample.observations))[0].mean()
            self._actor_optimizer.step(actor_loss)
            self._actor_loss = actor_loss.detach()
            follow(self._target_critic, self.critic, self.config.tau)
            follow(self._target_actor, self.actor, self.config.tau)
        return torch.stack([value.detach() for value in (critic_loss, self._actor_loss, values.mean(), norm)])

    @torch.no_grad()
    def targets(self, sample: Sample) -> Tensor:
        """``[B]``: rewards and the value of a noisy target action in the state after them."""
        config = self.config
        assert isinstance(self._target_actor, DeterministicActor)
        actions = self._target_actor.action(sample.next_observations)
        noise = torch.randn(actions.shape, generator=self.generator).to(self.device) * config.target_noise
        actions = (actions + noise.clamp(-config.target_noise_limit, config.target_noise_limit)).clamp(-1.0, 1.0)
        following = self._target_critic(sample.next_observations, actions).min(0).values
        return config.reward_scale * sample.rewards + sample.discounts * following

    def stateful(self) -> dict[str, Any]:
        return {**super().stateful(), "target_actor": self._target_actor}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "actor_loss": self._actor_loss.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._actor_loss = state["actor_loss"].to(self.device)
