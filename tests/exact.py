"""Equality without mercy: types, dtypes, shapes, key order and every bit."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


def assert_same(got: Any, expected: Any, path: str = "it") -> None:
    """``got`` is ``expected`` to the last bit; NaN equals NaN of the same bits."""
    assert type(got) is type(expected), f"{path}: {type(got).__name__}, expected {type(expected).__name__}"
    if isinstance(expected, dict):
        assert list(got) == list(expected), f"{path}: keys {list(got)}, expected {list(expected)}"
        for key, value in expected.items():
            assert_same(got[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{path}: {len(got)} items, expected {len(expected)}"
        for i, value in enumerate(expected):
            assert_same(got[i], value, f"{path}[{i}]")
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype, f"{path}: {got.dtype}, expected {expected.dtype}"
        assert got.shape == expected.shape, f"{path}: {got.shape}, expected {expected.shape}"
        if expected.dtype.hasobject:
            for i, value in enumerate(expected.ravel().tolist()):
                assert_same(got.ravel().tolist()[i], value, f"{path}[{i}]")
        else:
            assert got.tobytes() == expected.tobytes(), f"{path}: {got!r}, expected {expected!r}"
    elif isinstance(expected, np.generic):
        assert got.dtype == expected.dtype and got.tobytes() == expected.tobytes(), (
            f"{path}: {got!r}, expected {expected!r}"
        )
    elif isinstance(expected, float):
        assert np.float64(got).tobytes() == np.float64(expected).tobytes(), f"{path}: {got!r}, expected {expected!r}"
    else:
        assert got == expected, f"{path}: {got!r}, expected {expected!r}"


def sync_reference(
    env: Any, num_envs: int, env_kwargs: dict[str, Any] | None = None, mode: str = "NextStep"
) -> SyncVectorEnv:
    """The ``SyncVectorEnv`` that a ``ClusterEnv`` must equal."""
    kwargs = env_kwargs or {}
    make = (lambda: gym.make(env, **kwargs)) if isinstance(env, str) else (lambda: env(**kwargs))
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode(mode))


def assert_same_spaces(envs: Any, reference: SyncVectorEnv) -> None:
    """Spaces, metadata and what else a script may look at."""
    for name in ("single_observation_space", "single_action_space", "observation_space", "action_space"):
        assert getattr(envs, name) == getattr(reference, name), f"{name}: {getattr(envs, name)}"
        assert repr(getattr(envs, name)) == repr(getattr(reference, name))
    assert_same(dict(envs.metadata), reference.metadata, "metadata")
    assert envs.num_envs == reference.num_envs and envs.render_mode == reference.render_mode


def drive(envs: Any, reference: SyncVectorEnv, steps: int, seed: int = 3, options: dict[str, Any] | None = None) -> int:
    """Reset both in every way and step both with the same actions; every answer must be the same.

    Returns how many episodes ended.
    """
    n, ended = reference.num_envs, 0
    reference.action_space.seed(seed)
    random = np.random.default_rng(seed)
    assert_same_spaces(envs, reference)
    resets: list[dict[str, Any]] = [
        {"seed": seed},
        {"seed": [int(s) for s in random.integers(0, 2**31, n)], "options": options},
        {"seed": None},
        {"seed": [7 if i % 2 else None for i in range(n)], "options": options},
    ]
    share = -(-steps // len(resets))
    for arguments in resets:
        options_before = None if arguments.get("options") is None else dict(arguments["options"])
        assert_same(envs.reset(**arguments), reference.reset(**arguments), f"reset({arguments})")
        assert arguments.get("options") == options_before
        for t in range(share):
            actions = reference.action_space.sample()
            got, expected = envs.step(actions), reference.step(actions)
            assert_same(got, expected, f"step {t} after reset({arguments})")
            done = expected[2] | expected[3]
            ended += int(done.sum())
            disabled = reference.autoreset_mode is AutoresetMode.DISABLED
            if (disabled and done.any()) or (not disabled and t % 97 == 50):
                mask = done.copy() if disabled else random.random(n) < 0.4
                mask[int(random.integers(n))] |= not mask.any()
                seeds = [int(s) for s in random.integers(0, 2**31, n)] if t % 2 else None
                again = [{"reset_mask": mask.copy(), **(options or {})} for _ in range(2)]
                assert_same(
                    envs.reset(seed=seeds, options=again[0]),
                    reference.reset(seed=seeds, options=again[1]),
                    f"mask at step {t}",
                )
                assert_same(again[0], again[1], "the options given")
    return ended
