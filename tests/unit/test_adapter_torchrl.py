"""Batches in TorchRL's form; with the real TensorDict where that is installed, with plain dicts where it is not."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import toy_envs as toy
from toy_policy import Linear

from clusterenv_hpc.adapters.torchrl import as_batch, batches
from clusterenv_hpc.cluster_env import ClusterEnv


def made(env: Any) -> ClusterEnv:
    return ClusterEnv(env, 4, policy=Linear(env.observation_space, env.action_space), num_workers=2)


@pytest.fixture(params=[pytest.param("tensordict", marks=pytest.mark.needs("tensordict")), "dict"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "dict":
        monkeypatch.setitem(sys.modules, "tensordict", None)
    return {"tensordict": "TensorDict", "dict": "dict"}[request.param]


@pytest.mark.parametrize("env", [toy.Walk, toy.Kinds])
def test_an_iterator_over_batches(env: Any, kind: str) -> None:
    with made(env) as envs:
        got = list(batches(envs, 40, 80))
        assert len(got) == 2 and {type(batch).__name__ for batch in got} == {kind}
        if kind == "TensorDict":
            assert got[0].batch_size == (4, 10)
        with pytest.raises(ValueError, match="multiple of num_envs=4, got 41"):
            next(batches(envs, 41))


def test_what_one_holds(kind: str) -> None:
    with made(toy.Walk) as envs:
        rollout = envs.rollout(30)
        batch = as_batch(rollout, envs)
    assert not rollout.valid.all()
    np.testing.assert_array_equal(batch["observation"].numpy(), rollout.observations.swapaxes(0, 1))
    np.testing.assert_array_equal(batch["next"]["observation"].numpy(), rollout.next_observations.swapaxes(0, 1))
    np.testing.assert_array_equal(batch["collector"]["mask"].numpy(), rollout.valid.T)
    np.testing.assert_array_equal(batch["next"]["reward"][..., 0].numpy(), rollout.rewards.T.astype(np.float32))
    for name in ("terminated", "truncated"):
        np.testing.assert_array_equal(batch["next"][name][..., 0].numpy(), getattr(rollout, name).T)
    behaviour = torch.distributions.Categorical(logits=torch.from_numpy(rollout.behaviour_params.copy()))
    wanted = behaviour.log_prob(torch.from_numpy(rollout.actions.copy()))
    torch.testing.assert_close(batch["sample_log_prob"], wanted.T.contiguous())
