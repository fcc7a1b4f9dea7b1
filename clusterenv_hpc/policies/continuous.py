"""Networks for continuous actions learned from a replay: actors that travel to the workers, critics that do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from .gaussian import DiagonalGaussian
from .networks import _ACTIVATIONS, _linear, _trunk
from .protocol import Tree


class _Actor(nn.Module):
    """A trunk and a linear head of ``outputs`` for each dimension of a bounded Box."""

    middle: Tensor
    half_range: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: spaces.Box,
        hidden: Sequence[int],
        activation: str,
        outputs: int,
    ) -> None:
        super().__init__()
        if not isinstance(action_space, spaces.Box) or not action_space.is_bounded():
            raise ValueError(f"continuous actions need a Box with finite bounds; the action space is {action_space}")
        layers, features = _trunk(observation_space, hidden, activation)
        self.size = math.prod(action_space.shape)
        self.network = nn.Sequential(*layers, _linear(features, outputs * self.size, gain=0.01))
        low, high = (bound.reshape(-1).astype(np.float64) for bound in (action_space.low, action_space.high))
        self.register_buffer("middle", torch.from_numpy((low + high) / 2).float(), persistent=False)
        self.register_buffer("half_range", torch.from_numpy((high - low) / 2).float(), persistent=False)

    def acting_parameters(self) -> list[Tensor]:
        """What workers need: the network."""
        return list(self.network.parameters())


class GaussianActor(_Actor):
    """A tanh-squashed Gaussian with means and standard deviations from one network (Haarnoja et al. 2018).

    log_std: the range that logarithms of deviations are squeezed into.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: spaces.Box,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        log_std: tuple[float, float] = (-5.0, 2.0),
    ) -> None:
        super().__init__(observation_space, action_space, hidden, activation, outputs=2)
        self.distribution = DiagonalGaussian(action_space, squash="tanh")
        self.log_std = log_std

    def forward(self, observations: Tree) -> Tensor:
        """Distribution parameters ``[..., 2 D]``."""
        mean, raw = self.network(observations).chunk(2, -1)
        low, high = self.log_std
        return torch.cat((mean, low + 0.5 * (high - low) * (raw.tanh() + 1.0)), -1)

    def normalized(self, actions: Tensor) -> Tensor:
        """Actions as stored, ``[N, *action_shape]``, as what the environment does with them in [-1, 1], ``[N, D]``."""
        return actions.flatten(1).float().tanh()


class DeterministicActor(_Actor):
    """One action for each state, and Gaussian noise of fixed size around it for exploration (Fujimoto et al. 2018).

    exploration: the noise's standard deviation, in halves of the actions' ranges.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: spaces.Box,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        exploration: float = 0.1,
    ) -> None:
        super().__init__(observation_space, action_space, hidden, activation, outputs=1)
        self.distribution = DiagonalGaussian(action_space, squash="clip")
        self.exploration = exploration

    def action(self, observations: Tree) -> Tensor:
        """The action without noise, in [-1, 1], ``[..., D]``."""
        return self.network(observations).tanh()

    def forward(self, observations: Tree) -> Tensor:
        """Distribution parameters ``[..., 2 D]``, in the environment's own units."""
        mean = torch.addcmul(self.middle, self.half_range, self.action(observations))
        # A dimension of no width has no noise; the logarithm of 0 would make its log-probabilities NaN.
        deviation = (self.exploration * self.half_range).clamp(min=math.exp(-DiagonalGaussian.LOG_STD_LIMIT))
        return torch.cat((mean, deviation.log().expand_as(mean)), -1)

    def normalized(self, actions: Tensor) -> Tensor:
        """Actions as stored, ``[N, *action_shape]``, as what the environment does with them in [-1, 1], ``[N, D]``."""
        width = self.half_range.where(self.half_range > 0, 1.0)
        return ((actions.flatten(1).float() - self.middle) / width).clamp(-1.0, 1.0)


class TwinCritic(nn.Module):
    """Two independent estimates of Q(s, a), of which the smaller is believed (Fujimoto et al. 2018)."""

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_size: int, hidden: Sequence[int], activation: str = "relu"
    ) -> None:
        super().__init__()
        module, gain = _ACTIVATIONS[activation]
        self.encoders, self.heads = nn.ModuleList(), nn.ModuleList()
        for _ in range(2):
            encoder, features = _trunk(observation_space, (), activation)
            layers: list[nn.Module] = []
            width = features + action_size
            for units in hidden:
                layers += [_linear(width, units, gain), module()]
                width = units
            self.encoders.append(nn.Sequential(*encoder))
            self.heads.append(nn.Sequential(*layers, _linear(width, 1, gain=1.0)))

    def forward(self, observations: Tree, actions: Tensor) -> Tensor:
        """``[2, N]``; actions ``[N, D]`` in [-1, 1]."""
        both = zip(self.encoders, self.heads, strict=True)
        return torch.stack(
            [head(torch.cat((encoder(observations), actions), -1)).squeeze(-1) for encoder, head in both]
        )
