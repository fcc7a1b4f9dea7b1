"""A small policy for any space: one fixed random linear layer over all numbers of an observation."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv_hpc.envs.spaces import leaves
from clusterenv_hpc.policies import distribution_for


class Linear(nn.Module):
    """``params = W x + b`` with x all leaves of the observation, squashed; built alike on every rank.

    scale: of the weights; 0 makes it ignore what it sees.
    """

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any], scale: float = 1.0) -> None:
        super().__init__()
        self.space = observation_space
        features = sum(int(torch.Size(leaf.shape).numel()) for leaf in leaves(observation_space))
        distribution = distribution_for(action_space)
        generator = torch.Generator().manual_seed(5)
        weights = torch.randn(distribution.num_params, features, generator=generator) * scale / features**0.5
        self.weight, self.bias = nn.Parameter(weights), nn.Parameter(torch.zeros(distribution.num_params))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, observations: Any) -> Tensor:
        flat = [torch.as_tensor(leaf) for leaf in split_tensors(self.space, observations)]
        n = flat[0].shape[0]
        x = torch.cat([leaf.reshape(n, -1).to(torch.float32) for leaf in flat], dim=1)
        return torch.nn.functional.linear(torch.tanh(x), self.weight, self.bias)

    def shift(self, amount: float) -> None:
        """Move the first distribution parameter: a known divergence."""
        with torch.no_grad():
            self.bias[0] += amount


def split_tensors(space: gym.Space[Any], value: Any) -> list[Tensor]:
    """The leaves of a tree of tensors."""
    if isinstance(space, gym.spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in split_tensors(part, value[key])]
    if isinstance(space, gym.spaces.Tuple):
        return [leaf for part, item in zip(space.spaces, value, strict=True) for leaf in split_tensors(part, item)]
    assert isinstance(value, Tensor)
    return [value]
