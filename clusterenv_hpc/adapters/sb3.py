"""Stable-Baselines3 on ``ClusterEnv``: its algorithms learn on rank 0, the environments run on the worker ranks.

    with ClusterEnv("CartPole-v1", 16, autoreset_mode="SameStep") as envs:
        PPO("MlpPolicy", SB3VecEnv(envs)).learn(100_000)

Needs the extra ``sb3``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from ..cluster_env import ClusterEnv

try:
    from stable_baselines3.common.vec_env import VecEnv
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "clusterenv_hpc.adapters.sb3 needs Stable-Baselines3: pip install 'clusterenv_hpc[sb3]'"
    ) from error


class SB3VecEnv(VecEnv):
    """A ``VecEnv``: resets within the step that ends an episode, and tells the final observation in the infos.

    Args:
        envs: with ``autoreset_mode="SameStep"``, which is how a ``VecEnv`` resets.

    Raises:
        ValueError: ``envs`` resets in another way.
    """

    def __init__(self, envs: ClusterEnv) -> None:
        mode = AutoresetMode(envs.metadata["autoreset_mode"])
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"a VecEnv resets within the step that ends an episode: expected "
                f"ClusterEnv(..., autoreset_mode='SameStep'), got {mode.value!r}"
            )
        self.envs = envs
        self._actions: Any = None
        self._returns, self._lengths = np.zeros(envs.num_envs), np.zeros(envs.num_envs, np.int64)
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        """The first observations; seeds given by ``seed`` count once."""
        given = [None if seed is None else int(seed) for seed in self._seeds]
        seed = None if all(one is None for one in given) else given
        if seed is not None and self.envs.backend != "sync":
            seed = given[0]  # type: ignore[assignment]
        observation, infos = self.envs.reset(seed=seed)
        self.reset_infos = [_row_of(infos, i) for i in range(self.num_envs)]
        self._returns[:], self._lengths[:] = 0.0, 0
        self._reset_seeds()
        self._reset_options()
        return observation

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep ``actions`` for ``step_wait``."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Observations, rewards, whether episodes ended, and an info for each environment.

        Where one ended, its info holds ``terminal_observation``, ``TimeLimit.truncated`` (ended by truncation alone)
        and ``episode`` (its return ``r`` and length ``l``), as SB3's own wrappers write them.
        """
        observation, rewards, terminated, truncated, infos = self.envs.step(self._actions)
        done = np.logical_or(terminated, truncated)
        self._returns += rewards
        self._lengths += 1
        rows = [_row_of(infos, i) for i in range(self.num_envs)]
        for i in np.flatnonzero(done).tolist():
            info = rows[i]
            info["terminal_observation"] = info.pop("final_obs")
            info |= info.pop("final_info", None) or {}
            info["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
            info["episode"] = {"r": float(self._returns[i]), "l": int(self._lengths[i]), "t": 0.0}
        self._returns[done], self._lengths[done] = 0.0, 0
        return observation, rewards.astype(np.float32), done, rows

    def close(self) -> None:
        """Close the environments on all ranks."""
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The attribute of the environments that ``indices`` names."""
        if attr_name == "render_mode":  # asked for before anything else, also of backends without single environments
            return [self.envs.render_mode for _ in self._get_indices(indices)]
        values = self.envs.get_attr(attr_name)
        return [values[i] for i in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set it: for all environments only."""
        self._demand_all("set_attr", indices)
        self.envs.set_attr(attr_name, value)

    def _demand_all(self, what: str, indices: Any) -> None:
        if list(self._get_indices(indices)) != list(range(self.num_envs)):
            raise NotImplementedError(f"{what} on ClusterEnv is for all environments: leave indices out")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call the method: of all environments only."""
        self._demand_all("env_method", indices)
        return list(self.envs.call(method_name, *args, **kwargs))

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """False: wrappers stay on the worker ranks, and ``episode`` comes without a Monitor."""
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[Any]:
        """What each environment renders."""
        return self.envs.render() or ()


def _row_of(infos: dict[str, Any], row: int) -> dict[str, Any]:
    """The info of one environment out of a vector environment's."""
    found: dict[str, Any] = {}
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        if mask is not None and not np.asarray(mask)[row]:
            continue
        if isinstance(value, dict):
            found[key] = _row_of(value, row)
        elif isinstance(value, np.ndarray) and len(value):
            found[key] = value[row]
    return found


__all__ = ["SB3VecEnv"]
