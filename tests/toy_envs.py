"""Small real environments that together use every corner of Gymnasium's interface.

All of them draw only from ``self.np_random``, so what they do depends on seeds and actions alone.  Each info tells
how the action arrived (``type`` and dtype), so that a transport that changes an action's type is noticed.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


def told(action: Any) -> str:
    """How an action looks to the environment: its type, and that of its parts."""
    if isinstance(action, dict):
        return "{" + ", ".join(f"{key}: {told(item)}" for key, item in action.items()) + "}"
    if isinstance(action, tuple):
        return "(" + ", ".join(map(told, action)) + ")"
    kind = type(action).__name__
    return f"{kind}:{action.dtype}:{action.shape}" if hasattr(action, "dtype") else kind


class Walk(gym.Env):
    """Short episodes of random length, ended by termination or by truncation, each about half of the time."""

    metadata = {"render_modes": ["ansi"], "speed": 3, "names": ("a", "b")}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space: spaces.Space = spaces.Discrete(3)

    def __init__(self, mean_length: int = 8, render_mode: str | None = None) -> None:
        self.mean_length, self.render_mode = mean_length, render_mode
        self.gain, self.label = 1.0, "walk"
        self.closed_with: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 2 * self.mean_length))
        self.by_truncation = bool(self.np_random.random() < 0.5)
        self.time = 0
        self.position = self.np_random.normal(size=3)
        if options and "shift" in options:
            self.position += options["shift"]
        return self.observe(), self.info(None)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        self.left -= 1
        self.position += self.gain * self.np_random.normal(size=3)
        over = self.left == 0
        reward = self.reward(action)
        return self.observe(), reward, over and not self.by_truncation, over and self.by_truncation, self.info(action)

    def observe(self) -> Any:
        return self.position.astype(np.float32)

    def reward(self, action: Any) -> float:
        return float(self.position[0]) / 3

    def info(self, action: Any) -> dict[str, Any]:
        return {"took": told(action)}

    def render(self) -> str:
        return f"{self.position[0]:.6f}"

    def scaled(self, factor: float, *, times: int = 1) -> float:
        """For ``call``."""
        return float(self.position[1]) * factor**times

    @property
    def halves(self) -> tuple[int, float]:
        """For ``get_attr``."""
        return self.time // 2, self.time / 2

    def fail(self) -> None:
        """For ``call``."""
        raise RuntimeError("asked to fail")

    def unsendable(self) -> Any:
        """For ``call``."""
        return {"inner": [object()]}


class Kinds(Walk):
    """A nested observation of every kind, and infos of every kind."""

    observation_space = spaces.Dict(
        {
            "zebra": spaces.Box(0, 255, (4, 5, 3), np.uint8),
            "apple": spaces.Tuple(
                (
                    spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
                    spaces.Discrete(5, start=-2),
                    spaces.Dict({"bits": spaces.MultiBinary((2, 3)), "one": spaces.MultiBinary(4)}),
                )
            ),
            "many": spaces.MultiDiscrete([3, 4], start=[1, -1]),
            "matrix": spaces.MultiDiscrete([[3, 4], [5, 6]], dtype=np.int32),
            "flag": spaces.Discrete(2, dtype=np.int32),
            "scalar": spaces.Box(-1.0, 1.0, (), np.float32),
            "half": spaces.Box(-1.0, 1.0, (2,), np.float16),
        }
    )
    action_space = spaces.MultiDiscrete([3, 2, 4])

    def observe(self) -> Any:
        random = self.np_random
        return {
            "zebra": random.integers(0, 256, (4, 5, 3), dtype=np.uint8),
            "apple": (
                random.normal(size=(2, 2)),
                int(random.integers(-2, 3)),
                {
                    "bits": random.integers(0, 2, (2, 3)).astype(np.int8),
                    "one": random.integers(0, 2, 4).astype(np.int8),
                },
            ),
            "many": np.array([random.integers(1, 4), random.integers(-1, 3)]),
            "matrix": random.integers(0, 3, (2, 2)).astype(np.int32),
            "flag": np.int32(random.integers(2)),
            "scalar": np.float32(random.random()),
            "half": random.random(2).astype(np.float16),
        }

    def reward(self, action: Any) -> float:
        return np.float32(self.position[0])  # type: ignore[return-value]

    def info(self, action: Any) -> dict[str, Any]:
        random = self.np_random
        info: dict[str, Any] = {
            "int": int(random.integers(10)),
            "float": float(random.random()),
            "bool": bool(random.integers(2)),
            "numpy_bool": np.bool_(random.integers(2)),
            "int8": np.int8(random.integers(10)),
            "float32": np.float32(random.random()),
            "array": random.random((2, 3)).astype(np.float32),
            "strings": np.array(["ab", "c"]),
            "objects": np.array([1, "x", None], dtype=object),
            "text": "abc"[: random.integers(1, 4)],
            "bytes": b"\x00\xff",
            "none": None,
            "list": [1, 2.5, "x", (1, 2)],
            "tuple": (1, np.float32(2)),
            "complex": 1 + 2j,
            "nested": {"int": int(random.integers(10)), "deeper": {"array": random.random(2)}, "empty": {}},
            "took": told(action),
            "left": self.left,
        }
        if self.time % 3 == 1:
            info["sometimes"] = float(self.time)
            info["nested"]["sometimes"] = "odd"
        if self.left % 2:
            info["odd_ones"] = np.full(2, self.left)
        if self.by_truncation:
            info["varying"] = self.time if self.time % 2 else float(self.time)  # the first one's type decides
        return info


class NoInfo(Walk):
    """Never any info, so that none crosses the wire."""

    def info(self, action: Any) -> dict[str, Any]:
        return {}


class RareInfo(Walk):
    """Infos on few steps of few environments."""

    def info(self, action: Any) -> dict[str, Any]:
        return {"rare": self.time} if self.time % 7 == 3 and self.by_truncation else {}


class Aliasing(Walk):
    """Gives the same dict and the same arrays away again and again, and changes them in place."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mine: dict[str, Any] = {"array": np.zeros(2), "inner": {"count": 0}, "list": []}
        self.buffer = np.zeros(3, np.float32)

    def observe(self) -> Any:
        self.buffer[:] = self.position
        return self.buffer

    def info(self, action: Any) -> dict[str, Any]:
        self.mine["array"] += 1.0
        self.mine["inner"]["count"] += 1
        self.mine["time"] = self.time
        return self.mine


class BoxActions(Walk):
    """Continuous actions of rank 2 in float64."""

    action_space = spaces.Box(-2.0, 3.0, (2, 2), np.float64)

    def reward(self, action: Any) -> float:
        return float(np.sum(action))


class FloatActions(Walk):
    """Continuous actions in float32, some without bounds."""

    action_space = spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32))

    def reward(self, action: Any) -> float:
        return float(np.sum(action))


class FromMinusTwo(Walk):
    """Discrete actions that do not start at 0, and Discrete observations."""

    observation_space = spaces.Discrete(7, start=-3)
    action_space = spaces.Discrete(4, start=-2)

    def observe(self) -> Any:
        return int(self.np_random.integers(-3, 4))

    def reward(self, action: Any) -> float:
        assert self.action_space.contains(action), action
        return float(action)


class BinaryActions(Walk):
    """MultiBinary both ways."""

    observation_space = spaces.MultiBinary(5)
    action_space = spaces.MultiBinary(3)

    def observe(self) -> Any:
        return self.np_random.integers(0, 2, 5).astype(np.int8)

    def reward(self, action: Any) -> float:
        return float(np.sum(action))


class NestedActions(Walk):
    """Dict and Tuple actions, and a Tuple observation."""

    observation_space = spaces.Tuple((spaces.Discrete(4), spaces.Box(-np.inf, np.inf, (2,), np.float64)))
    action_space = spaces.Dict(
        {
            "steer": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "gear": spaces.Discrete(5),
            "pair": spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3]))),
        }
    )

    def observe(self) -> Any:
        return int(self.np_random.integers(4)), self.np_random.normal(size=2)

    def reward(self, action: Any) -> float:
        return float(np.sum(action["steer"])) + float(action["gear"])


class Image(Walk):
    """uint8 images."""

    observation_space = spaces.Box(0, 255, (20, 16, 3), np.uint8)

    def observe(self) -> Any:
        return self.np_random.integers(0, 256, (20, 16, 3), dtype=np.uint8)


class Wide(Walk):
    """An observation of 1.6 MB: more than any transport sends eagerly."""

    observation_space = spaces.Box(-np.inf, np.inf, (200_000,), np.float64)

    def observe(self) -> Any:
        return np.full(200_000, self.position[0])


class Faulty(Walk):
    """Fails on purpose: ``where`` is constructor, exit_at_once, reset, step, exit, close, nan, infinite, inf_reward, ..

    Which environment: the one whose first reset was seeded with ``seed`` (None: each), from its step ``after`` on.
    """

    def __init__(
        self, where: str = "", seed: int | None = None, after: int = 3, hang_s: float = 60.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.where, self.which, self.after, self.hang_s = where, seed, after, hang_s
        self.steps, self.mine = 0, seed is None
        if where == "constructor":
            raise ValueError("no such level")
        if where == "exit_at_once":
            raise SystemExit(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.mine = self.which in (None, seed)
        if self.mine and self.where == "reset":
            raise ValueError("cannot reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self.steps += 1
        if self.mine and self.steps >= self.after:
            if self.where == "step":
                raise ZeroDivisionError("the simulator broke")
            if self.where == "exit":
                raise SystemExit(3)
            if self.where == "nan":
                observation = np.array([0.0, np.nan, 0.0], np.float32)
            if self.where == "infinite":
                observation = np.array([0.0, np.inf, 0.0], np.float32)
            if self.where == "inf_reward":
                reward = np.inf
            if self.where == "info":
                info = {"outer": {"inner": object()}}
            if self.where == "hang":
                time.sleep(self.hang_s)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        if self.where == "close":
            raise OSError("cannot close")


class Slow(Walk):
    """Each step takes ``delay_s`` seconds of sleep."""

    def __init__(self, delay_s: float = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.delay_s = delay_s

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.delay_s)
        return super().step(action)


class Wrapped(gym.Wrapper):
    """An attribute of its own, and one that hides the inner environment's."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.outer, self.label = 7, "wrapper"


def wrapped(**kwargs: Any) -> gym.Env:
    """Two wrappers around a ``Walk``, one of which counts time."""
    return gym.wrappers.TimeLimit(Wrapped(Walk(**kwargs)), max_episode_steps=5)


class VectorWalk(VectorEnv):
    """A vectorised environment, of the kind that a ``vector_entry_point`` makes: counts up to a length of its row.

    Observation: (row's length, steps so far, episodes so far).  Ends by termination in even rows, by truncation in
    odd ones.  Reward: steps so far.
    """

    def __init__(self, num_envs: int, mode: str = "NextStep", base: int = 3) -> None:
        self.num_envs, self.mode = num_envs, AutoresetMode(mode)
        self.metadata = {"autoreset_mode": self.mode}
        self.single_observation_space = spaces.Box(0, 1e6, (3,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.lengths = base + np.arange(num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        if not hasattr(self, "count"):
            self.count, self.episodes = np.zeros(self.num_envs), np.zeros(self.num_envs)
            self.ended = np.zeros(self.num_envs, bool)
        else:
            self.episodes[mask] += 1
        self.count[mask] = 0
        self.ended[mask] = False
        return self._observe(), {}

    def _observe(self) -> Any:
        return np.stack([self.lengths, self.count, self.episodes], axis=1).astype(np.float32)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        fresh = self.ended if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        self.count = np.where(fresh, 0, self.count + 1)
        self.episodes += fresh
        reward = np.where(fresh, 0.0, self.count)
        over = (self.count >= self.lengths) & ~fresh
        even = np.arange(self.num_envs) % 2 == 0
        infos: dict[str, Any] = {"count": self.count.astype(np.int32), "_count": ~fresh, "version": "one"}
        observation = self._observe()
        if self.mode is AutoresetMode.SAME_STEP:
            if over.any():
                final = np.full(self.num_envs, None, dtype=object)
                for row in np.flatnonzero(over):
                    final[row] = observation[row].copy()
                infos |= {"final_obs": final, "_final_obs": over.copy()}
            self.count[over] = 0
            self.episodes[over] += 1
            observation = self._observe()
        self.ended = over
        return observation, reward, over & even, over & ~even, infos
