"""Acting greedily on action values, but for a share of actions drawn at random; and the network of such a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from .discrete import Categorical
from .distribution import device_of
from .networks import _linear, _trunk
from .protocol import Tree


class EpsilonGreedy(Categorical):
    """The best of ``n`` choices with probability 1 - epsilon, else any of them; params are n values, then epsilon.

    So the parameters say all about the behaviour of a worker, its exploration included.  ``kl`` holds the first
    policy's epsilon fixed on both sides: what is measured is how the values have changed, not how two workers explore.
    """

    def __init__(self, n: int, start: int = 0, dtype: Any = np.int64) -> None:
        super().__init__(n, start, dtype)
        self.n = int(n)
        self.num_params, self.noise_size = self.n + 1, 2

    def values(self, params: Tensor) -> Tensor:
        """``[..., n]``: the action values in ``params``."""
        return params[..., :-1]

    def index(self, actions: Tensor) -> Tensor:
        """Actions as places in ``values``, int64."""
        index = actions.to(torch.int64)
        return index - self.start if self.start else index

    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        return torch.rand((*shape, 2), generator=generator, device=device_of(generator), dtype=torch.float32)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        drawn = (noise[..., 1] * self.n).to(torch.int64).clamp_(max=self.n - 1)
        return self._members(torch.where(noise[..., 0] < params[..., -1], drawn, params[..., :-1].argmax(-1)))

    def mode(self, params: Tensor) -> Tensor:
        return self._members(params[..., :-1].argmax(-1))

    def _logits(self, params: Tensor) -> Tensor:
        """``[..., n]`` log-probabilities."""
        values, share = params[..., :-1], params[..., -1:] / self.n
        best = torch.zeros_like(values).scatter_(-1, values.argmax(-1, keepdim=True), 1.0)
        return (share + best * (1.0 - params[..., -1:])).log()

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        return super().log_prob(self._logits(params), actions)

    def entropy(self, params: Tensor) -> Tensor:
        return super().entropy(self._logits(params))

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        return super().log_prob_and_entropy(self._logits(params), actions)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        epsilon = p[..., -1]
        # Where the best actions differ: (1 - epsilon) log(p(best) / p(other)); where they agree both are the same.
        apart = (1.0 - epsilon) * torch.log1p(self.n * (1.0 - epsilon) / epsilon)
        same = (p[..., :-1].argmax(-1) == q[..., :-1].argmax(-1)) | (epsilon >= 1.0)
        return torch.where(same, 0.0, apart)

    def proper(self, params: Tensor) -> Tensor:
        return params.isfinite().all(-1) & (params[..., -1] >= 0) & (params[..., -1] <= 1)

    def describe(self) -> str:
        return f"{self.n} action values, then the share of random actions"


class QNetwork(nn.Module):
    """Action values for a Discrete action space, and how its workers explore.

    hidden, activation: as for ``ActorCritic``.  dueling: values are a state's value and the actions' advantages over
    their mean (Wang et al. 2016).
    epsilon, epsilon_exponent: worker i of k explores with ``epsilon ** (1 + i / (k - 1) * exponent)``, so that some try
        everything and some nearly nothing (Ape-X; Horgan et al. 2018, section 4); a single worker stands in the middle.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: spaces.Discrete,
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        dueling: bool = True,
        epsilon: float = 0.4,
        epsilon_exponent: float = 7.0,
    ) -> None:
        super().__init__()
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"action values need a Discrete action space, but it is {action_space}")
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"epsilon={epsilon!r} is not allowed; expected a number from 0 to 1.")
        self.distribution = EpsilonGreedy(int(action_space.n), int(action_space.start), action_space.dtype)
        layers, features = _trunk(observation_space, hidden, activation)
        self.dueling = dueling
        self.network = nn.Sequential(*layers, _linear(features, self.distribution.n + int(dueling), gain=0.01))
        self._ladder = (epsilon, epsilon_exponent)
        self.for_worker(0, 1)

    def for_worker(self, index: int, count: int) -> None:
        """Explore as worker ``index`` of ``count``."""
        epsilon, exponent = self._ladder
        self.epsilon = epsilon ** (1.0 + exponent * (index / (count - 1) if count > 1 else 0.5))

    def values(self, observations: Tree) -> Tensor:
        """Action values ``[..., n]``."""
        output = self.network(observations)
        if not self.dueling:
            return output
        advantages = output[..., 1:]
        return output[..., :1] + advantages - advantages.mean(-1, keepdim=True)

    def forward(self, observations: Tree) -> Tensor:
        """Distribution parameters ``[..., n + 1]``: action values and epsilon."""
        return nn.functional.pad(self.values(observations), (0, 1), value=self.epsilon)
