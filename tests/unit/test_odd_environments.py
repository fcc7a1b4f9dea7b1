"""Environments and policies that do what they should not: told as what it is, or kept from doing harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import clusterenv_hpc as ce
from clusterenv_hpc.comm.channel import WorkerError
from clusterenv_hpc.run.config import ConfigError, compose
from clusterenv_hpc.run.run_dir import claim


class Odd(gymnasium.Env[Any, Any]):
    """Counts its steps.  At the fifth it misbehaves as ``kind`` says; ``own_buffer`` hands out one array always."""

    def __init__(self, kind: Any = None, own_buffer: bool = False, length: int = 100) -> None:
        self.kind, self.own_buffer, self.length = kind, own_buffer, length
        self.observation_space = gymnasium.spaces.Box(-1000, 1000, (3,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.buffer = np.zeros(3, np.float32)
        self.time = 0

    def _observation(self) -> Any:
        self.buffer[:] = self.time
        if self.time == 5 and self.kind is not None:
            return self.kind
        return self.buffer if self.own_buffer else self.buffer.copy()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if np.isnan(action).any():
            raise AssertionError(f"invalid action {action}")
        self.time += 1
        return self._observation(), 1.0, False, self.time >= self.length, {}


def one_good_one_odd(kind: Any) -> Any:
    made: list[Odd] = []

    def make() -> Odd:
        made.append(Odd(kind if len(made) == 1 else None))
        return made[-1]

    return make


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_final_observations_survive_an_environment_that_writes_into_its_own_array(mode: str) -> None:
    with ce.ClusterEnv(
        Odd, 2, policy=torch.nn.Linear(3, 4), env_kwargs={"own_buffer": True, "length": 3}, autoreset_mode=mode, seed=1
    ) as envs:
        batch = envs.rollout(8)
    assert batch.truncated.any()
    assert (batch.next_observations[batch.valid] == batch.observations[batch.valid] + 1).all()
    assert (batch.next_observations[batch.truncated] == 3).all()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            np.zeros(4, np.float32),
            "an observation of shape (4,) and dtype float32, but its space says (3,) and float32",
        ),
        (np.array(["a", "b", "c"]), "of shape (3,) and dtype <U1, but its space says (3,) and float32"),
        (np.full(3, np.nan, np.float32), "an observation that is not a finite number"),
    ],
)
def test_a_wrong_observation_is_told_with_its_environment(kind: Any, said: str) -> None:
    with (
        pytest.raises(WorkerError) as caught,
        ce.ClusterEnv(one_good_one_odd(kind), 3, policy=torch.nn.Linear(3, 4), seed=1) as envs,
    ):
        envs.rollout(16)
    assert said in str(caught.value) and "environment 1" in str(caught.value)


def test_a_policy_that_changes_its_input_is_refused() -> None:
    class InPlace(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.mul_(0.5))

    with pytest.raises(WorkerError, match="changes its observations in place"):
        ce.ClusterEnv(Odd, 2, policy=InPlace(3, 4), seed=1)


def test_checkpoints_without_their_configuration_are_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "update-000000001.pt").touch()
    for resume in ("true", "false"):
        with pytest.raises(ConfigError, match=r"holds checkpoints but no config\.yaml"):
            claim(compose([f"run_dir={tmp_path}", f"resume={resume}"]))


def test_a_negative_seed_is_refused_and_harms_nothing() -> None:
    with ce.ClusterEnv("CartPole-v1", 2) as envs:
        for seed in (-1, [3, -1]):
            with pytest.raises(ValueError, match="at least 0"):
                envs.reset(seed=seed)
        observations, _ = envs.reset(seed=[None, 1])
        assert observations.shape == (2, 4)
