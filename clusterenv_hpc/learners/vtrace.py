"""Actor-critic with V-trace, for rollouts from workers that never wait (IMPALA; Espeholt et al. 2018).

Each pass evaluates the policy as it is now on what a worker did some versions ago, corrects values and advantages for
the difference by truncated importance weights, and follows the policy gradient in minibatches of shuffled steps.  No
ratio is clipped around the behaviour policy, so staleness slows learning down but never stops it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..algorithms import VTraceConfig
from ..policies.protocol import PolicyError, evaluate
from ..rollout import Rollout, Tree
from .base import LearnerBase
from .batches import chunks, select, take
from .optimizer import FlatAdam
from .returns import vtrace


class _Steps(NamedTuple):
    """A rollout's ``M`` valid steps on the training device, and where they stand in it."""

    rows: NDArray[np.int64]
    observations: Tree
    actions: Tensor
    behaviour: Tensor


class _Judged(NamedTuple):
    """What the policy as it is makes of them: value targets and advantages ``[M]``, and figures to tell."""

    targets: Tensor
    advantages: Tensor
    told: Tensor


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
        metrics = {"learning_rate": rate, "gradient_steps": 0.0}
        rows = np.flatnonzero(rollout.valid)
        if not rows.size:
            return metrics
        self._optimizer.start(rate)
        trees = (rollout.observations, rollout.actions, rollout.behaviour_params)
        steps = _Steps(rows, *(take(tree, rows, self.device) for tree in trees))
        parts = min(len(rows), max(1, round(len(rows) / config.minibatch_size)))
        told: list[Tensor] = []
        for _ in range(config.epochs):
            judged = self._judge(rollout, steps)
            order = torch.randperm(len(rows), generator=self.generator).to(self.device)
            for part in order.tensor_split(parts):
                told.append(torch.cat((self._step(steps, judged, part), judged.told)))
                self.meanwhile()
        metrics["gradient_steps"] = float(len(told))
        names = (
            "policy_loss", "value_loss", "entropy", "grad_norm", "importance_mean", "importance_clipped",
            "explained_variance",
        )  # fmt: skip
        means = dict(zip(names, torch.stack(told).mean(0).tolist(), strict=True))
        self.finite(means)
        return metrics | means

    @torch.no_grad()
    def _judge(self, rollout: Rollout, steps: _Steps) -> _Judged:
        """Targets and advantages of all steps, by the policy as it is."""
        config, dist = self.config, self.distribution
        params, values = self._evaluate(steps.observations)
        if params.shape != steps.behaviour.shape or values.shape != (len(steps.rows),):
            raise PolicyError(
                f"{type(self.policy).__name__} returned parameters {tuple(params.shape)} and values "
                f"{tuple(values.shape)} for {len(steps.rows)} observations; expected {tuple(steps.behaviour.shape)}, "
                f"like the behaviour policy's, and {(len(steps.rows),)}."
            )
        self.demand_finite(rollout, steps.rows, values.isfinite() & dist.proper(params))
        # An action that a policy has since masked has log-probability -inf: finite, so that no difference is NaN.
        lowest = torch.finfo(torch.float32).min
        now, then = (dist.log_prob(one, steps.actions).clamp(min=lowest) for one in (params, steps.behaviour))
        log_ratios = now - then
        targets, advantages = self._targets(rollout, steps.rows, log_ratios, values)
        if config.scale_advantages:
            advantages = advantages / (advantages.square().mean().sqrt() + 1e-8)
        spread = targets.var(correction=0)
        told = (
            log_ratios.clamp(max=20.0).exp().mean(),
            (log_ratios.exp() > config.rho_bar).float().mean(),
            torch.where(spread > 0, 1.0 - (values - targets).square().mean() / spread, 0.0),
        )
        return _Judged(targets, advantages, torch.stack(told))

    def _step(self, steps: _Steps, judged: _Judged, part: Tensor) -> Tensor:
        """One gradient step on the steps that ``part`` counts."""
        config = self.config
        advantages = judged.advantages[part]
        params, values = self._forward(select(steps.observations, part))
        log_prob, entropy = self.distribution.log_prob_and_entropy(params, steps.actions[part])
        # Where an action is impossible its weight, and so its advantage, is 0; 0 * -inf must not become NaN.
        surrogate = (torch.where(advantages != 0, log_prob, 0.0) * advantages).mean()
        value_loss = (values - judged.targets[part]).square().mean()
        mean_entropy = entropy.mean()
        norm = self._optimizer.step(config.value_coef * value_loss - surrogate - config.entropy_coef * mean_entropy)
        return torch.stack((-surrogate.detach(), value_loss.detach(), mean_entropy.detach(), norm))

    def _targets(
        self, rollout: Rollout, rows: NDArray[np.int64], log_ratios: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """V-trace on the CPU, where a loop over small rows belongs; both ``[M]`` for the valid steps."""
        config, valid = self.config, rollout.valid
        terminated, truncated = rollout.terminated, rollout.truncated
        there = torch.from_numpy(np.array(valid))
        grid_ratios, grid_values = torch.zeros(valid.shape), torch.zeros(valid.shape)
        grid_ratios[there], grid_values[there] = log_ratios.cpu(), values.cpu()
        # The successor of most steps is the next row's state; only the others need the critic once more.
        next_values = torch.zeros(valid.shape)
        next_values[:-1] = grid_values[1:]
        linked = np.zeros_like(valid)
        linked[:-1] = valid[1:] & ~(terminated | truncated)[:-1]
        ends = np.flatnonzero(valid & ~terminated & ~linked)
        if ends.size:
            _, end_values = self._evaluate(take(rollout.next_observations, ends, self.device))
            next_values.view(-1)[torch.from_numpy(ends)] = end_values.cpu()
        rewards = torch.from_numpy(np.asarray(rollout.rewards * config.reward_scale, np.float32))
        targets, advantages = vtrace(
            grid_ratios, rewards, grid_values, next_values, torch.from_numpy(np.array(terminated)),
            torch.from_numpy(np.array(truncated)), there, config.gamma, config.trace_decay, config.rho_bar,
            config.c_bar,
        )  # fmt: skip
        if not (targets[there].isfinite().all() and advantages[there].isfinite().all()):
            raise FloatingPointError("V-trace is not finite: rewards or final observations hold NaN or infinity.")
        return targets[there].to(self.device), advantages[there].to(self.device)

    def _evaluate(self, observations: Tree) -> tuple[Tensor, Tensor]:
        """Parameters and values of all rows, in chunks that bound the memory of activations."""
        outputs = [self._forward(chunk) for chunk in chunks(observations, max(1024, self.config.minibatch_size))]
        params, values = zip(*outputs, strict=True)
        return torch.cat(params), torch.cat(values)

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
