"""Stable-Baselines3, the real one, on ClusterEnv: step by step what its own DummyVecEnv gives, and it learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import toy_envs as toy

from clusterenv_hpc.cluster_env import ClusterEnv

pytestmark = pytest.mark.needs("sb3")


def made(env: Any = toy.Walk, num_envs: int = 3, **kwargs: Any) -> Any:
    from clusterenv_hpc.adapters.sb3 import SB3VecEnv

    return SB3VecEnv(ClusterEnv(env, num_envs, num_workers=2, autoreset_mode="SameStep", **kwargs))


def test_it_gives_what_a_dummy_vec_env_gives() -> None:
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    mine, theirs = made(), DummyVecEnv([lambda: Monitor(toy.Walk())] * 3)
    for envs in (mine, theirs):
        envs.seed(5)
    np.testing.assert_array_equal(mine.reset(), theirs.reset())
    rng, ended, by_truncation = np.random.default_rng(0), 0, 0
    for _ in range(120):
        actions = rng.integers(0, 3, 3)
        (a, r, d, infos), (b, q, e, wanted) = mine.step(actions), theirs.step(actions)
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(r, q)
        np.testing.assert_array_equal(d, e)
        assert r.dtype == q.dtype == np.float32
        for info, other in zip(infos, wanted, strict=True):
            assert info.get("TimeLimit.truncated", False) == other["TimeLimit.truncated"]
            assert ("terminal_observation" in info) == ("terminal_observation" in other)
            if "episode" in other:
                ended += 1
                by_truncation += other["TimeLimit.truncated"]
                np.testing.assert_array_equal(info["terminal_observation"], other["terminal_observation"])
                assert info["episode"]["l"] == other["episode"]["l"]
                assert info["episode"]["r"] == pytest.approx(other["episode"]["r"], abs=1e-5)
    assert ended > 20 and 0 < by_truncation < ended
    mine.close()


def test_its_ppo_trains_on_it() -> None:
    from stable_baselines3 import PPO

    envs = made("CartPole-v1", 4)
    model = PPO("MlpPolicy", envs, n_steps=32, batch_size=64, n_epochs=1, device="cpu", seed=3)
    model.learn(256)
    assert model.num_timesteps == 256 and len(model.ep_info_buffer) > 3
    envs.close()


def test_attributes_and_methods() -> None:
    envs = made()
    envs.reset()
    assert envs.get_attr("label") == ["walk"] * 3 and envs.get_attr("gain", indices=[1]) == [1.0]
    envs.set_attr("gain", 2.0)
    assert envs.get_attr("gain") == [2.0] * 3 and len(envs.env_method("scaled", 2.0)) == 3
    for call in (lambda: envs.set_attr("gain", 1.0, indices=[0]), lambda: envs.env_method("scaled", 2.0, indices=0)):
        with pytest.raises(NotImplementedError, match="for all environments: leave indices out"):
            call()
    envs.close()


def test_another_way_to_reset_is_refused() -> None:
    from clusterenv_hpc.adapters.sb3 import SB3VecEnv

    with ClusterEnv(toy.Walk, 2) as envs, pytest.raises(ValueError, match=r"autoreset_mode='SameStep'\), got 'Next"):
        SB3VecEnv(envs)
