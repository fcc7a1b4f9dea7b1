"""What a user's ``torch.nn.Module`` must offer to act and learn here, and how that is checked.

A policy is a module with

    forward(observations) -> [N, P]         the flat parameters of one action distribution per row

and, all optional,

    value(observations) -> [N]                        state values; a learner with a critic needs them
    forward_and_value(observations) -> ([N, P], [N])  both at once, where they share layers
    distribution                                      attribute; default: ``distribution_for(action_space)``
    acting_parameters() -> iterable of tensors        what a worker needs to act; default: every parameter and every
                                                      floating-point buffer.  Leave the critic out: less travels.
    for_worker(index, count)                          called once on each worker's own copy, index from 0: workers may
                                                      explore differently

``observations`` is a tree of tensors ``[N, ...]``: a tensor for a plain space, a dict or tuple of trees for a nested
one, each in its space's own dtype (so uint8 images arrive as uint8).  N varies from call to call.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from .distributions import Distribution, distribution_for

Tree = Any


class PolicyError(ValueError):
    """A policy module that does not fit the protocol or the spaces; the message says what would."""


def as_tensors(tree: Tree, device: torch.device | str | None = None) -> Tree:
    """A NumPy tree as a tensor tree of the same structure; shares memory where the arrays and the device allow it.

    Lists become tuples.  Tensors pass through.  Arrays that torch cannot view (read-only, negative strides, foreign
    byte order) are copied.
    """
    if isinstance(tree, dict):
        return {key: as_tensors(value, device) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(as_tensors(value, device) for value in tree)
    if isinstance(tree, Tensor):
        return tree if device is None else tree.to(device)
    array = np.asarray(tree)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor if device is None else tensor.to(device, non_blocking=True)


def distribution_of(policy: nn.Module, action_space: gymnasium.Space[Any]) -> Distribution:
    """The policy's own ``distribution`` if it has one, else the one that fits the action space."""
    distribution = getattr(policy, "distribution", None)
    if distribution is None:
        return distribution_for(action_space)
    if not isinstance(distribution, Distribution):
        raise PolicyError(
            f"{_name(policy)}.distribution is a {type(distribution).__name__}; expected an instance of "
            "clusterenv_hpc.policies.Distribution, or no such attribute (then the action space decides)."
        )
    if tuple(distribution.action_shape) != tuple(action_space.shape or ()):
        raise PolicyError(
            f"{_name(policy)}.distribution makes actions of shape {tuple(distribution.action_shape)}, but the action "
            f"space {action_space} has actions of shape {action_space.shape}."
        )
    return distribution


def evaluate(policy: nn.Module, observations: Tree) -> tuple[Tensor, Tensor | None]:
    """``(params [N, P], values [N])`` in as few passes as the policy allows; values are None if it has no critic."""
    together = getattr(policy, "forward_and_value", None)
    if together is not None:
        params, values = together(observations)
        return params, values
    value = getattr(policy, "value", None)
    return policy(observations), None if value is None else value(observations)


def acting_parameters(policy: nn.Module) -> list[Tensor]:
    """The tensors a worker needs to act, each once, in a fixed order."""
    chosen = getattr(policy, "acting_parameters", None)
    if chosen is not None:
        tensors = list(chosen())
    else:
        tensors = [*policy.parameters(), *(buffer for buffer in policy.buffers() if buffer.is_floating_point())]
    return list({id(tensor): tensor for tensor in tensors}.values())


def check_policy(
    policy: nn.Module, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> Distribution:
    """Run the policy on three made-up observations; return its distribution, or raise ``PolicyError``.

    Leaves the module's training mode and every global random state as they were, and draws nothing from the spaces.
    """
    if not isinstance(policy, nn.Module):
        hint = " (the class itself; pass an instance)" if isinstance(policy, type) else ""
        raise PolicyError(f"The policy is a {type(policy).__name__}{hint}; expected a torch.nn.Module.")
    distribution = distribution_of(policy, action_space)
    rows = 3
    device = next((tensor.device for tensor in policy.parameters()), torch.device("cpu"))
    observations = as_tensors(_sample_batch(observation_space, rows), device)
    given = copy.deepcopy(observations)
    with _untouched(policy), torch.no_grad():
        try:
            params, values = evaluate(policy, observations)
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(
                f"{_name(policy)} failed on a batch of {rows} observations ({_shapes(observations)}) of the space "
                f"{observation_space}: {type(error).__name__}: {error}"
            ) from error
    if not _equal(observations, given):
        raise PolicyError(
            f"{_name(policy)} changes its observations in place; they are the ones that are kept and sent. Work on a "
            "copy: x = x / 255 instead of x /= 255."
        )
    _check_params(policy, params, distribution, rows, action_space)
    if values is not None:
        _check_output(policy, "value", values, (rows,), "one value per row; squeeze a trailing 1 with .squeeze(-1)")
        if not values.isfinite().all():
            raise PolicyError(f"{_name(policy)}: value(observations) contains NaN or infinite numbers.")
    return distribution


def _check_params(
    policy: nn.Module, params: Any, distribution: Distribution, rows: int, action_space: gymnasium.Space[Any]
) -> None:
    fitting = (
        f"the action space {action_space} takes {distribution.describe()}; a fitting last layer is "
        f"torch.nn.Linear(features, {distribution.num_params})"
    )
    _check_output(policy, "forward", params, (rows, distribution.num_params), fitting)
    if not distribution.proper(params).all():
        raise PolicyError(
            f"{_name(policy)}: forward(observations) contains numbers that make no action distribution (NaN, or "
            f"infinite): {fitting}."
        )


def _check_output(policy: nn.Module, method: str, output: Any, shape: tuple[int, ...], fitting: str) -> None:
    where = f"{_name(policy)}: {method}(observations)"
    if not isinstance(output, Tensor):
        raise PolicyError(f"{where} returned a {type(output).__name__}; expected a tensor of shape {shape}: {fitting}.")
    if tuple(output.shape) != shape:
        raise PolicyError(
            f"{where} returned shape {tuple(output.shape)} for {shape[0]} observations; expected {shape}: {fitting}."
        )
    if not output.is_floating_point():
        raise PolicyError(f"{where} returned {output.dtype}; expected a floating-point tensor: {fitting}.")


def _equal(one: Tree, other: Tree) -> bool:
    """Whether two trees of the same structure hold the same numbers."""
    if isinstance(one, dict):
        return all(_equal(part, other[key]) for key, part in one.items())
    if isinstance(one, tuple):
        return all(map(_equal, one, other))
    return bool(torch.equal(one, other))


def _name(policy: nn.Module) -> str:
    return type(policy).__name__


def _shapes(tree: Tree) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {_shapes(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, tuple):
        return "(" + ", ".join(map(_shapes, tree)) + ")"
    return f"{tuple(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"


def _sample_batch(space: gymnasium.Space[Any], rows: int) -> Tree:
    """``rows`` made-up observations, stacked: zeros are too kind to a module that divides, so they are sampled."""
    own = copy.deepcopy(space)  # sampling would advance the caller's space
    own.seed(0)
    return _stack(own, [own.sample() for _ in range(rows)])


def _stack(space: gymnasium.Space[Any], items: list[Any]) -> Tree:
    if isinstance(space, spaces.Dict):
        return {key: _stack(part, [item[key] for item in items]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_stack(part, [item[i] for item in items]) for i, part in enumerate(space.spaces))
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return np.stack([np.asarray(item, dtype=space.dtype) for item in items])
    raise PolicyError(
        f"Observations of the space {space} have no fixed array form; expected Box, Discrete, MultiDiscrete, "
        "MultiBinary, or Dict and Tuple of these. Wrap the environment so that they have."
    )


@contextmanager
def _untouched(policy: nn.Module) -> Iterator[None]:
    """Evaluate in eval mode (batch statistics stay), then put back modes and random states."""
    training = [module for module in policy.modules() if module.training]
    python, numpy = random.getstate(), np.random.get_state()
    devices = {tensor.device for tensor in policy.parameters() if tensor.device.type == "cuda"}
    try:
        policy.eval()
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module in training:
            module.training = True
        random.setstate(python)
        np.random.set_state(numpy)
