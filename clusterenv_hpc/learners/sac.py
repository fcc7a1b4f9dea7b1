"""Soft actor-critic for continuous actions (Haarnoja et al. 2018): reward and entropy, weighed by a temperature."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ..algorithms import SACConfig
from ..policies.continuous import GaussianActor
from .continuous import ContinuousLearner
from .off_policy import follow
from .replay import Sample


class SAC(ContinuousLearner[GaussianActor, SACConfig]):
    """Trains ``policy``, a :class:`GaussianActor`, in place; the critics stay here.

    ``target_entropy`` is that of actions scaled to [-1, 1], so it means the same whatever the environment's units.
    """

    METRICS: ClassVar[tuple[str, ...]] = (
        "critic_loss",
        "actor_loss",
        "entropy",
        "temperature",
        "value_mean",
        "grad_norm",
    )
    ACTOR = GaussianActor

    def set_up(self) -> None:
        config, half = self.config, self.actor.half_range.double()
        wanted = -self.actor.size if config.target_entropy is None else config.target_entropy
        # log_prob is that of actions in the environment's units: wider units, more entropy.
        self._units = float(half[half > 0].log().sum())
        self._target_entropy = float(wanted)
        start = torch.tensor([float(np.log(config.temperature))], device=self.device)
        self._log_temperature = nn.Parameter(start)
        self._temperature_optimizer = self.adam([self._log_temperature], config.actor_learning_rate)

    def start(self, progress: float) -> None:
        super().start(progress)
        self._temperature_optimizer.start(self.rate(progress, self.config.actor_learning_rate))

    def learn(self, sample: Sample, progress: float) -> Tensor:
        temperature = self._log_temperature.detach().exp()
        targets = self.targets(sample, temperature)
        values = self.critic(sample.observations, self.actor.normalized(sample.actions))
        critic_loss = mse_loss(values, targets.expand_as(values))
        norm = self._critic_optimizer.step(critic_loss)
        actions, log_prob = self._act(sample.observations)
        judged = self.critic(sample.observations, self.actor.normalized(actions)).min(0).values
        actor_loss = (temperature * log_prob - judged).mean()
        self._actor_optimizer.step(actor_loss)
        entropy = -log_prob.detach().mean()
        if self.config.adapt_temperature:
            # Less entropy than wanted: this grows the temperature, and with it the reward for entropy.
            self._temperature_optimizer.step((self._log_temperature * (entropy - self._target_entropy)).sum())
        follow(self._target_critic, self.critic, self.config.tau)
        told = (critic_loss, actor_loss, entropy, temperature.squeeze(0), values.mean(), norm)
        return torch.stack([value.detach() for value in told])

    @torch.no_grad()
    def targets(self, sample: Sample, temperature: Tensor) -> Tensor:
        """``[B]``: rewards and the soft value of the state after them.  Entropy between is not counted for n > 1."""
        actions, log_prob = self._act(sample.next_observations)
        following = self._target_critic(sample.next_observations, self.actor.normalized(actions)).min(0).values
        return self.config.reward_scale * sample.rewards + sample.discounts * (following - temperature * log_prob)

    def _act(self, observations: Any) -> tuple[Tensor, Tensor]:
        """Actions as stored and their log-probabilities as if scaled to [-1, 1]; gradients pass through both."""
        params = self.actor(observations)
        actions = self.distribution.sample(params, self.noise((len(params),)))
        return actions, self.distribution.log_prob(params, actions) + self._units

    def stateful(self) -> dict[str, Any]:
        return {**super().stateful(), "temperature_optimizer": self._temperature_optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log_temperature": self._log_temperature.detach().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            self._log_temperature.copy_(state["log_temperature"])
