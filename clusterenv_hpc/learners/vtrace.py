"""Actor-critic with V-trace, for rollouts from workers that never wait (IMPALA; Espeholt et al. 2018).

Each pass evaluates the policy as it is now on what a worker did some versions ago, corrects values and advantages for
the difference by truncated importance weights, and follows the policy gradient in minibatches of shuffled steps.  No
ratio is clipped around the behaviour policy, so staleness slows learning down but never stops it.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms import VTraceConfig
from ..rollout import Rollout
from .actor_critic import ActorCriticLearner, Steps
from .batches import select
from .returns import vtrace


class _Judged(NamedTuple):
    """What the policy as it is makes of them: value targets and advantages ``[M]``, and figures to tell."""

    targets: Tensor
    advantages: Tensor
    told: Tensor


class VTrace(ActorCriticLearner):
    """Trains ``policy`` (the protocol of ``clusterenv_hpc.policies.protocol``, with values) in place."""

    TITLE: ClassVar[str] = "V-trace"

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
        steps = self.steps_of(rollout, rows)
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
    def _judge(self, rollout: Rollout, steps: Steps) -> _Judged:
        """Targets and advantages of all steps, by the policy as it is."""
        config = self.config
        params, values = self.see(rollout, steps)
        now, then = self.log_probs(steps, params)
        log_ratios = now - then
        grids = self.grids(rollout, steps, values)
        grid_ratios = torch.zeros(grids["valid"].shape)
        grid_ratios.view(-1).index_copy_(0, torch.from_numpy(steps.rows), log_ratios.cpu())
        targets, advantages = self.at(
            steps,
            *vtrace(
                grid_ratios, **grids, gamma=config.gamma, trace_decay=config.trace_decay, rho_bar=config.rho_bar,
                c_bar=config.c_bar,
            ),
        )  # fmt: skip
        if config.scale_advantages:
            advantages = advantages / (advantages.square().mean().sqrt() + 1e-8)
        spread = targets.var(correction=0)
        told = (
            log_ratios.clamp(max=20.0).exp().mean(),
            (log_ratios.exp() > config.rho_bar).float().mean(),
            torch.where(spread > 0, 1.0 - (values - targets).square().mean() / spread, 0.0),
        )
        return _Judged(targets, advantages, torch.stack(told))

    def _step(self, steps: Steps, judged: _Judged, part: Tensor) -> Tensor:
        """One gradient step on the steps that ``part`` counts."""
        config = self.config
        advantages = judged.advantages[part]
        params, values = self.forward(select(steps.observations, part))
        log_prob, entropy = self.distribution.log_prob_and_entropy(params, steps.actions[part])
        # Where an action is impossible its weight, and so its advantage, is 0; 0 * -inf must not become NaN.
        surrogate = (torch.where(advantages != 0, log_prob, 0.0) * advantages).mean()
        value_loss = (values - judged.targets[part]).square().mean()
        mean_entropy = entropy.mean()
        norm = self._optimizer.step(config.value_coef * value_loss - surrogate - config.entropy_coef * mean_entropy)
        return torch.stack((-surrogate.detach(), value_loss.detach(), mean_entropy.detach(), norm))
