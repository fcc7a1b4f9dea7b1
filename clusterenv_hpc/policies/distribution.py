"""Action distributions over one flat parameter array ``[..., P]``.

A distribution object holds the shape of an action space and nothing that changes.  Every method takes the parameters
explicitly, so the same object reads the behaviour policy's numbers off the wire and the learner's off its network.
Leading dimensions are free everywhere; nothing is ever summed or averaged over them.

Sampling is split in two.  :meth:`Distribution.noise` draws all the randomness of a whole rollout at once, and
:meth:`Distribution.sample` turns one step's share of it into actions without touching a generator: the worker's
inner loop makes two small torch calls per step, and a rollout depends on its noise alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Distribution(ABC):
    """A family of action distributions, indexed by flat parameters ``[..., num_params]``.

    num_params: P, the parameters of one state's distribution.
    noise_size: K, the random numbers that one sample needs.
    action_shape, action_dtype: of one stored action, as it travels in a rollout.
    """

    num_params: int
    noise_size: int
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]

    @abstractmethod
    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Draw ``[*shape, noise_size]`` float32: what ``sample`` needs for actions of leading shape ``shape``.

        On the generator's device.
        """

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Actions ``[..., *action_shape]``: a deterministic function of ``params [..., P]`` and ``noise [..., K]``."""

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """The greedy action ``[..., *action_shape]``."""

    @abstractmethod
    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """``log pi(actions)``, ``[...]``: actions ``[..., *action_shape]`` as stored."""

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """Entropy in nats, ``[...]``."""

    @abstractmethod
    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """``KL(p || q)`` in nats per state, ``[...]``; never negative, infinite where p goes where q cannot."""

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once; a subclass overrides this where they share work."""
        return self.log_prob(params, actions), self.entropy(params)

    def env_actions(self, actions: NDArray[Any]) -> NDArray[Any]:
        """What ``env.step`` gets for stored actions ``[..., *action_shape]``: the same array wherever possible."""
        return actions

    def proper(self, params: Tensor) -> Tensor:
        """``[...]`` bool: whether the parameters define a distribution at all."""
        return params.isfinite().all(-1)

    def describe(self) -> str:
        """What ``num_params`` consists of, for error messages."""
        return f"{self.num_params} parameters"


def device_of(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
