"""Single environments to evaluate on: of the backend that was trained with, and again where they failed."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from flaky_env import Flaky, Maker, Plan
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from toy_policy import Linear

from clusterenv_hpc import cli
from clusterenv_hpc.envs.build import EnvSource
from clusterenv_hpc.envs.single import FirstOf, single_maker
from clusterenv_hpc.run.evaluate import evaluate
from clusterenv_hpc.run.schema import EnvConfig, EvalConfig


class Bare(gym.Env):
    """What the id's single environment shows: one number."""

    observation_space = gym.spaces.Box(-10.0, 1000.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2, start=5)

    def __init__(self, scale: float = 1.0) -> None:
        pass


class Prepared(VectorEnv):
    """What its vector entry point shows: the seed, the step, and the step's square; an episode has 4 steps."""

    def __init__(self, num_envs: int = 1, scale: float = 1.0) -> None:
        self.num_envs, self.scale = num_envs, scale
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = gym.spaces.Box(-10.0, 1000.0, (3,), np.float32)
        self.single_action_space = Bare.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _look(self) -> np.ndarray:
        return np.tile(np.array([self.seed, self.time, self.time**2], np.float32), (self.num_envs, 1))

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        self.seed, self.time = -1 if seed is None else seed, 0
        return self._look(), {}

    def step(self, actions):  # type: ignore[no-untyped-def]
        assert actions.shape == (self.num_envs,) and (actions >= 5).all()
        self.time += 1
        over = np.full(self.num_envs, self.time == 4)
        return self._look(), self.scale * self.seed * np.ones(self.num_envs), over, ~over & False, {}


@pytest.fixture(autouse=True)
def registered():  # type: ignore[no-untyped-def]
    gym.register("SingleToy-v0", Bare, vector_entry_point=Prepared)
    yield
    del gym.registry["SingleToy-v0"]


def test_a_vector_environment_that_shows_something_else_is_taken_as_it_is() -> None:
    env = single_maker(EnvSource("SingleToy-v0", backend="vector"))()
    assert isinstance(env, FirstOf) and env.observation_space.shape == (3,)
    observation, _ = env.reset(seed=7)
    assert observation.tolist() == [7, 0, 0]
    told = [env.step(np.int64(6)) for _ in range(4)]
    assert [step[0].tolist() for step in told] == [[7, k, k * k] for k in range(1, 5)], "each a copy"
    assert [step[1:4] for step in told] == [(7.0, False, False)] * 3 + [(7.0, True, False)]
    assert env.reset(seed=3)[0].tolist() == [3, 0, 0]


def test_one_that_shows_the_same_is_made_singly() -> None:
    for source in (EnvSource("CartPole-v1", backend="vector"), EnvSource("CartPole-v1"), EnvSource("toy_envs:Walk")):
        assert not isinstance(single_maker(source)(), FirstOf)
    made = single_maker(EnvSource("toy_envs:VectorWalk", backend="vector"))()
    assert isinstance(made, FirstOf)


def test_evaluation_sees_what_training_saw_but_for_what_it_changes() -> None:
    policy = Linear(Prepared(1).single_observation_space, Bare.action_space)
    env = EnvConfig(id="SingleToy-v0", backend="vector", kwargs={"scale": 2.0}, eval_kwargs={"scale": 10.0})
    result = evaluate(policy, env, EvalConfig(episodes=3, seed=1))
    assert result is not None
    assert result.returns.tolist() == [40.0, 80.0, 120.0] and result.lengths.tolist() == [4, 4, 4]


# -- failures --------------------------------------------------------------------------------------------------------


class Source(Maker):
    """Named by its path in a configuration: ``test_single:source``."""


def settings(plan: Plan, monkeypatch: pytest.MonkeyPatch, on_error: str = "restart", limit: int = 10) -> EnvConfig:
    import sys

    maker = Maker(plan)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "source", maker, raising=False)
    return EnvConfig(id=f"{__name__}:source", on_error=on_error, max_restarts=limit)


@pytest.mark.parametrize(
    "plan", [{0: ("step", 3)}, {1: ("reset", 2), 4: ("step", 1)}, {0: ("step", 7), 4: ("reset", 1)}]
)
def test_an_episode_that_failed_is_played_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Linear(Flaky.observation_space, Flaky.action_space)
    result = evaluate(policy, settings(plan, monkeypatch), EvalConfig(episodes=3))
    assert result is not None
    assert result.returns.tolist() == [28.0] * 3 and result.lengths.tolist() == [7] * 3


def test_but_not_for_ever_and_not_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Linear(Flaky.observation_space, Flaky.action_space)
    plan: Plan = {instance: ("step", 3) for instance in range(50)}
    with pytest.raises(RuntimeError, match="planned for step 3 of instance 2"):
        evaluate(policy, settings(plan, monkeypatch, limit=2), EvalConfig(episodes=1))
    with pytest.raises(RuntimeError, match="planned for step 3 of instance 0"):
        evaluate(policy, settings(plan, monkeypatch, on_error="abort"), EvalConfig(episodes=1))


def test_a_run_with_flaky_and_slow_environments(tmp_path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """From the command line to the summary."""
    import json

    monkeypatch.chdir(tmp_path)
    plan: Plan = {1: ("step", 20), 2: ("step", 31), 5: ("step", 2)}
    name = settings(plan, monkeypatch).id
    words = (
        f"env.id={name} env.on_error=restart env.delay.scheme=straggler env.delay.seconds=0.0005 run_dir=run "
        "workers=0 logical_workers=2 envs_per_worker=2 total_steps=200 algo.num_steps=10 algo.minibatch_size=20 "
        "eval.episodes=2 log.progress=none log.tensorboard=false"
    )
    assert cli.main(["train", *words.split()]) == 0
    said = capsys.readouterr()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["env_steps"] == 200 and summary["env_restarts"] == 3
    counts = [count for rows in summary["restarts_by_rank_since_start"].values() for count in rows.values()]
    assert sum(counts) == 3
    assert "were built anew 3 times" in said.out and "was built anew (restart 1): RuntimeError: planned" in said.err
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["env_restarts"] == 3 and records[0]["env_restarts"] == 0
    seconds = summary["seconds_by_rank_since_start"]
    assert seconds["2"]["env"] > 3 * seconds["1"]["env"]
