"""Advantages and value targets from rewards; pure functions on ``[T, N]`` arrays, looping over T only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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


def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    trace_decay: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace value targets and policy-gradient advantages (Espeholt et al. 2018, section 4.1), both ``[T, N]``.

    log_ratios: log of (target / behaviour policy's probability of the action taken).
    The other arrays: as for :func:`gae`, with the same meaning of ends and of steps that were none.

        rho_t = min(rho_bar, ratio_t),  c_t = trace_decay min(c_bar, ratio_t)
        target_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (target_{t+1} - V_{t+1})
        advantage_t = rho_t (r_t + gamma target_{t+1} - V_t)

    V_{t+1} is ``next_values[t]``, and nothing where the episode terminated; beyond an end, or the last step,
    target_{t+1} is V_{t+1}.  With both policies alike and no truncation of weights, targets are n-step returns.
    Steps that were none get target ``values`` and advantage 0.
    """
    # An action that the target policy cannot take has ratio 0, and one that says it is impossible must not be NaN.
    ratios = torch.where(valid, log_ratios, 0.0).clamp(max=20.0).exp()
    rho, c = ratios.clamp(max=rho_bar), trace_decay * ratios.clamp(max=c_bar)
    following = torch.where(terminated, 0.0, next_values)  # where, not a product: 0 * NaN is NaN
    errors = torch.where(valid, rho * (rewards + gamma * following - values), 0.0)
    linked = (valid & ~(terminated | truncated))[:-1]
    decay = torch.where(linked, gamma * c[:-1], 0.0)
    beyond = errors  # becomes target - V
    for t in range(len(errors) - 2, -1, -1):
        beyond[t].addcmul_(decay[t], beyond[t + 1])
    # An invalid successor's correction is 0 already.
    correction = torch.zeros_like(beyond)
    correction[:-1] = torch.where(linked, beyond[1:], 0.0)
    advantages = torch.where(valid, rho * (rewards + gamma * (following + correction) - values), 0.0)
    return values + beyond, advantages


def n_step(
    rewards: NDArray[Any],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    gamma: float,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """The discounted sum of rewards from the first step of each window; windows ``[n, ...]`` along the first axis.

    Returns ``(returns, lengths, terminal)``, each ``[...]``.  A window is summed up to the end of an episode, and not
    into a step that is not valid; ``lengths`` says how many rewards that were (0 where the first step is not valid).
    The bootstrap is the value of the state after so many steps, weighted by gamma ** length, unless ``terminal``:
    a truncated episode is bootstrapped from its final observation, a terminated one from nothing.
    """
    returns = np.zeros(rewards.shape[1:], np.float32)
    lengths = np.zeros(rewards.shape[1:], np.int64)
    terminal = np.zeros(rewards.shape[1:], np.bool_)
    going = np.ones(rewards.shape[1:], np.bool_)
    for k in range(len(rewards)):
        going = going & valid[k]
        returns += np.where(going, np.float32(gamma**k) * rewards[k], np.float32(0.0))
        lengths += going
        terminal |= going & terminated[k]
        going = going & ~(terminated[k] | truncated[k])
    return returns, lengths, terminal
