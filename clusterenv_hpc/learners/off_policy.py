"""The rhythm of learners from a replay: take in what arrives, then make the gradient steps that are due for it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, ClassVar

import gymnasium
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..algorithms import Replaying
from ..rollout import Rollout
from .base import LearnerBase
from .replay import Replay, Sample


class OffPolicyLearner(LearnerBase):
    """A learner with a replay.

    num_envs: environments of the whole run; the replay has an equal share for each.

    Every environment step is replayed ``samples_per_step`` times, whatever the sizes of rollouts and of batches: what
    is due after one update and makes no whole batch is carried over to the next.
    """

    METRICS: ClassVar[tuple[str, ...]]
    """The names of what ``learn`` returns."""

    def __init__(
        self,
        policy: nn.Module,
        config: Any,
        action_space: gymnasium.Space[Any],
        num_envs: int,
        device: torch.device | str | None = None,
        seed: int = 0,
        prioritized: bool = False,
    ) -> None:
        super().__init__(policy, config, action_space, device, seed)
        self.replaying: Replaying = config
        if config.learning_starts > config.capacity:
            raise ValueError(f"learning_starts={config.learning_starts}: allowed: at most capacity={config.capacity}")
        self.replay = Replay(config.capacity, num_envs, config.n_step, config.gamma, prioritized)
        self.gradient_steps = 0
        self.notice = ""
        """What a resumed run ought to know."""
        self._due = 0.0

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """Keep the rollout's valid steps and learn from the replay; metrics are means over the gradient steps made.

        Raises ``FloatingPointError`` when numbers stop being finite.
        """
        config = self.replaying
        rate = self.rate(progress)
        self.replay.add(rollout, self.priorities(rollout))
        metrics = {"learning_rate": rate, "replay_size": float(len(self.replay))}
        metrics |= {"replay_bytes": float(self.replay.nbytes)}
        if len(self.replay) >= max(1, config.learning_starts):
            self._due += rollout.env_steps * config.samples_per_step / config.batch_size
        count, self._due = int(self._due), self._due % 1.0
        metrics["gradient_steps"] = float(count)
        if not count:
            return metrics
        self.start(progress)
        told = []
        for _ in range(count):
            told.append(self.learn(self.draw(progress), progress))
            self.gradient_steps += 1
            self.meanwhile()
        means = dict(zip(self.METRICS, torch.stack(told).mean(0).tolist(), strict=True))
        self.finite(means)
        return metrics | means

    def priorities(self, rollout: Rollout) -> NDArray[Any] | None:
        """Of a rollout's steps, ``[T, N]``, where the replay is prioritized."""
        return None

    def draw(self, progress: float) -> Sample:
        """A batch."""
        return self.replay.sample(self.replaying.batch_size, self.generator, self.device)

    @abstractmethod
    def start(self, progress: float) -> None:
        """Before the first gradient step of an update: set the optimizers' rates."""

    @abstractmethod
    def learn(self, sample: Sample, progress: float) -> Tensor:
        """One gradient step; returns the values of ``METRICS`` as one tensor."""

    def noise(self, shape: tuple[int, ...]) -> Tensor:
        """What ``distribution.sample`` needs, from this learner's generator."""
        return self.distribution.noise(shape, self.generator).to(self.device)

    def state_dict(self) -> dict[str, Any]:
        """Policy, generator, counters and, unless ``checkpoint_replay`` is off, the replay."""
        state = {**super().state_dict(), "gradient_steps": self.gradient_steps, "due": self._due}
        if self.replaying.checkpoint_replay:
            state["replay"] = self.replay.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; without its replay, once there is enough in a new one.

        A replay of another capacity or number of environments cannot be taken over; ``notice`` says so.
        """
        super().load_state_dict(state)
        self.gradient_steps, self._due = state["gradient_steps"], state["due"]
        self.notice = ""
        if "replay" not in state:
            self.notice = "the checkpoint holds no replay (algo.checkpoint_replay): it is filled anew"
        elif not self.replay.fits(state["replay"]):
            self.notice = f"{self.replay.misfit(state['replay'])}: it is filled anew"
        else:
            self.replay.load_state_dict(state["replay"])


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy that nothing trains: a target network."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def follow(target: nn.Module, module: nn.Module, tau: float) -> None:
    """Move the target's parameters and buffers by ``tau`` of the way to the module's."""
    torch._foreach_lerp_(list(target.parameters()), list(module.parameters()), tau)
    for mine, theirs in zip(target.buffers(), module.buffers(), strict=True):
        mine.copy_(theirs)
