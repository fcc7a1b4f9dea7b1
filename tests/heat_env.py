"""A small environment that is an MPI program: heat conduction in a plate, its rows shared out over a group of ranks.

The action heats or cools the left edge; the reward is minus the squared distance of the mean temperature from a target.
Each step is one explicit time step, with the rows at the borders exchanged between neighbours.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

ROWS, COLUMNS, TARGET = 12, 8, 0.5


class HeatEnv(gym.Env[Any, Any]):
    """``comm`` is the group's communicator; None: one rank does it all."""

    observation_space = gym.spaces.Box(-10.0, 10.0, (COLUMNS,), np.float64)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, comm: Any = None, length: int = 30, fail_on_follower: bool = False) -> None:
        self.comm, self.length, self.fail_on_follower = comm, length, fail_on_follower
        self.rank, self.size = (comm.Get_rank(), comm.Get_size()) if comm is not None else (0, 1)
        self.field = np.zeros((ROWS // self.size, COLUMNS))

    def _sum(self, values: np.ndarray) -> np.ndarray:
        if self.comm is None:
            return values
        total = np.empty_like(values)
        self.comm.Allreduce(values, total)
        return total

    def _mean_columns(self) -> np.ndarray:
        return self._sum(self.field.sum(axis=0)) / ROWS

    def _halo(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows above and below this rank's part; the plate's own edge rows where there is no neighbour."""
        above, below = self.field[0].copy(), self.field[-1].copy()
        if self.comm is not None:
            up, down = self.rank - 1, self.rank + 1
            up = up if up >= 0 else -1
            down = down if down < self.size else -1
            got_above, got_below = above.copy(), below.copy()
            if up >= 0:
                self.comm.Sendrecv(np.ascontiguousarray(self.field[0]), up, 1, got_above, up, 2)
            if down >= 0:
                self.comm.Sendrecv(np.ascontiguousarray(self.field[-1]), down, 2, got_below, down, 1)
            above, below = got_above, got_below
        return above, below

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        whole = self.np_random.uniform(-0.1, 0.1, (ROWS, COLUMNS))
        if self.comm is not None:  # only the group's first rank decides; its followers hear of it
            self.comm.Bcast(whole, 0)
        part = ROWS // self.size
        self.field = whole[self.rank * part : (self.rank + 1) * part].copy()
        self.steps = 0
        return self._mean_columns(), {"ranks": self.size}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.fail_on_follower and self.rank == 1:
            raise RuntimeError("the solver diverged")
        above, below = self._halo()
        padded = np.vstack([above, self.field, below])
        left = np.hstack([padded[1:-1, :1] + float(action[0]), self.field[:, :-1]])
        right = np.hstack([self.field[:, 1:], self.field[:, -1:]])
        self.field = self.field + 0.2 * (padded[:-2] + padded[2:] + left + right - 4 * self.field)
        self.steps += 1
        columns = self._mean_columns()
        return columns, -float((columns.mean() - TARGET) ** 2), False, self.steps >= self.length, {}

    def part(self) -> list[int]:
        """How many rows each rank holds: collective, as an environment's own methods may be."""
        held = np.zeros(self.size, dtype=np.int64)
        held[self.rank] = len(self.field)
        return [int(count) for count in self._sum(held)]
