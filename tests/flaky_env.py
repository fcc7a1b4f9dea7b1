"""Environments that fail on plan, and tell in each observation who they are: (instance, episode, step)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

Plan = Mapping[int, tuple[str, int]]
"""Instance (in the order they are made) -> what fails ("step", "reset", "make") and in which call of it, from 1."""


class Flaky(gym.Env[Any, Any]):
    """Ends after ``length`` steps: by termination in even episodes, by truncation in odd ones.  Reward: the step."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, instance: int, plan: Plan, length: int, raises: type[BaseException]) -> None:
        self.instance, self.length, self.raises = instance, length, raises
        self.what, self.when = plan.get(instance, ("", 0))
        self.calls = {"step": 0, "reset": 0}
        self.episode = -1
        self.closed = False
        self.seeds: list[int | None] = []

    def _may_fail(self, what: str) -> None:
        self.calls[what] += 1
        if self.what == what and self.calls[what] == self.when:
            raise self.raises(f"planned for {what} {self.when} of instance {self.instance}")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self._may_fail("reset")
        self.episode, self.time = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._may_fail("step")
        self.time += 1
        over = self.time == self.length
        even = self.episode % 2 == 0
        return self._observe(), float(self.time), over and even, over and not even, {}

    def _observe(self) -> Any:
        return np.array([self.instance, self.episode, self.time], np.float32)

    def close(self) -> None:
        self.closed = True
        if self.what == "close":
            raise OSError("cannot close")


class Maker:
    """Makes ``Flaky`` environments and keeps them in ``made``."""

    def __init__(self, plan: Plan | None = None, length: int = 7, raises: type[BaseException] = RuntimeError) -> None:
        self.plan, self.length, self.raises = plan or {}, length, raises
        self.made: list[Flaky | None] = []

    def __call__(self) -> Flaky:
        instance = len(self.made)
        self.made.append(None)
        if self.plan.get(instance, ("", 0))[0] == "make":
            raise self.raises(f"no licence for instance {instance}")
        self.made[instance] = env = Flaky(instance, self.plan, self.length, self.raises)
        return env
