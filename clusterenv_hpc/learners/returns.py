"""Advantages and value targets from rewards; pure functions on ``[T, N]`` tensors, looping over T only."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and value targets (Schulman et al. 2016, equation 16), both ``[T, N]``.

    rewards, values, next_values: floating point; ``next_values[t]`` is the value of step t's true successor, which
        where an episode ended is the final observation, not the next episode's first.
    terminated: nothing follows, no bootstrap (it wins where truncated is set as well).
    truncated: the episode was cut short: bootstrap from the successor's value, but sum no later deltas.
    valid: False marks steps that were none.  They get advantage 0 and target ``values``, no delta passes through
        them, and whatever else they hold, NaN included, touches nothing.
    targets: advantages + values, the TD(lambda) returns.
    """
    bootstrap = torch.where(terminated, 0.0, gamma * next_values)  # where, not a product: 0 * NaN is NaN
    deltas = torch.where(valid, rewards + bootstrap - values, 0.0)
    # An invalid successor's advantage is 0 already, so only the step itself decides whether it looks on.
    linked = (valid & ~(terminated | truncated))[:-1]
    decay = (gamma * lam) * linked.to(deltas.dtype)
    advantages = deltas
    for t in range(advantages.shape[0] - 2, -1, -1):
        advantages[t].addcmul_(decay[t], advantages[t + 1])
    return advantages, advantages + values
