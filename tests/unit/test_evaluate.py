"""Evaluation: every seed's episode, whole and once, whatever its length; nothing of the training is disturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from clusterenv_hpc import cli
from clusterenv_hpc.envs.build import EnvError
from clusterenv_hpc.run.evaluate import SLOTS, evaluate
from clusterenv_hpc.run.schema import EnvConfig, EvalConfig

ID = "EvaluateToy-v0"
log: list[tuple[int | None, int]] = []
"""Seed and length of every episode that was played to its end."""


class Toy(gymnasium.Env[Any, Any]):
    """An episode as long as its seed says, with a reward of 1 for action 1; ``endless`` has no end at all."""

    observation_space = gymnasium.spaces.Dict(
        {"here": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32), "kind": gymnasium.spaces.Discrete(3)}
    )
    action_space = gymnasium.spaces.Discrete(2, start=3)

    def __init__(self, endless: bool = False, bad: int | None = None) -> None:
        self.endless, self.bad = endless, bad

    def _look(self) -> dict[str, Any]:
        return {"here": np.array([self.seed or 0, self.steps], np.float32), "kind": np.int64(self.steps % 3)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed, self.steps = seed, 0
        if self.bad == 0 and length(seed or 0) > 5:
            raise RuntimeError("no mesh for this seed")
        return self._look(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.steps += 1
        if self.steps == self.bad:
            raise SystemExit("the solver diverged")
        over = not self.endless and self.steps >= length(self.seed or 0)
        if over:
            log.append((self.seed, self.steps))
        return self._look(), float(action == 4), over, False, {}


def length(seed: int) -> int:
    return 1 + (seed * 7) % 13


class AlwaysSecond(torch.nn.Module):
    """Prefers action 4 by far where ``sure``, else not at all."""

    def __init__(self, sure: bool = True) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.tensor([0.0, 100.0 if sure else 0.0]))

    def forward(self, observations: Any) -> torch.Tensor:
        assert observations["here"].shape == (len(observations["kind"]), 2)
        return self.bias.expand(len(observations["kind"]), 2)


@pytest.fixture(autouse=True)
def registered() -> Any:
    log.clear()
    gymnasium.register(ID, Toy)
    yield
    del gymnasium.registry[ID]


def play(policy: torch.nn.Module, endless: bool = False, **settings: Any) -> Any:
    return evaluate(policy, EnvConfig(id=ID, kwargs={"endless": endless}), EvalConfig(**settings))


@pytest.mark.parametrize("episodes", [1, 5, SLOTS, SLOTS + 1, 4 * SLOTS + 3])
def test_every_seed_is_played_once_and_whole(episodes: int) -> None:
    result = play(AlwaysSecond(), episodes=episodes, seed=100)
    expected = [length(seed) for seed in range(100, 100 + episodes)]
    assert result.lengths.tolist() == expected and result.returns.tolist() == [float(n) for n in expected]
    assert sorted(log) == sorted((seed, length(seed)) for seed in range(100, 100 + episodes))
    assert result.cut == 0 and result.mean == pytest.approx(np.mean(expected))


def test_an_episode_without_an_end_is_cut_and_that_is_told() -> None:
    result = play(AlwaysSecond(), endless=True, episodes=3, max_steps=20)
    assert result.lengths.tolist() == [20, 20, 20] and result.cut == 3
    assert "3 of them cut off" in result.describe(False) and result.as_dict()["eval_cut"] == 3


def test_greedy_takes_the_mode_and_sampled_draws_the_same_every_time() -> None:
    first, second = (play(AlwaysSecond(sure=False), episodes=50, sampled=True) for _ in range(2))
    assert first.returns.tolist() == second.returns.tolist()
    assert 0.4 < first.returns.sum() / first.lengths.sum() < 0.6
    assert play(AlwaysSecond(sure=False), episodes=50).returns.sum() == 0.0  # of two equals the first


def test_nothing_global_is_drawn_from() -> None:
    import random

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    play(AlwaysSecond(sure=False), episodes=5, sampled=True)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize("bad", [0, 6])  # in reset, in the sixth step
def test_a_seed_that_always_fails_is_replaced_and_too_many_failures_are_told(bad: int) -> None:
    env = EnvConfig(id=ID, kwargs={"bad": bad}, on_error="restart", max_restarts=30)
    first, second = (evaluate(AlwaysSecond(), env, EvalConfig(episodes=20, seed=0)) for _ in range(2))
    assert first is not None and second is not None
    assert (first.lengths == second.lengths).all() and first.lengths.max() <= 5
    kept = [length(seed) <= 5 for seed in range(20)]
    assert 0 < sum(kept) < 20 and (first.lengths[kept] == [length(seed) for seed in range(20) if kept[seed]]).all()
    env.max_restarts = 1
    with pytest.raises(EnvError, match=r"in an evaluation once more than env.max_restarts=1 allows: \w+: .*"):
        evaluate(AlwaysSecond(), env, EvalConfig(episodes=20, seed=0))


def test_it_can_be_broken_off() -> None:
    assert evaluate(AlwaysSecond(), EnvConfig(id=ID), EvalConfig(episodes=3), stop=lambda: True) is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["workers=0", "total_steps=500", "log.progress=none", "log.tensorboard=false", "eval.episodes=3"]
    assert cli.main(["train", "env=cartpole", *short]) == 0
    trained = json.loads(Path("runs/cartpole-ppo-aps-s1/summary.json").read_text())
    capsys.readouterr()
    assert cli.main(["eval", "cartpole", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["eval_return_mean"] == trained["eval_return_mean"] and told["eval_episodes"] == 3
    assert told["checkpoint"].startswith("update-")
    assert cli.main(["eval", "latest", "episodes=5", "seed=3", "--sampled"]) == 0
    assert "sampled return" in (line := capsys.readouterr().out) and "over 5 episodes" in line
    for word, part in (("episodes=0", "episodes=0"), ("episode=3", "eval.episodes"), ("episodes=x", "an integer")):
        assert cli.main(["eval", "latest", word]) == 2
        assert part in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clusterenv_hpc.run.config import compose, to_yaml

    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/config.yaml").write_text(to_yaml(compose(["env=cartpole"])))
    assert cli.main(["eval", "a"]) == 2
    assert "no checkpoint yet" in capsys.readouterr().err
