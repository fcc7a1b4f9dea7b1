"""Q-learning from many workers: double, dueling, n-step, with prioritized replay.

After Ape-X (Horgan et al. 2018): workers explore each in its own way, and say how much their transitions should be
worth.  Here that takes no message of its own: a rollout carries the action values that its worker acted by, and with
these the first priorities are a matter of arithmetic.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from ..algorithms import DQNConfig
from ..policies.epsilon_greedy import EpsilonGreedy
from ..policies.protocol import PolicyError
from ..rollout import Episodes, Rollout
from .batches import take
from .off_policy import OffPolicyLearner, follow, frozen_copy
from .optimizer import FlatAdam
from .replay import Sample
from .returns import n_step

SMALLEST_ERROR = 1e-6
"""Added to errors, so that no transition is lost for ever."""


class DQN(OffPolicyLearner):
    """Trains ``policy``, whose distribution is :class:`EpsilonGreedy` (such as ``QNetwork``), in place.

    Double (van Hasselt et al. 2016), prioritized (Schaul et al. 2016), with a target network that follows slowly.
    """

    METRICS: ClassVar[tuple[str, ...]] = ("loss", "error_mean", "value_mean", "grad_norm")

    def __init__(
        self,
        policy: nn.Module,
        config: DQNConfig,
        action_space: gymnasium.Space[Any],
        num_envs: int,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, config, action_space, num_envs, device, seed, config.prioritized)
        if not isinstance(self.distribution, EpsilonGreedy):
            raise PolicyError(
                f"DQN needs action values: a policy whose distribution is EpsilonGreedy, such as QNetwork; the "
                f"distribution of {type(policy).__name__} is {type(self.distribution).__name__}"
            )
        self.config, self._greedy = config, self.distribution
        self._target = frozen_copy(policy)
        self._least = 1.0
        trained = (parameter for parameter in policy.parameters() if parameter.requires_grad)
        self._optimizer = FlatAdam(trained, config.learning_rate, config.adam_eps, config.max_grad_norm)

    def priorities(self, rollout: Rollout) -> NDArray[Any] | None:
        """From the worker's own values: the size of each step's n-step error, to the power of alpha.

        Only the last state of each environment was not yet valued by its worker; the learner does that.
        """
        if not self.config.prioritized:
            return None
        last = (rollout.num_steps - 1) * rollout.num_envs + np.arange(rollout.num_envs)
        with torch.no_grad():
            values = self._values(self.policy, take(rollout.next_observations, last, self.device))
        best, config = values.max(-1).values.cpu().numpy(), self.config
        errors = worker_errors(rollout, self._greedy, best, config.n_step, config.gamma, config.reward_scale)
        return self._priority(np.abs(errors))

    def _priority(self, errors: NDArray[Any]) -> NDArray[Any]:
        return (errors + SMALLEST_ERROR) ** self.config.priority_exponent

    def _values(self, policy: nn.Module, observations: Any) -> Tensor:
        return self._greedy.values(policy(observations)).float()

    def draw(self, progress: float) -> Sample:
        beta = self.config.importance_exponent
        return self.replay.sample(self.config.batch_size, self.generator, self.device, beta + (1.0 - beta) * progress)

    def telling(self, rollout: Rollout) -> Episodes:
        """The episodes of those environments whose worker explores least."""
        epsilon = rollout.behaviour_params[..., -1].min(0)
        self._least = min(self._least, float(epsilon.min()))
        ended = rollout.episodes
        told = np.isin(ended.rows, rollout.rows[epsilon <= self._least])
        return Episodes(ended.returns[told], ended.lengths[told], ended.rows[told])

    def start(self, progress: float) -> None:
        self._optimizer.start(self.rate(progress))

    def learn(self, sample: Sample, progress: float) -> Tensor:
        config = self.config
        targets = self.targets(sample)
        index = self._greedy.index(sample.actions).unsqueeze(-1)
        values = self._values(self.policy, sample.observations).gather(-1, index).squeeze(-1)
        loss = (sample.weights * huber_loss(values, targets, reduction="none", delta=config.huber)).mean()
        norm = self._optimizer.step(loss)
        follow(self._target, self.policy, config.tau)
        errors = (targets - values.detach()).abs()
        if config.prioritized:
            self.replay.set_priorities(sample.index, self._priority(errors.cpu().numpy()))
        return torch.stack((loss.detach(), errors.mean(), values.detach().mean(), norm))

    @torch.no_grad()
    def targets(self, sample: Sample) -> Tensor:
        """``[B]``: the sum of rewards, and the target network's value of the best action in the state after them."""
        following = self._values(self._target, sample.next_observations)
        judge = self._values(self.policy, sample.next_observations) if self.config.double else following
        best = following.gather(-1, judge.argmax(-1, keepdim=True)).squeeze(-1)
        return self.config.reward_scale * sample.rewards + sample.discounts * best

    def state_dict(self) -> dict[str, Any]:
        """As of the base, with optimizer and target network."""
        target = {name: tensor.clone() for name, tensor in self._target.state_dict().items()}
        return {**super().state_dict(), "optimizer": self._optimizer.state_dict(), "target": target}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        super().load_state_dict(state)
        self._optimizer.load_state_dict(state["optimizer"])
        self._target.load_state_dict(state["target"])


def worker_errors(
    rollout: Rollout, greedy: EpsilonGreedy, last: NDArray[Any], n: int, gamma: float, reward_scale: float = 1.0
) -> NDArray[np.float64]:
    """``[T, N]``: each step's n-step error by the values its worker acted on; sums are cut at the rollout's end.

    last: ``[N]``, the best value after the last step.  Where an episode was truncated and the environment has reset
    within that step, the next episode's first state stands in for the final one: good enough for a first priority.
    """
    params = torch.from_numpy(np.ascontiguousarray(rollout.behaviour_params))
    values = greedy.values(params)
    index = greedy.index(torch.from_numpy(np.ascontiguousarray(rollout.actions))).unsqueeze(-1)
    taken = values.gather(-1, index).squeeze(-1).numpy()
    best = np.concatenate((values.max(-1).values.numpy(), last[None]))
    steps = rollout.num_steps

    def windows(array: NDArray[Any]) -> NDArray[Any]:
        longer = np.concatenate((array, np.zeros((n - 1, *array.shape[1:]), array.dtype)))
        return np.stack([longer[k : k + steps] for k in range(n)])

    terminated, truncated, valid = map(windows, (rollout.terminated, rollout.truncated, rollout.valid))
    returns, lengths, terminal = n_step(windows(rollout.rewards), terminated, truncated, valid, gamma)
    after = np.take_along_axis(best, np.arange(steps)[:, None] + lengths, axis=0)
    return reward_scale * returns + np.where(terminal, 0.0, gamma**lengths * after) - taken
