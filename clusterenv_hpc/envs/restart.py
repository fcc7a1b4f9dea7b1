"""Environments that fail now and then: rebuilt in place, while the others go on.

What counts as a failure is an exception (or ``SystemExit``) out of ``step`` or ``reset``.  The environment is closed,
built anew and seeded from its last seed and the number of its failures, so that equal runs stay equal.  Its episode
ends as truncated, and no transition is made up:

- In a rollout, the step that failed is one that only resets (``valid`` is False, the next observation is the new
  episode's first).  The step before it becomes the last of its episode: truncated, and bootstrapped from the last true
  observation, which is its successor.  Where that step was in the rollout before, it stays as it was there: it is
  bootstrapped from just that observation anyway.
- In plain ``step`` there is no way to say that nothing happened: the step that failed gives back the last true
  observation, reward 0 and ``truncated``, and ``infos["env_error"]`` names the error.  Whoever learns from it leaves
  such steps out.  The reset then comes as after any other end.

A failure in ``reset`` shows only in the counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, iterate

from .build import EnvError, SyncEnvs
from .spaces import map_tree

FAILURES = (Exception, SystemExit)


@dataclass(frozen=True)
class Restart:
    """``row`` here was built anew for the ``count``-th time, because of ``cause``."""

    row: int
    count: int
    cause: str


class RestartingEnvs(SyncEnvs):
    """``SyncEnvs`` that rebuilds an environment in place when it fails; bit-equal to it as long as none does.

    Args:
        env_fns: make the environments, and make them anew.
        autoreset_mode: as Gymnasium's.
        max_restarts: how often each environment may be rebuilt.
        first_row: the row, in the whole, of the first environment; for messages only.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        autoreset_mode: AutoresetMode,
        max_restarts: int,
        first_row: int = 0,
    ) -> None:
        super().__init__(env_fns, autoreset_mode)
        self.max_restarts, self.first_row = max_restarts, first_row
        self.counts = [0] * self.num_envs
        """How often each environment was rebuilt."""
        self._in_rollout, self._steps = False, 0
        self._failed: list[tuple[int, int]] = []
        self._restarts: list[Restart] = []
        self._seeds: list[int | None] = [None] * self.num_envs  # the last one each was given
        self._fresh: dict[int, int] = {}  # seeds for the first reset of rebuilt environments

    def begin_rollout(self) -> None:
        super().begin_rollout()
        self._in_rollout, self._steps = True, 0
        self._failed.clear()

    def end_rollout(self) -> None:
        super().end_rollout()
        self._in_rollout = False

    def failed_steps(self) -> list[tuple[int, int]]:
        return self._failed

    def take_restarts(self) -> list[Restart]:
        restarts, self._restarts = self._restarts, []
        return restarts

    # -- stepping ----------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As ``SyncVectorEnv.step``; for failures see the module."""
        # The loop is written out, so that the environments behind one that failed can go on; a try costs nothing.
        infos: dict[str, Any] = {}
        next_step = self.autoreset_mode is AutoresetMode.NEXT_STEP
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        for i, action in zip(range(self.num_envs), iterate(self.action_space, actions), strict=True):
            if next_step and self._autoreset_envs[i]:
                self._env_obs[i], info = self._reset_one(i, None, None)
                self._rewards[i], self._terminations[i], self._truncations[i] = 0.0, False, False
            else:
                assert same_step or not self._autoreset_envs[i], f"environment {self.first_row + i} wants a reset"
                try:
                    (
                        self._env_obs[i],
                        self._rewards[i],
                        self._terminations[i],
                        self._truncations[i],
                        info,
                    ) = self.envs[i].step(action)
                except FAILURES as error:
                    self._env_obs[i], info = self._fail(i, error)
                if same_step and (self._terminations[i] or self._truncations[i]):
                    final = {"final_obs": self._env_obs[i], "final_info": info}
                    infos = self._add_info(infos, final, i)
                    self._env_obs[i], info = self._reset_one(i, None, None)
            infos = self._add_info(infos, info, i)
        self._steps += 1
        self._observations = concatenate(self.single_observation_space, self._env_obs, self._observations)
        self._autoreset_envs = np.logical_or(self._terminations, self._truncations)
        ended = (np.copy(self._terminations), np.copy(self._truncations))
        return self._observations, np.copy(self._rewards), *ended, infos

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As ``SyncVectorEnv.reset``; one that fails is rebuilt and reset with the same seed, then with fresh ones."""
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)] if _is_one(seed) else list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"seed must be a number or {self.num_envs} of them, got {len(seeds)}")
        mask = np.ones(self.num_envs, dtype=bool)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = options.pop("reset_mask")
        infos: dict[str, Any] = {}
        for ended in (self._terminations, self._truncations, self._autoreset_envs):
            ended[mask] = False
        for i in np.flatnonzero(mask).tolist():
            self._seeds[i] = self._seeds[i] if seeds[i] is None else seeds[i]
            self._env_obs[i], info = self._reset_one(i, seeds[i], options)
            infos = self._add_info(infos, info, i)
        self._observations = concatenate(self.single_observation_space, self._env_obs, self._observations)
        return self._observations, infos

    # -- failures ----------------------------------------------------------------------------------------------------

    def _reset_one(self, i: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        failures = 0
        while True:
            fresh = self._fresh.pop(i, None)
            try:
                return self.envs[i].reset(seed=fresh if seed is None or failures > 1 else seed, options=options)
            except FAILURES as error:
                self._rebuild(i, error)
                failures += 1

    def _fail(self, i: int, error: BaseException) -> tuple[Any, dict[str, Any]]:
        """The observation and the info of a step that failed."""
        self._rebuild(i, error)
        self._rewards[i], self._terminations[i], self._truncations[i] = 0.0, False, not self._in_rollout
        if self._in_rollout:
            self._failed.append((self._steps, i))
            return self._reset_one(i, None, None)
        last = map_tree(lambda array: array[i].copy(), self._observations)
        return last, {"env_error": _described(error)}

    def _rebuild(self, i: int, error: BaseException) -> None:
        """A new environment in place ``i``, not reset yet.

        Raises:
            EnvError: it has failed too often.
        """
        row = self.first_row + i
        while True:
            cause = _described(error)
            if self.counts[i] >= self.max_restarts:
                told = f"environment {row} failed once more than max_restarts={self.max_restarts} allows: {cause}"
                raise EnvError(told, row) from error
            self.counts[i] += 1
            self._restarts.append(Restart(i, self.counts[i], cause))
            with contextlib.suppress(*FAILURES):
                self.envs[i].close()
            try:
                env = self.env_fns[i]()
            except FAILURES as again:
                error = again
                continue
            if env.observation_space != self.single_observation_space or env.action_space != self.single_action_space:
                raise EnvError(f"environment {row} has other spaces since it was restarted after {cause}", row)
            self.envs[i] = env
            if (seed := self._seeds[i]) is not None:
                # Its own seed again would lead to the same failure again, wherever that depends on the seed.
                self._fresh[i] = fresh_seed(seed, self.counts[i])
            return


def fresh_seed(seed: int, failures: int) -> int:
    """Another seed in place of one that has led to so many failures: the same in equal runs."""
    return int(np.random.SeedSequence([seed, failures]).generate_state(1)[0] >> 1)


def _is_one(seed: Any) -> bool:
    return seed is None or isinstance(seed, (int, np.integer))


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
