"""The policy gradient of fixed-length trajectories, all environments of a worker at once.

The estimator (REINFORCE with causality, also called GPOMDP; Williams 1992, Baxter and Bartlett 2001), per trajectory:

    g_H(tau, theta) = sum_{t<H} ( sum_{h=t}^{H-1} gamma^h r_h - b_t ) grad log pi_theta(a_t | s_t)

The discount counts from the trajectory's own start, so that E[g_H] is exactly the gradient of E[sum_h gamma^h r_h].

A work unit is always H steps long, whatever happens in it.  If units ended with their episodes, the first M gradients
to arrive would favour short episodes, and the aggregate would be biased.  Two ways to fill H steps are served:

``reset``: an episode that ends is followed by another in the same trajectory, as though resetting were part of the
environment's dynamics.  The objective is the discounted reward of H steps of that process, over all its episodes, and
an action answers for what comes after a reset too: it has a part in when that happens.
``absorb``: an episode that ends stays ended.  What follows has reward zero and no gradient; the objective is the
discounted return of one episode, cut at H.  The steps are made all the same, since they are what takes the time.

Steps that only reset (Gymnasium's ``NEXT_STEP`` mode) take their place in time, with reward zero and no gradient: the
action there is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from clusterenv_hpc.gradients.checks import one_of, positive_int, unit_fraction
from clusterenv_hpc.policies import Distribution, acting_parameters, as_tensors
from clusterenv_hpc.rollout import Tree

ENDINGS = ("reset", "absorb")
BASELINES = ("none", "leave_one_out")


@dataclass(frozen=True)
class Trajectories:
    """``N`` work units of ``H`` steps.

    observations: tree of ``[H, N, ...]``.  actions: ``[H, N, ...]``, as drawn.  rewards: ``[H, N]`` float64.
    mask: ``[H, N]`` bool; False where there was no action to answer for.  The first step is always True.
    """

    observations: Tree
    actions: NDArray[Any]
    rewards: NDArray[np.float64]
    mask: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if self.rewards.ndim != 2 or not self.rewards.size:
            raise ValueError(f"rewards must be [H, N] with H and N of at least 1, got shape {self.rewards.shape}")
        shape = self.rewards.shape
        if self.mask.shape != shape or self.actions.shape[:2] != shape:
            raise ValueError(
                f"mask and actions must begin with {shape} as rewards do, got {self.mask.shape}, {self.actions.shape}"
            )
        if not self.mask[0].all():
            raise ValueError("the first step of a trajectory must be an action, but mask[0] is not all True")

    @property
    def horizon(self) -> int:
        """H."""
        return int(self.rewards.shape[0])

    def __len__(self) -> int:
        return int(self.rewards.shape[1])


def trajectories(
    observations: Tree,
    actions: NDArray[Any],
    rewards: NDArray[np.float64],
    ended: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    ending: str,
) -> Trajectories:
    """Work units from ``H`` recorded steps that began with a reset.

    ended: ``[H, N]`` terminated or truncated.  valid: ``[H, N]``, False on reset-only steps.  ending: see the module.
    """
    one_of("ending", ending, ENDINGS)
    mask = np.array(valid, dtype=bool)
    if ending == "absorb":
        mask[1:] &= ~np.logical_or.accumulate(ended, axis=0)[:-1]
    return Trajectories(observations, actions, np.where(mask, rewards, 0.0).astype(np.float64), mask)


def returns_to_go(rewards: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """``[H, N]`` sum_{h>=t} gamma^h r_h; the discount counts from step 0, not from t."""
    unit_fraction("gamma", gamma)
    discount = gamma ** np.arange(len(rewards), dtype=np.float64)
    return np.cumsum((discount[:, None] * rewards)[::-1], axis=0)[::-1]


def advantages(units: Trajectories, gamma: float, baseline: str | ArrayLike = "none") -> NDArray[np.float64]:
    """``[H, N]`` the factor of each grad log pi, zero where the mask is False.

    baseline: ``none``; ``leave_one_out``, at each step the mean over the *other* trajectories, which leaves the
    estimator unbiased; or ``[H, N]`` (or what broadcasts to it) values of one's own that do not depend on the action,
    in the units of sum_{h>=t} gamma^h r_h.
    """
    to_go = returns_to_go(units.rewards, gamma)
    if isinstance(baseline, str):
        one_of("baseline", baseline, BASELINES)
        if baseline == "leave_one_out":
            if len(units) < 2:
                raise ValueError("baseline=leave_one_out needs at least 2 trajectories at once, got 1")
            to_go = (to_go - to_go.mean(axis=1, keepdims=True)) * (len(units) / (len(units) - 1))
    else:
        to_go = to_go - np.asarray(baseline, dtype=np.float64)
    return np.where(units.mask, to_go, 0.0)


def summed_gradient(
    policy: nn.Module,
    distribution: Distribution,
    units: Trajectories,
    gamma: float,
    *,
    baseline: str | ArrayLike = "none",
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """``[P]`` float32 sum over the trajectories of g_H, in one backward pass; P as ``flat_weights`` lays them out.

    Parameters that take no gradient (buffers, frozen layers) have zeros.  ``out``: written to and returned.
    """
    weights = advantages(units, gamma, baseline)
    rows = np.flatnonzero(units.mask)  # steps without an action could hold anything, even NaN: leave them out
    device = _device(policy)
    observations = as_tensors(_map(units.observations, lambda x: _rows(x, rows)), device)
    actions = as_tensors(_rows(units.actions, rows), device)
    factors = torch.as_tensor(weights.reshape(-1)[rows], device=device)
    tensors = acting_parameters(policy)
    learned = [tensor for tensor in tensors if tensor.requires_grad]
    with torch.enable_grad():
        log_probs = distribution.log_prob(policy(observations), actions)
        loss = torch.dot(factors.to(log_probs.dtype), log_probs)
        parts = torch.autograd.grad(loss, learned, allow_unused=True) if learned else ()
    return _flatten(tensors, dict(zip(map(id, learned), parts, strict=True)), out)


def trajectory_gradients(
    policy: nn.Module,
    distribution: Distribution,
    units: Trajectories,
    gamma: float,
    *,
    baseline: str | ArrayLike = "none",
) -> NDArray[np.float32]:
    """``[N, P]`` float32, every trajectory's own g_H at once (``torch.func.vmap``); their sum is ``summed_gradient``.

    The policy must be one that ``vmap`` can map (no control flow on the data, no state written in ``forward``).
    """
    weights = advantages(units, gamma, baseline)
    # vmap wants equal lengths: steps without an action are replaced by the trajectory's first one, with factor zero.
    steps = np.where(units.mask, np.arange(units.horizon)[:, None], 0)
    device = _device(policy)
    observations = as_tensors(_map(units.observations, lambda x: _steps(x, steps)), device)
    actions = as_tensors(_steps(units.actions, steps), device)
    factors = torch.as_tensor(weights, device=device)
    tensors = acting_parameters(policy)
    names = {id(tensor): name for name, tensor in policy.named_parameters()}
    learned = {names[id(tensor)]: tensor.detach() for tensor in tensors if tensor.requires_grad}

    def surrogate(parameters: dict[str, Tensor], seen: Tree, acted: Tensor, factor: Tensor) -> Tensor:
        log_probs = distribution.log_prob(torch.func.functional_call(policy, parameters, (seen,)), acted)
        return torch.dot(factor.to(log_probs.dtype), log_probs)

    each = torch.func.vmap(torch.func.grad(surrogate), in_dims=(None, 1, 1, 1), randomness="error")
    gradients = each(learned, observations, actions, factors)
    by_tensor = {id(tensor): gradients.get(names.get(id(tensor), "")) for tensor in tensors}
    count = len(units)
    flat = np.zeros((count, sum(tensor.numel() for tensor in tensors)), dtype=np.float32)
    start = 0
    for tensor in tensors:
        part = by_tensor[id(tensor)]
        if part is not None:
            flat[:, start : start + tensor.numel()] = part.reshape(count, -1).cpu().numpy()
        start += tensor.numel()
    return flat


class Sampler:
    """Collects work units from a worker's vector environment into buffers of its own, used again for every unit.

    envs: a ``gymnasium.vector.VectorEnv`` in autoreset mode ``NEXT_STEP`` or ``SAME_STEP``; N is its ``num_envs``.
    horizon: H.  ending: ``reset`` or ``absorb``.  seed: of the environments' first reset; later ones go on from there.
    """

    def __init__(
        self, envs: Any, distribution: Distribution, horizon: int, *, ending: str = "absorb", seed: int | None = None
    ) -> None:
        self.horizon = positive_int("horizon", horizon)
        self.ending = one_of("ending", ending, ENDINGS)
        mode = envs.metadata.get("autoreset_mode")
        self._resets_within = str(getattr(mode, "value", mode)).lower().replace("_", "") == "samestep"
        if str(getattr(mode, "value", mode)).lower().replace("_", "") == "disabled":
            raise ValueError("the environments must reset by themselves: autoreset mode NEXT_STEP or SAME_STEP")
        self.envs, self.distribution, self._seed = envs, distribution, seed
        shape = (self.horizon, envs.num_envs)
        self._actions = np.zeros((*shape, *distribution.action_shape), dtype=distribution.action_dtype)
        self._rewards, self._ended, self._valid = np.zeros(shape), np.zeros(shape, bool), np.ones(shape, bool)
        self._observations: Tree = None

    def collect(
        self,
        policy: nn.Module,
        generator: torch.Generator | None = None,
        keep_going: Callable[[], bool] = lambda: True,
        seed: int | None = None,
    ) -> Trajectories | None:
        """``N`` fresh trajectories of exactly H steps, valid until the next call.

        None as soon as ``keep_going()``, which is asked before every step, says no.  seed: of the environments' reset;
        None: their random numbers go on.
        """
        observations, _ = self.envs.reset(seed=self._seed if seed is None else seed)
        self._seed = None
        if self._observations is None:
            self._observations = _map(
                observations, lambda x: np.zeros((self.horizon, *np.shape(x)), np.asarray(x).dtype)
            )
        device = _device(policy)
        noise = self.distribution.noise((self.horizon, self.envs.num_envs), generator)
        just_ended = np.zeros(self.envs.num_envs, dtype=bool)
        with torch.inference_mode():
            for step in range(self.horizon):
                if not keep_going():
                    return None
                _store(self._observations, observations, step)
                params = policy(as_tensors(_at(self._observations, step), device))
                actions = self.distribution.sample(params.cpu(), noise[step]).numpy()
                self._actions[step] = actions
                observations, rewards, terminated, truncated, _ = self.envs.step(self.distribution.env_actions(actions))
                self._valid[step] = True if self._resets_within else ~just_ended
                self._rewards[step] = rewards
                just_ended = np.logical_or(terminated, truncated)
                self._ended[step] = just_ended
        return trajectories(self._observations, self._actions, self._rewards, self._ended, self._valid, self.ending)

    def first_episodes(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """``[N]`` undiscounted returns and lengths of the last units' first episodes, cut at H if not ended by then."""
        before = np.logical_or.accumulate(self._ended, axis=0)
        first = np.ones_like(self._ended)
        first[1:] = ~before[:-1]
        return np.where(first, self._rewards, 0.0).sum(axis=0), first.sum(axis=0)

    @property
    def env_steps(self) -> int:
        """Environment steps of the last units, without those that only reset."""
        return int(np.count_nonzero(self._valid))


def _device(policy: nn.Module) -> torch.device:
    return next((tensor.device for tensor in policy.parameters()), torch.device("cpu"))


def _map(tree: Tree, function: Callable[[Any], Any]) -> Tree:
    if isinstance(tree, dict):
        return {key: _map(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_map(value, function) for value in tree)
    return function(tree)


def _at(buffers: Tree, step: int) -> Tree:
    return _map(buffers, lambda x: x[step])


def _store(buffers: Tree, values: Tree, step: int) -> None:
    if isinstance(buffers, dict):
        for key, buffer in buffers.items():
            _store(buffer, values[key], step)
    elif isinstance(buffers, tuple):
        for buffer, value in zip(buffers, values, strict=True):
            _store(buffer, value, step)
    else:
        buffers[step] = values


def _rows(array: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
    return array.reshape((-1, *array.shape[2:]))[rows]


def _steps(array: NDArray[Any], steps: NDArray[np.intp]) -> NDArray[Any]:
    return array[steps, np.arange(steps.shape[1])]


def _flatten(
    tensors: list[Tensor], parts: dict[int, Tensor | None], out: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    size = sum(tensor.numel() for tensor in tensors)
    flat = np.empty(size, dtype=np.float32) if out is None else out
    if flat.shape != (size,):
        raise ValueError(f"out must have shape ({size},), one entry per acting parameter, got {flat.shape}")
    start = 0
    for tensor in tensors:
        part = parts.get(id(tensor))
        flat[start : start + tensor.numel()] = 0.0 if part is None else part.reshape(-1).cpu().numpy()
        start += tensor.numel()
    return flat
