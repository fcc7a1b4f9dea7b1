"""Proximal policy optimisation for rollouts from stale policies.

Three policies meet in an update.  The *behaviour* policy chose the actions, on a worker, some versions ago.  The
*proximal* policy is the learner's own when the update starts.  The *new* policy is the one being trained.  Ordinary
PPO (Schulman et al. 2017) clips new / behaviour: once the learner has left the behaviour policy by more than the clip
allows, every gradient is clipped away and learning stops, which a worker that waits for drift never notices.
The decoupled objective (Hilton, Cobbe, Schulman 2021, "Batch size-invariance for policy optimization") clips
new / proximal, and corrects for the data's origin by the importance weight proximal / behaviour, here truncated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ..policies.protocol import PolicyError, distribution_of, evaluate
from ..rollout import Episodes, Rollout, Tree
from .base import nothing
from .batches import chunks, select, take
from .optimizer import FlatAdam
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


class PPO:
    """Trains ``policy`` (the protocol of ``clusterenv_hpc.policies.protocol``, with values) in place.

    device: where to train; defaults to where the policy is.  The policy is moved there.
    seed: of the minibatch order, the only randomness here.
    meanwhile: called between gradient steps, so that messages move while a long update goes on.
    """

    def __init__(
        self,
        policy: nn.Module,
        config: PPOConfig,
        action_space: gymnasium.Space[Any],
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.config = config
        self.distribution = distribution_of(policy, action_space)
        first = next(policy.parameters(), None)
        if first is None:
            raise PolicyError(f"{type(policy).__name__} has no parameters; there is nothing to train.")
        self.device = first.device if device is None else torch.device(device)
        policy.to(self.device)
        trained = (parameter for parameter in policy.parameters() if parameter.requires_grad)
        self._optimizer = FlatAdam(trained, config.learning_rate, config.adam_eps, config.max_grad_norm)
        self._generator = torch.Generator().manual_seed(seed)
        self.meanwhile: Callable[[], object] = nothing

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """One PPO update on the rollout's valid steps; ``progress`` in [0, 1] drives the learning-rate schedule.

        Returns metrics; those of the losses, gradients and clipping are means over the last epoch run.  A rollout
        without a valid step changes nothing.  Raises ``FloatingPointError`` when numbers stop being finite.
        """
        config = self.config
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress={progress!r} is not allowed; expected the share of the run done, from 0 to 1.")
        rate = config.learning_rate * (1.0 - progress if config.lr_schedule == "linear" else 1.0)
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
        bad = [key for key in ("policy_loss", "value_loss", "grad_norm", "kl_update") if not np.isfinite(metrics[key])]
        if bad:
            raise FloatingPointError(
                f"PPO's {', '.join(bad)} stopped being finite; the policy in memory is lost, the last checkpoint is "
                "not. Try a smaller learning rate or reward_scale."
            )
        return metrics

    def _prepare(self, rollout: Rollout, rows: np.ndarray) -> tuple[_Batch, dict[str, float]]:
        """Everything that stays the same over the epochs, computed once."""
        config, dist = self.config, self.distribution
        observations = take(rollout.observations, rows, self.device)
        actions = take(rollout.actions, rows, self.device)
        behaviour = take(rollout.behaviour_params, rows, self.device)
        proximal, values = self._evaluate(observations)
        if proximal.shape != behaviour.shape or values.shape != (len(rows),):
            raise PolicyError(
                f"{type(self.policy).__name__} returned parameters {tuple(proximal.shape)} and values "
                f"{tuple(values.shape)} for {len(rows)} observations; expected {tuple(behaviour.shape)}, like the "
                f"behaviour policy's, and {(len(rows),)}."
            )
        proper = values.isfinite() & dist.proper(proximal)
        if not proper.all():
            row = int(rows[int((~proper).nonzero()[0])]) % rollout.num_envs
            raise FloatingPointError(
                f"The policy's outputs stopped being finite, first for environment {int(rollout.rows[row])} of worker "
                f"rank {int(rollout.ranks[row])}: its observations or the policy's weights hold NaN or infinity."
            )
        advantages, targets = self._advantages(rollout, rows, values)
        variance = targets.var(correction=0)
        explained = torch.where(variance > 0, 1.0 - (targets - values).var(correction=0) / variance, 0.0)
        if config.normalize_advantages:
            advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        # An action that a policy has since masked has log-probability -inf: finite, so that no difference is NaN.
        lowest = torch.finfo(torch.float32).min
        behaviour_logp = dist.log_prob(behaviour, actions).clamp(min=lowest)
        proximal_logp = dist.log_prob(proximal, actions).clamp(min=lowest)
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
        return _Batch(observations, actions, proximal, columns), {key: float(x) for key, x in metrics.items()}

    def _advantages(self, rollout: Rollout, rows: np.ndarray, values: Tensor) -> tuple[Tensor, Tensor]:
        """GAE on the CPU, where a loop over small rows belongs; both ``[M]`` for the valid rows."""
        config = self.config
        steps, envs = rollout.rewards.shape
        flags = (rollout.terminated, rollout.truncated, rollout.valid)
        terminated, truncated, valid = (torch.from_numpy(np.array(flag, order="C")) for flag in flags)
        index = torch.from_numpy(rows)
        state_values = torch.zeros(steps * envs).index_copy_(0, index, values.cpu())
        # The successor of most steps is the next row's state; only the others need the critic once more.
        next_values = torch.zeros(steps, envs)
        next_values[:-1] = state_values.view(steps, envs)[1:]
        linked = torch.zeros_like(valid)
        linked[:-1] = valid[1:] & ~(terminated | truncated)[:-1]
        ends = (valid & ~terminated & ~linked).view(-1).nonzero().squeeze(-1)
        if len(ends):
            _, end_values = self._evaluate(take(rollout.next_observations, ends.numpy(), self.device))
            next_values.view(-1).index_copy_(0, ends, end_values.cpu())
        with np.errstate(over="ignore"):  # told below
            rewards = torch.from_numpy(np.asarray(rollout.rewards * config.reward_scale, np.float32))
        advantages, targets = gae(
            rewards,
            state_values.view(steps, envs),
            next_values,
            terminated,
            truncated,
            valid,
            config.gamma,
            config.gae_lambda,
        )
        both = torch.stack((advantages.view(-1), targets.view(-1))).index_select(1, index).to(self.device)
        if not both.isfinite().all():
            raise FloatingPointError(
                f"Advantages are not finite: rewards times reward_scale={config.reward_scale:g}, or final "
                "observations, hold NaN or infinity."
            )
        return both[0], both[1]

    @torch.no_grad()
    def _evaluate(self, observations: Tree) -> tuple[Tensor, Tensor]:
        """Parameters and values of all rows in float32, in chunks that bound the memory of activations."""
        outputs = [self._forward(chunk) for chunk in chunks(observations, max(1024, self.config.minibatch_size))]
        params, values = zip(*outputs, strict=True)
        return torch.cat(params), torch.cat(values)

    def _forward(self, observations: Tree) -> tuple[Tensor, Tensor]:
        params, values = evaluate(self.policy, observations)
        if values is None:
            raise PolicyError(
                f"PPO needs state values, but {type(self.policy).__name__} has neither value(observations) nor "
                "forward_and_value(observations)."
            )
        return params.float(), values.float()

    def _epoch(self, batch: _Batch) -> dict[str, float]:
        config, dist = self.config, self.distribution
        total = len(batch.columns)
        order = torch.randperm(total, generator=self._generator).to(self.device)
        numbers: list[Tensor] = []
        log_probs: list[Tensor] = []
        # Equal parts, rather than a small noisy batch at the end.
        for rows in order.tensor_split(max(1, round(total / config.minibatch_size))):
            reference, advantages, low, high, targets, old_values = batch.columns.index_select(0, rows).unbind(1)
            params, values = self._forward(select(batch.observations, rows))
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
        params, _ = self._evaluate(select(batch.observations, rows))
        return float(self.distribution.kl(batch.proximal_params.index_select(0, rows), params).mean())

    def telling(self, rollout: Rollout) -> Episodes:
        """All of them."""
        return rollout.episodes

    def state_dict(self) -> dict[str, Any]:
        """Policy, optimizer and minibatch generator: plain tensors, numbers and containers of them.

        A snapshot: training on does not change it.
        """
        return {
            "policy": copy.deepcopy(self.policy.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state_dict`` was taken."""
        self.policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"].cpu())
