"""One environment to look at or to evaluate on, of whatever backend the workers use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from .build import EnvSource, build_vector_env, make_env, named_callable
from .spaces import map_tree


class FirstOf(gym.Env[Any, Any]):
    """The only row of a vector environment, as a single one.  It must be reset when an episode has ended."""

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        self.envs = envs
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space
        self.metadata = envs.metadata

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._row(self.envs.reset(seed=seed, options=options)[0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        into: Any = create_empty_array(self.action_space, 1)
        actions = concatenate(self.action_space, [action], into)
        observation, rewards, terminated, truncated, _ = self.envs.step(actions)
        return self._row(observation), float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def _row(self, batch: Any) -> Any:
        return map_tree(lambda array: array.copy(), next(iter(iterate(self.envs.observation_space, batch))))

    def close(self) -> None:
        self.envs.close()


def single_maker(source: EnvSource) -> Callable[[], gym.Env[Any, Any]]:
    """Makes single environments that look like what workers step.

    Where a vectorised implementation sees and does the same as the single environment of its id, that one is made; else
    (EnvPool's own environments, Atari games preprocessed by the vector environment) it is a vector environment of one.

    Raises:
        EnvError: they cannot be built.
    """
    if source.backend == "sync":
        return lambda: make_env(source, 0)

    def first() -> gym.Env[Any, Any]:
        return FirstOf(build_vector_env(source, 1))

    if not isinstance(source.env, str) or named_callable(source.env) is not None:
        return first
    if source.env.rpartition(":")[2] not in gym.registry:
        return first
    single = dataclasses.replace(source, backend="sync")
    try:
        one, other = make_env(single, 0), first()
    except Exception:  # other keyword arguments, most probably
        return first
    alike = one.observation_space == other.observation_space and one.action_space == other.action_space
    one.close()
    other.close()
    return (lambda: make_env(single, 0)) if alike else first
