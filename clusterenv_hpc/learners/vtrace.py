"""Actor-critic with V-trace, for rollouts from workers that never wait (IMPALA; Espeholt et al. 2018).

Each gradient step evaluates the policy as it is now on what a worker did some versions ago, corrects values and
advantages for the difference by truncated importance weights, and follows the policy gradient.  No ratio is clipped
around the behaviour policy, so staleness slows learning down but never stops it.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..algorithms import VTraceConfig
from ..policies.protocol import PolicyError, evaluate
from ..rollout import Rollout, Tree
from .base import LearnerBase
from .batches import take
from .optimizer import FlatAdam
from .returns import vtrace


class VTrace(LearnerBase):
    """Trains ``policy`` (the protocol of ``clusterenv_hpc.policies.protocol``, with values) in place."""

    def __init__(
        self,
        policy: nn.Module,
        config: VTraceConfig,
        action_space: gymnasium.Space[Any],
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, config, action_space, device, seed)
        self.config = config
        trained = (parameter for parameter in policy.parameters() if parameter.requires_grad)
        self._optimizer = FlatAdam(trained, config.learning_rate, config.adam_eps, config.max_grad_norm)

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """``epochs`` passes over the rollout's valid steps; metrics are means over the gradient steps.

        A rollout without a valid step changes nothing.  Raises ``FloatingPointError`` when numbers stop being finite.
        """
        config = self.config
        rate = self.rate(progress)
        self._optimizer.start(rate)
        parts = max(1, round(rollout.env_steps / config.minibatch_size))
        steps: list[Tensor] = []
        for _ in range(config.epochs):
            order = torch.randperm(rollout.num_envs, generator=self.generator)
            for columns in order.tensor_split(min(parts, rollout.num_envs)):
                step = self._step(rollout, columns.sort().values.numpy())
                if step is not None:
                    steps.append(step)
                    self.meanwhile()
        metrics = {"learning_rate": rate, "gradient_steps": float(len(steps))}
        if not steps:
            return metrics
        names = (
            "policy_loss", "value_loss", "entropy", "grad_norm", "importance_mean", "importance_clipped",
            "explained_variance",
        )  # fmt: skip
        means = dict(zip(names, torch.stack(steps).mean(0).tolist(), strict=True))
        self.finite(means)
        return metrics | means

    def _step(self, rollout: Rollout, columns: NDArray[np.int64]) -> Tensor | None:
        """One gradient step on the valid steps of some environments; None if they have none."""
        config, dist = self.config, self.distribution
        valid = rollout.valid[:, columns]
        steps, envs = np.nonzero(valid)
        if not steps.size:
            return None
        rows = steps * rollout.num_envs + columns[envs]
        params, values = self._forward(take(rollout.observations, rows, self.device))
        behaviour = take(rollout.behaviour_params, rows, self.device)
        if params.shape != behaviour.shape or values.shape != (len(rows),):
            raise PolicyError(
                f"{type(self.policy).__name__} returned parameters {tuple(params.shape)} and values "
                f"{tuple(values.shape)} for {len(rows)} observations; expected {tuple(behaviour.shape)}, like the "
                f"behaviour policy's, and {(len(rows),)}."
            )
        self.demand_finite(rollout, rows, values.detach().isfinite() & dist.proper(params.detach()))
        actions = take(rollout.actions, rows, self.device)
        log_prob, entropy = dist.log_prob_and_entropy(params, actions)
        # An action that a policy has since masked has log-probability -inf: finite, so that no difference is NaN.
        lowest = torch.finfo(torch.float32).min
        log_ratios = log_prob.detach().clamp(min=lowest) - dist.log_prob(behaviour, actions).clamp(min=lowest)
        targets, advantages = self._targets(rollout, columns, valid, log_ratios, values.detach())
        if config.scale_advantages:
            advantages = advantages / (advantages.square().mean().sqrt() + 1e-8)
        # Where an action is impossible its weight, and so its advantage, is 0; 0 * -inf must not become NaN.
        surrogate = (torch.where(advantages != 0, log_prob, 0.0) * advantages).mean()
        value_loss = (values - targets).square().mean()
        mean_entropy = entropy.mean()
        norm = self._optimizer.step(config.value_coef * value_loss - surrogate - config.entropy_coef * mean_entropy)
        spread = targets.var(correction=0)
        explained = torch.where(spread > 0, 1.0 - value_loss.detach() / spread, 0.0)
        return torch.stack(
            (
                -surrogate.detach(),
                value_loss.detach(),
                mean_entropy.detach(),
                norm,
                log_ratios.clamp(max=20.0).exp().mean(),
                (log_ratios.exp() > config.rho_bar).float().mean(),
                explained,
            )
        )

    def _targets(
        self, rollout: Rollout, columns: NDArray[np.int64], valid: NDArray[np.bool_], log_ratios: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """V-trace on the CPU, where a loop over small rows belongs; both ``[M]`` for the valid steps."""
        config = self.config
        terminated, truncated = rollout.terminated[:, columns], rollout.truncated[:, columns]
        there = torch.from_numpy(valid)
        grid_ratios, grid_values = torch.zeros(valid.shape), torch.zeros(valid.shape)
        grid_ratios[there], grid_values[there] = log_ratios.cpu(), values.cpu()
        # The successor of most steps is the next row's state; only the others need the critic once more.
        next_values = torch.zeros(valid.shape)
        next_values[:-1] = grid_values[1:]
        linked = np.zeros_like(valid)
        linked[:-1] = valid[1:] & ~(terminated | truncated)[:-1]
        steps, envs = np.nonzero(valid & ~terminated & ~linked)
        if steps.size:
            ends = take(rollout.next_observations, steps * rollout.num_envs + columns[envs], self.device)
            with torch.no_grad():
                next_values[steps, envs] = self._forward(ends)[1].cpu()
        rewards = torch.from_numpy(np.asarray(rollout.rewards[:, columns] * config.reward_scale, np.float32))
        targets, advantages = vtrace(
            grid_ratios, rewards, grid_values, next_values, torch.from_numpy(terminated), torch.from_numpy(truncated),
            there, config.gamma, config.trace_decay, config.rho_bar, config.c_bar,
        )  # fmt: skip
        if not (targets[there].isfinite().all() and advantages.isfinite().all()):
            raise FloatingPointError("V-trace is not finite: rewards or final observations hold NaN or infinity.")
        return targets[there].to(self.device), advantages[there].to(self.device)

    def _forward(self, observations: Tree) -> tuple[Tensor, Tensor]:
        params, values = evaluate(self.policy, observations)
        if values is None:
            raise PolicyError(
                f"V-trace needs state values, but {type(self.policy).__name__} has neither value(observations) nor "
                "forward_and_value(observations)."
            )
        return params.float(), values.float()

    def state_dict(self) -> dict[str, Any]:
        """Policy, optimizer and generator: plain tensors, numbers and containers of them."""
        return {**super().state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state_dict`` was taken."""
        super().load_state_dict(state)
        self._optimizer.load_state_dict(state["optimizer"])
