"""Batches as TorchRL's collectors give them: an iterator over TensorDicts, or plain dicts where tensordict is missing.

    for batch in batches(envs, frames_per_batch=1024, total_frames=100_000):
        ...                       # advantages, losses, a step of the optimizer
        envs.publish()            # where a collector has update_policy_weights_

Shapes are TorchRL's: ``[N, T]``, the time last, with a last dimension of 1 for rewards and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..cluster_env import ClusterEnv
from ..envs.spaces import map_tree
from ..policies import distribution_of
from ..rollout import Rollout


def batches(envs: ClusterEnv, frames_per_batch: int, total_frames: int = -1) -> Iterator[Any]:
    """Lockstep rollouts of ``frames_per_batch`` steps over all environments, until ``total_frames`` (-1: without end).

    See ``as_batch`` for what one holds.

    Raises:
        ValueError: ``frames_per_batch`` is no multiple of the number of environments, or ``envs`` has no policy.
    """
    steps, rest = divmod(frames_per_batch, envs.num_envs)
    if rest or steps < 1:
        raise ValueError(f"frames_per_batch must be a multiple of num_envs={envs.num_envs}, got {frames_per_batch}")
    given = 0
    while total_frames < 0 or given < total_frames:
        rollout = envs.rollout(steps)
        given += frames_per_batch
        yield as_batch(rollout, envs)


def as_batch(rollout: Rollout, envs: ClusterEnv) -> Any:
    """A rollout as a TensorDict of batch size ``[N, T]`` (a dict of dicts where tensordict is missing), copied.

    Keys: ``observation``, ``action``, ``sample_log_prob`` (of the behaviour policy), ``version``; in ``next``:
    ``observation`` (an episode's final one where it ended), ``reward``, ``done``, ``terminated``, ``truncated``; in
    ``collector``: ``mask``, False where a step is no transition, and belongs into no loss.
    Parts of Tuple observations are named "0", "1", ...
    """
    policy = envs._demand_policy("batches")._policy
    distribution = distribution_of(policy, envs.single_action_space)
    actions, params = torch.from_numpy(rollout.actions.copy()), torch.from_numpy(rollout.behaviour_params.copy())
    with torch.no_grad():
        log_prob = distribution.log_prob(params, actions)
    ended = {"terminated": rollout.terminated, "truncated": rollout.truncated}
    ended["done"] = np.logical_or(rollout.terminated, rollout.truncated)
    content = {
        "observation": _named(map_tree(_rows_first, rollout.observations)),
        "action": _swapped(actions),
        "sample_log_prob": _swapped(log_prob),
        "version": _rows_first(rollout.versions),
        "next": {
            "observation": _named(map_tree(_rows_first, rollout.next_observations)),
            "reward": _rows_first(rollout.rewards.astype(np.float32))[..., None],
            **{name: _rows_first(array)[..., None] for name, array in ended.items()},
        },
        "collector": {"mask": _rows_first(rollout.valid)},
    }
    try:
        from tensordict import TensorDict
    except ModuleNotFoundError:
        return content
    return TensorDict(content, batch_size=[rollout.num_envs, rollout.num_steps])


def _named(tree: Any) -> Any:
    """TensorDicts know no tuples: their parts are named "0", "1", ..."""
    if isinstance(tree, tuple):
        tree = {str(i): part for i, part in enumerate(tree)}
    return {key: _named(part) for key, part in tree.items()} if isinstance(tree, dict) else tree


def _rows_first(array: Any) -> torch.Tensor:
    return _swapped(torch.from_numpy(np.array(array)))


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).contiguous()


__all__ = ["as_batch", "batches"]
