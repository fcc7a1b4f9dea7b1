"""Proximal policy optimisation for rollouts from stale policies.

Three policies meet in an update.  The *behaviour* policy chose the actions, on a worker, some versions ago.  The
*proximal* policy is the learner's own when the update starts.  The *new* policy is the one being trained.  Ordinary
PPO (Schulman et al. 2017) clips new / behaviour: once the learner has left the behaviour policy by more than the clip
allows, every gradient is clipped away and learning stops, which a worker that waits for drift never notices.
The decoupled objective (Hilton, Cobbe, Schulman 2021, "Batch size-invariance for policy optimization") clips
new / proximal, and corrects for the data's origin by the importance weight proximal / behaviour, here truncated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ..rollout import Rollout, Tree
from .actor_critic import ActorCriticLearner, Steps
from .batches import select
from .returns import gae

_MAX_LOG_RATIO = 20.0
"""Ratios are held below e^20, where float32 is still far from infinity."""

_KL_ROWS = 4096
"""States on which the update's own KL is measured."""


@dataclass(frozen=True)
class PPOConfig:
    """Settings of :class:`PPO`; a bad value raises ``ValueError`` naming the key, the value and what is allowed.

    learning_rate, lr_schedule, adam_eps: Adam; "linear" anneals the rate to 0 over the run's progress.
    gamma, gae_lambda: discount and trace decay of the advantages.
    clip: how far new / proximal may move the objective.  value_clip: the same for values (None: not at all).
    epochs, minibatch_size: passes over the rollout, and (about; batches are made equal) the rows per gradient step.
    entropy_coef, value_coef: weights of the mean entropy, and of the mean squared value error.
    max_grad_norm: global gradient norm clip; None for none.
    target_kl: stop after an epoch that left the proximal policy by more mean KL than this; None: never.
    reward_scale: rewards are multiplied by this for learning only.
    normalize_advantages: to mean 0 and standard deviation 1 over the rollout's valid steps.
    objective: "decoupled", or "coupled" for ordinary PPO against the behaviour policy.
    max_importance: truncation of proximal / behaviour in the decoupled objective.
    """

    name: ClassVar[str] = "ppo"

    learning_rate: float = 3e-4
    lr_schedule: str = "linear"
    adam_eps: float = 1e-5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    epochs: int = 4
    minibatch_size: int = 128
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float | None = 0.5
    target_kl: float | None = None
    reward_scale: float = 1.0
    normalize_advantages: bool = True
    objective: str = "decoupled"
    max_importance: float = 2.0
    value_clip: float | None = None

    def __post_init__(self) -> None:
        def number(key: str, allowed: str, test: Callable[[float], bool], optional: bool = False) -> None:
            value = getattr(self, key)
            if value is None and optional:
                return
            plain = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (plain and test(value) and value < float("inf")):
                raise ValueError(f"{key}={value!r} is not allowed; expected {allowed}{' or null' if optional else ''}.")

        def one_of(key: str, *allowed: object) -> None:
            value = getattr(self, key)
            if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
                raise ValueError(f"{key}={value!r} is not allowed; expected one of {', '.join(map(str, allowed))}.")

        def whole(key: str) -> None:
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{key}={value!r} is not allowed; expected a whole number of at least 1.")

        for key in ("learning_rate", "adam_eps", "clip", "max_importance", "reward_scale"):
            number(key, "a number above 0", lambda x: x > 0)
        for key in ("gamma", "gae_lambda"):
            number(key, "a number from 0 to 1", lambda x: 0 <= x <= 1)
        for key in ("entropy_coef", "value_coef"):
            number(key, "a number of at least 0", lambda x: x >= 0)
        for key in ("max_grad_norm", "target_kl", "value_clip"):
            number(key, "a number above 0", lambda x: x > 0, optional=True)
        if self.clip >= 1:
            raise ValueError(f"clip={self.clip!r} is not allowed; expected a number above 0 and below 1.")
        whole("epochs")
        whole("minibatch_size")
        one_of("lr_schedule", "linear", "constant")
        one_of("objective", "decoupled", "coupled")
        one_of("normalize_advantages", True, False)


def ratio_bounds(advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Where the *logarithm* of the ratio r stops to count, ``(low [M], high [M])``.

    PPO's ``min(r A, clamp(r, 1 - clip, 1 + clip) A)`` binds on one side only: a positive advantage stops paying at
    1 + clip, a negative one at 1 - clip.  The other side is open (up to where float32 ends).  So the minimum is
    ``clipped_ratio(...) * A``, with half the operations.
    """
    up = advantages >= 0
    high = torch.where(up, float(np.log1p(clip)), _MAX_LOG_RATIO)
    low = torch.where(up, -torch.inf, float(np.log1p(-clip)))
    return low, high


def clipped_ratio(log_prob: Tensor, reference: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``exp(log_prob - reference)``, its logarithm held within the bounds, beyond which no gradient passes."""
    return (log_prob - reference).clamp(low, high).exp()


@dataclass(frozen=True)
class _Batch:
    """The valid steps of a rollout, M rows; ``columns [M, C]`` holds the per-row numbers the loss needs."""

    observations: Tree
    actions: Tensor
    proximal_params: Tensor
    columns: Tensor


class PPO(ActorCriticLearner):
    """Trains ``policy`` (the protocol of ``clusterenv_hpc.policies.protocol``, with values) in place.

    device: where to train; defaults to where the policy is.  The policy is moved there.
    seed: of the minibatch order, the only randomness here.
    """

    TITLE: ClassVar[str] = "PPO"

    def __init__(
        self,
        policy: nn.Module,
        config: PPOConfig,
        action_space: gymnasium.Space[Any],
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, config, action_space, device, seed)
        self.config = config

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """One PPO update on the rollout's valid steps; ``progress`` in [0, 1] drives the learning-rate schedule.

        Returns metrics; those of the losses, gradients and clipping are means over the last epoch run.  A rollout
        without a valid step changes nothing.  Raises ``FloatingPointError`` when numbers stop being finite.
        """
        config = self.config
        rate = self.rate(progress)
        metrics = {"learning_rate": rate, "epochs_run": 0.0}
        rows = np.flatnonzero(rollout.valid)
        if rows.size == 0:
            return metrics
        batch, prepared = self._prepare(rollout, rows)
        metrics |= prepared
        self._optimizer.start(rate)
        for epoch in range(1, config.epochs + 1):
            metrics |= self._epoch(batch)
            metrics["epochs_run"] = float(epoch)
            last = epoch == config.epochs
            if config.target_kl is not None or last:
                metrics["kl_update"] = self._kl_update(batch)
                if not last and config.target_kl is not None and metrics["kl_update"] > config.target_kl:
                    break
        self.finite({key: metrics[key] for key in ("policy_loss", "value_loss", "grad_norm", "kl_update")})
        return metrics

    def _prepare(self, rollout: Rollout, rows: np.ndarray) -> tuple[_Batch, dict[str, float]]:
        """Everything that stays the same over the epochs, computed once."""
        config = self.config
        steps = self.steps_of(rollout, rows)
        proximal, values = self.see(rollout, steps)
        advantages, targets = self._advantages(rollout, steps, values)
        variance = targets.var(correction=0)
        explained = torch.where(variance > 0, 1.0 - (targets - values).var(correction=0) / variance, 0.0)
        if config.normalize_advantages:
            advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        proximal_logp, behaviour_logp = self.log_probs(steps, proximal)
        importance = (proximal_logp - behaviour_logp).clamp(max=_MAX_LOG_RATIO).exp()
        if config.objective == "decoupled":
            reference = proximal_logp
            advantages = advantages * importance.clamp(max=config.max_importance)
        else:
            reference = behaviour_logp
        low, high = ratio_bounds(advantages, config.clip)
        columns = torch.stack((reference, advantages, low, high, targets, values), 1)
        metrics = {
            "importance_mean": importance.mean(),
            "importance_clipped": (importance > config.max_importance).float().mean(),
            "explained_variance": explained,
        }
        return _Batch(steps.observations, steps.actions, proximal, columns), {
            key: float(x) for key, x in metrics.items()
        }

    def _advantages(self, rollout: Rollout, steps: Steps, values: Tensor) -> tuple[Tensor, ...]:
        """Advantages and value targets by GAE; both ``[M]``."""
        grids = self.grids(rollout, steps, values)
        return self.at(steps, *gae(**grids, gamma=self.config.gamma, lam=self.config.gae_lambda))

    def _epoch(self, batch: _Batch) -> dict[str, float]:
        config, dist = self.config, self.distribution
        total = len(batch.columns)
        order = torch.randperm(total, generator=self.generator).to(self.device)
        numbers: list[Tensor] = []
        log_probs: list[Tensor] = []
        # Equal parts, rather than a small noisy batch at the end.
        for rows in order.tensor_split(max(1, round(total / config.minibatch_size))):
            reference, advantages, low, high, targets, old_values = batch.columns.index_select(0, rows).unbind(1)
            params, values = self.forward(select(batch.observations, rows))
            log_prob, entropy = dist.log_prob_and_entropy(params, batch.actions.index_select(0, rows))
            ratio = clipped_ratio(log_prob, reference, low, high)
            surrogate = (ratio * advantages).mean()
            mean_entropy = entropy.mean()
            value_loss = self._value_loss(values, targets, old_values)
            loss = config.value_coef * value_loss - surrogate - config.entropy_coef * mean_entropy
            norm = self._optimizer.step(loss)
            # Only references are kept here; they become numbers once per epoch.
            numbers += (surrogate.detach(), mean_entropy.detach(), value_loss.detach(), norm)
            log_probs.append(log_prob.detach())
            self.meanwhile()
        means = torch.stack(numbers).view(-1, 4).mean(0).tolist()
        moved = (torch.cat(log_probs) - batch.columns[:, 0].index_select(0, order)).expm1().abs()
        return {
            "policy_loss": -means[0],
            "entropy": means[1],
            "value_loss": means[2],
            "grad_norm": means[3],
            "clip_fraction": (moved > config.clip).float().mean().item(),
        }

    def _value_loss(self, values: Tensor, targets: Tensor, old_values: Tensor) -> Tensor:
        if self.config.value_clip is None:
            return mse_loss(values, targets)
        near = old_values + (values - old_values).clamp(-self.config.value_clip, self.config.value_clip)
        return torch.maximum((values - targets).square(), (near - targets).square()).mean()

    def _kl_update(self, batch: _Batch) -> float:
        """Mean KL(proximal || new) over up to _KL_ROWS states, evenly spread over the rollout."""
        total = len(batch.columns)
        rows = torch.arange(0, total, -(-total // _KL_ROWS), device=self.device)
        params, _ = self.evaluate(select(batch.observations, rows))
        return float(self.distribution.kl(batch.proximal_params.index_select(0, rows), params).mean())
