"""Every action distribution there is, and which one fits an action space."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces

from .discrete import Bernoulli, Categorical, MultiCategorical
from .distribution import Distribution
from .gaussian import DiagonalGaussian

__all__ = ["Bernoulli", "Categorical", "DiagonalGaussian", "Distribution", "MultiCategorical", "distribution_for"]


def distribution_for(action_space: gymnasium.Space[Any]) -> Distribution:
    """The distribution that fits an action space; ``ValueError`` for a space that has none."""
    if isinstance(action_space, spaces.Discrete):
        return Categorical(int(action_space.n), int(action_space.start), action_space.dtype)
    if isinstance(action_space, spaces.MultiDiscrete):
        return MultiCategorical(action_space.nvec, action_space.start, action_space.dtype)
    if isinstance(action_space, spaces.MultiBinary):
        return Bernoulli(action_space.shape, action_space.dtype)
    if isinstance(action_space, spaces.Box):
        return DiagonalGaussian(action_space)
    raise ValueError(
        f"No action distribution for the action space {action_space}: expected Discrete, MultiDiscrete, MultiBinary "
        "or Box. Wrap the environment so that its actions are one of these, or give the policy a `distribution` "
        "attribute of its own (a subclass of clusterenv_hpc.policies.Distribution)."
    )
