"""Injected delays: how long each worker sleeps, and that nothing else changes."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import toy_envs as toy
from exact import assert_same
from gymnasium.vector import SyncVectorEnv
from toy_policy import Linear

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.comm.channel import WorkerError
from clusterenv_hpc.envs.delays import Delay, slow_down
from clusterenv_hpc.gradients.simulator import compute_times


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [
        (Delay(), (0.0, 0.0, 0.0)),
        (Delay(seconds=3.0), (0.0, 0.0, 0.0)),
        (Delay("equal", 0.5), (0.5, 0.5, 0.5)),
        (Delay("sqrt", 2.0), (2.0, 2.0 * math.sqrt(2), 2.0 * math.sqrt(3))),
        (Delay("linear", 0.5), (0.5, 1.0, 1.5)),
        (Delay("straggler", 0.1, factor=4), (0.1, 0.1, 0.4)),
        (Delay("list", values=(1.0, 0.0, 2.5)), (1.0, 0.0, 2.5)),
    ],
)
def test_schemes(delay: Delay, seconds: tuple[float, ...]) -> None:
    assert delay.by_worker(3) == pytest.approx(seconds)


def test_the_schemes_are_the_simulators() -> None:
    for scheme in ("equal", "sqrt", "linear", "straggler"):
        times = compute_times(scheme, 7, factor=100.0)
        np.testing.assert_allclose(Delay(scheme, 1.0, factor=100.0).by_worker(7), times)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"scheme": "slow"}, "one of none, equal, sqrt, linear, straggler, list; got 'slow'"),
        ({"seconds": -1.0}, "delay.seconds must be finite and not negative"),
        ({"seconds": math.nan}, "delay.seconds must be finite"),
        ({"factor": math.inf}, "delay.factor must be finite"),
        ({"scheme": "list", "values": (1.0, -1.0)}, "delay.values must be finite"),
        ({"scheme": "list"}, "got scheme='list' and 0 values"),
        ({"scheme": "equal", "values": (1.0,)}, "got scheme='equal' and 1 values"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Delay(**settings)


def test_values_for_another_number_of_workers() -> None:
    with pytest.raises(ValueError, match="one for each of 3 workers, got 2"):
        Delay("list", values=(1.0, 2.0)).by_worker(3)
    with pytest.raises(WorkerError, match="one for each of 3 workers, got 2"):
        ClusterEnv("CartPole-v1", 3, num_workers=3, delay=Delay("list", values=(1.0, 2.0)))


def test_a_step_takes_as_long_as_asked_and_gives_the_same() -> None:
    plain, slow = (SyncVectorEnv([toy.Walk] * 2) for _ in range(2))
    slow_down(slow, 0.01)
    same = [envs.reset(seed=1) for envs in (plain, slow)]
    assert_same(same[0][0], same[1][0])
    began = time.perf_counter()
    for _ in range(10):
        actions = np.zeros(2, int)
        assert_same(copy.deepcopy(plain.step(actions)[:4]), slow.step(actions)[:4])
    assert time.perf_counter() - began >= 0.1
    slow_down(plain, 0.0)
    assert "step" not in vars(plain), "without a delay nothing is in between"


def test_each_worker_sleeps_for_itself_and_counts_it() -> None:
    """In one process workers run one after the other; what each took is in the stats."""
    policy = Linear(toy.Walk.observation_space, toy.Walk.action_space)

    def run(delay: Delay | None) -> tuple[Any, dict[int, float]]:
        with ClusterEnv(toy.Walk, 4, policy=policy, num_workers=2, delay=delay) as envs:
            envs.reset(seed=3)
            rollout = copy.deepcopy(envs.rollout(10))
            return rollout, {rank: stages["env"] for rank, stages in envs.stats.seconds.items()}

    calm, _ = run(None)
    slow, seconds = run(Delay("straggler", 0.002, factor=10))
    for field in ("observations", "actions", "rewards", "valid"):
        assert_same(getattr(calm, field), getattr(slow, field), field)
    assert seconds[1] >= 0.02 and seconds[2] >= 0.2


# -- the other settings of where environments come from --------------------------------------------------------------


class Marked(gym.Wrapper):
    """Adds ``mark`` to rewards, and multiplies them by ``factor``."""

    def __init__(self, env: gym.Env, mark: float = 0.0, factor: float = 1.0) -> None:
        super().__init__(env)
        self.mark, self.factor = mark, factor

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return (observation, self.factor * (reward + self.mark), *rest)


def test_wrappers_go_around_each_environment_the_first_innermost() -> None:
    wrappers = [lambda env: Marked(env, mark=3.0), lambda env: Marked(env, factor=10.0)]
    with ClusterEnv(toy.Walk, 3, num_workers=2) as plain, ClusterEnv(toy.Walk, 3, wrappers=wrappers) as envs:
        for one in (plain, envs):
            one.reset(seed=1)
        assert envs.get_attr("mark") == (0.0, 0.0, 0.0)
        before, after = (one.step(np.zeros(3, int))[1] for one in (plain, envs))
        np.testing.assert_allclose(after, 10.0 * (before + 3.0))


def test_wrappers_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="expected backend='sync', got 'vector'"):
        ClusterEnv("CartPole-v1", 2, backend="vector", wrappers=[Marked])
    with pytest.raises(TypeError, match="callables that take an environment"):
        ClusterEnv("CartPole-v1", 2, wrappers=["Marked"])  # type: ignore[list-item]


def test_an_environment_by_its_import_path() -> None:
    with ClusterEnv("toy_envs:Walk", 2, env_kwargs={"mean_length": 3}) as envs:
        assert envs.get_attr("mean_length") == (3, 3)
    with ClusterEnv("toy_envs:VectorWalk", 4, backend="vector", env_kwargs={"base": 5}) as envs:
        assert envs.reset()[0][:, 0].tolist() == [5.0, 6.0, 7.0, 8.0]
    for name, part in (("toy_envs:Nothing", "Nothing"), ("no_such_module:Walk", "No module named 'no_such_module'")):
        with pytest.raises(WorkerError, match=part):
            ClusterEnv(name, 2)
