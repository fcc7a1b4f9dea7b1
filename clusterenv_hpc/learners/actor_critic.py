"""What PPO and V-trace share: one optimizer for a policy with values, and a rollout's steps seen by that policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..policies.protocol import PolicyError, evaluate
from ..rollout import Rollout, Tree
from .base import LearnerBase, Scheduled
from .batches import chunks, take
from .optimizer import FlatAdam


class Settings(Scheduled, Protocol):
    """The settings that :class:`ActorCriticLearner` reads."""

    @property
    def adam_eps(self) -> float: ...
    @property
    def max_grad_norm(self) -> float | None: ...
    @property
    def minibatch_size(self) -> int: ...
    @property
    def reward_scale(self) -> float: ...


@dataclass(frozen=True)
class Steps:
    """A rollout's M valid steps on the training device; ``rows [M]`` counts them as ``[T*N]``."""

    rows: NDArray[np.int64]
    observations: Tree
    actions: Tensor
    behaviour: Tensor


class ActorCriticLearner(LearnerBase):
    """Trains ``policy`` (the protocol of ``clusterenv_hpc.policies.protocol``, with values) in place."""

    TITLE: ClassVar[str]
    """What messages call the algorithm."""

    def __init__(
        self,
        policy: nn.Module,
        config: Settings,
        action_space: gymnasium.Space[Any],
        device: torch.device | str | None,
        seed: int,
    ) -> None:
        super().__init__(policy, config, action_space, device, seed)
        self._settings = config
        trained = (parameter for parameter in policy.parameters() if parameter.requires_grad)
        self._optimizer = FlatAdam(trained, config.learning_rate, config.adam_eps, config.max_grad_norm)

    def steps_of(self, rollout: Rollout, rows: NDArray[np.int64]) -> Steps:
        """The given valid steps of ``rollout``."""
        trees = (rollout.observations, rollout.actions, rollout.behaviour_params)
        return Steps(rows, *(take(tree, rows, self.device) for tree in trees))

    @torch.no_grad()
    def see(self, rollout: Rollout, steps: Steps) -> tuple[Tensor, Tensor]:
        """Parameters ``[M, K]`` and values ``[M]`` of the policy as it is.

        Raises PolicyError for other shapes than the behaviour policy's, FloatingPointError where they are not finite.
        """
        params, values = self.evaluate(steps.observations)
        count = len(steps.rows)
        if params.shape != steps.behaviour.shape or values.shape != (count,):
            raise PolicyError(
                f"{type(self.policy).__name__} returned parameters {tuple(params.shape)} and values "
                f"{tuple(values.shape)} for {count} observations; expected {tuple(steps.behaviour.shape)}, like the "
                f"behaviour policy's, and {(count,)}."
            )
        self.demand_finite(rollout, steps.rows, values.isfinite() & self.distribution.proper(params))
        return params, values

    def log_probs(self, steps: Steps, params: Tensor) -> tuple[Tensor, Tensor]:
        """``[M]`` each: of the actions taken, by ``params`` and by the behaviour policy.

        An action that a policy has since masked has -inf; it is given the lowest finite number, so that no difference
        is NaN.
        """
        lowest = torch.finfo(torch.float32).min
        now, then = (self.distribution.log_prob(one, steps.actions) for one in (params, steps.behaviour))
        return now.clamp(min=lowest), then.clamp(min=lowest)

    def grids(self, rollout: Rollout, steps: Steps, values: Tensor) -> dict[str, Tensor]:
        """What ``returns.gae`` and ``returns.vtrace`` take, by name, ``[T, N]`` on the CPU: a loop over small rows
        belongs there.  Rewards are scaled; whatever stands where no step was is not read."""
        shape, valid = rollout.rewards.shape, rollout.valid
        terminated, truncated = rollout.terminated, rollout.truncated
        flat = torch.zeros(shape[0] * shape[1]).index_copy_(0, torch.from_numpy(steps.rows), values.cpu())
        # The successor of most steps is the next row's state; only the others need the critic once more.
        next_values = torch.zeros(shape)
        next_values[:-1] = flat.view(shape)[1:]
        linked = np.zeros_like(valid)
        linked[:-1] = valid[1:] & ~(terminated | truncated)[:-1]
        ends = np.flatnonzero(valid & ~terminated & ~linked)
        if ends.size:
            _, end_values = self.evaluate(take(rollout.next_observations, ends, self.device))
            next_values.view(-1).index_copy_(0, torch.from_numpy(ends), end_values.cpu())
        with np.errstate(over="ignore"):  # told by at()
            rewards = np.asarray(rollout.rewards * self._settings.reward_scale, np.float32)
        flags = {"terminated": terminated, "truncated": truncated, "valid": valid}
        return {
            "rewards": torch.from_numpy(rewards),
            "values": flat.view(shape),
            "next_values": next_values,
            **{name: torch.from_numpy(np.array(flag, order="C")) for name, flag in flags.items()},
        }

    def at(self, steps: Steps, *grids: Tensor) -> tuple[Tensor, ...]:
        """``[M]`` each, on the training device: the steps' entries of ``[T, N]`` grids.

        Raises FloatingPointError where one of them is not finite.
        """
        rows = torch.from_numpy(steps.rows)
        found = torch.stack([grid.reshape(-1) for grid in grids]).index_select(1, rows).to(self.device)
        if not found.isfinite().all():
            raise FloatingPointError(
                f"{self.TITLE}: advantages are not finite: rewards times "
                f"reward_scale={self._settings.reward_scale:g}, or final observations, hold NaN or infinity."
            )
        return found.unbind(0)

    @torch.no_grad()
    def evaluate(self, observations: Tree) -> tuple[Tensor, Tensor]:
        """Parameters and values of all rows in float32, in chunks that bound the memory of activations."""
        size = max(1024, self._settings.minibatch_size)
        params, values = zip(*(self.forward(chunk) for chunk in chunks(observations, size)), strict=True)
        return torch.cat(params), torch.cat(values)

    def forward(self, observations: Tree) -> tuple[Tensor, Tensor]:
        """Parameters and values of a batch in float32, with gradients."""
        params, values = evaluate(self.policy, observations)
        if values is None:
            raise PolicyError(
                f"{self.TITLE} needs state values, but {type(self.policy).__name__} has neither value(observations) "
                "nor forward_and_value(observations)."
            )
        return params.float(), values.float()

    def state_dict(self) -> dict[str, Any]:
        """Policy, optimizer and generator: plain tensors, numbers and containers of them; a snapshot."""
        return {**super().state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state_dict`` was taken."""
        super().load_state_dict(state)
        self._optimizer.load_state_dict(state["optimizer"])
