"""Catch: a ball falls, a paddle at the bottom must be under it.  The smallest game that is seen as an image.

Importing this module registers ``Catch-v0``, as a single environment and as a vectorised one, equal in everything but
the order in which they draw random numbers.

Observation: uint8 ``[rows, columns]``, 255 where the ball and the paddle are.  Actions: 0 left, 1 stay, 2 right.
The reward comes with the end, after ``rows - 1`` steps: 1 where the ball is caught, else -1.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

BRIGHT = 255


class CatchVectorEnv(VectorEnv[Any, Any, Any]):
    """``num_envs`` games at once; an episode's end is followed by a step that resets (``NEXT_STEP``).

    Raises:
        ValueError: a board of less than 2 rows or columns.
    """

    def __init__(self, num_envs: int = 1, rows: int = 10, columns: int = 10, render_mode: str | None = None) -> None:
        if min(rows, columns) < 2:
            raise ValueError(f"a board needs at least 2 rows and 2 columns, got rows={rows}, columns={columns}")
        self.num_envs, self.rows, self.columns, self.render_mode = num_envs, rows, columns, render_mode
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = gym.spaces.Box(0, BRIGHT, (rows, columns), np.uint8)
        self.single_action_space = gym.spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._every = np.arange(num_envs)
        self._ball, self._paddle = np.zeros(num_envs, np.int64), np.full(num_envs, columns // 2)
        self._height, self._over = np.zeros(num_envs, np.int64), np.zeros(num_envs, bool)

    def _begin(self, which: NDArray[np.bool_]) -> None:
        count = int(which.sum())
        self._ball[which] = self.np_random.integers(self.columns, size=count)
        self._paddle[which], self._height[which], self._over[which] = self.columns // 2, 0, False

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """``options["reset_mask"]`` resets only those."""
        super().reset(seed=seed)
        self._begin((options or {}).get("reset_mask", np.ones(self.num_envs, bool)))
        return self._look(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As Gymnasium's."""
        fresh = self._over.copy()
        self._paddle = np.clip(self._paddle + np.asarray(actions) - 1, 0, self.columns - 1)
        self._height += 1
        self._begin(fresh)
        self._over = self._height == self.rows - 1
        rewards = np.where(self._over, np.where(self._paddle == self._ball, 1.0, -1.0), 0.0)
        return self._look(), rewards, self._over.copy(), np.zeros(self.num_envs, bool), {}

    def _look(self) -> NDArray[np.uint8]:
        board = np.zeros((self.num_envs, self.rows, self.columns), np.uint8)
        board[self._every, self._height, self._ball] = BRIGHT
        board[self._every, -1, self._paddle] = BRIGHT
        return board


class CatchEnv(gym.Env[Any, Any]):
    """One game."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012

    def __init__(self, rows: int = 10, columns: int = 10, render_mode: str | None = None) -> None:
        self._games = CatchVectorEnv(1, rows, columns)
        self.observation_space = self._games.single_observation_space
        self.action_space = self._games.single_action_space
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._games.np_random = self.np_random
        return self._games.reset()[0][0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, rewards, over, _, _ = self._games.step(np.array([action]))
        return observation[0], float(rewards[0]), bool(over[0]), False, {}

    def render(self) -> Any:
        """The board in grey, 16 pixels for a cell."""
        return np.repeat(np.kron(self._games._look()[0], np.ones((16, 16), np.uint8))[..., None], 3, axis=2)


gym.register(
    "Catch-v0",
    entry_point="clusterenv_hpc.envs.catch:CatchEnv",
    vector_entry_point="clusterenv_hpc.envs.catch:CatchVectorEnv",
)
