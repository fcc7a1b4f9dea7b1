"""EnvPool's C++ environments as a Gymnasium vector environment; needs the extra ``envpool``.

EnvPool seeds its environments when it makes them, so a seeded reset makes them anew.  It resets in the step after an
episode's end (``NEXT_STEP``).  Its environments are ports: faster, but not bit-equal to Gymnasium's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class EnvPoolEnvs(VectorEnv[Any, Any, Any]):
    """``num_envs`` environments of EnvPool, stepped in one thread (each worker rank has one).

    Args:
        env_id: as EnvPool names it.
        num_envs: how many.
        kwargs: EnvPool's own settings, e.g. ``max_episode_steps``; ``num_threads`` included.

    Raises:
        ModuleNotFoundError: the extra is not installed.  ValueError: EnvPool has no such environment.
    """

    def __init__(self, env_id: str, num_envs: int, kwargs: Mapping[str, Any]) -> None:
        try:
            import envpool
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "backend=envpool needs EnvPool: pip install 'clusterenv_hpc[envpool]', or choose another backend"
            ) from None
        if env_id not in envpool.list_all_envs():
            raise ValueError(f"EnvPool has no environment {env_id!r}; choose backend=sync")
        self._make = lambda seed: envpool.make(
            env_id, env_type="gymnasium", num_envs=num_envs, seed=seed, **{"num_threads": 1, **kwargs}
        )
        self.num_envs = num_envs
        self._pool = self._make(0)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = None
        self.single_observation_space = _open_bounds(self._pool.observation_space)
        self.single_action_space = self._pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all; with a ``seed`` the environments are made anew from it.

        Raises:
            ValueError: for options, which EnvPool does not know.
        """
        if options:
            raise ValueError(f"backend=envpool knows no reset options, got {sorted(options)}; use backend='sync'")
        if seed is not None:
            self._pool.close()
            self._pool = self._make(int(seed) % 2**31)
        observation, infos = self._pool.reset()
        return observation, _arrays(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As Gymnasium's; rewards are float32."""
        array = np.asarray(actions)
        if array.dtype == np.int64:  # EnvPool takes 32-bit integers only
            array = array.astype(np.int32)
        observation, rewards, terminated, truncated, infos = self._pool.step(array)
        return observation, rewards, terminated, truncated, _arrays(infos)

    def close_extras(self, **kwargs: Any) -> None:
        """Stop EnvPool's threads."""
        self._pool.close()


def _arrays(infos: dict[str, Any]) -> dict[str, Any]:
    """EnvPool's infos without its own bookkeeping, whose ids count from 0 on every worker."""
    return {key: value for key, value in infos.items() if key not in ("env_id", "players")}


def _open_bounds(space: Any) -> Any:
    """EnvPool writes C++'s smallest and largest floats where it knows no bound."""
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    low = np.where(np.isin(space.low, [limits.tiny, limits.min, -limits.max]), -np.inf, space.low)
    high = np.where(space.high == limits.max, np.inf, space.high)
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
