"""Sources of rollouts: who waits for whom, and several arrivals as one batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces

import clusterenv_hpc as ce
from clusterenv_hpc.algorithms import DQNConfig, VTraceConfig
from clusterenv_hpc.learners import VTrace
from clusterenv_hpc.policies import ActorCritic
from clusterenv_hpc.rollout import Episodes, Rollout
from clusterenv_hpc.run.source import arrivals, lockstep, publishes, rollouts_for, side_by_side


def make(number, envs=2, steps=3, row=0):
    rng = np.random.default_rng(number)
    shape = (steps, envs)
    obs = {"a": rng.random((*shape, 4)), "b": (rng.integers(0, 255, (*shape, 2, 2), dtype=np.uint8),)}
    return Rollout(
        observations=obs, next_observations=obs, actions=rng.integers(0, 3, shape),
        behaviour_params=rng.random((*shape, 3)).astype(np.float32), rewards=rng.random(shape),
        terminated=rng.random(shape) < 0.5, truncated=rng.random(shape) < 0.5, valid=rng.random(shape) < 0.5,
        versions=np.full(shape, number), rows=np.arange(row, row + envs), ranks=np.full(envs, number + 1),
        episodes=Episodes(rng.random(number), np.arange(number), np.full(number, row)), version=number,
    )  # fmt: skip


def test_side_by_side_keeps_every_number_and_every_type():
    parts = [make(3, envs=2), make(1, envs=1, row=2), make(2, envs=2)]  # one worker came twice
    whole = side_by_side(parts)
    starts = np.cumsum([0, *(part.num_envs for part in parts)])
    for part, start, stop in zip(parts, starts, starts[1:], strict=False):
        columns = slice(start, stop)
        for name in ("actions", "behaviour_params", "rewards", "terminated", "truncated", "valid", "versions"):
            got, want = getattr(whole, name)[:, columns], getattr(part, name)
            np.testing.assert_array_equal(got, want)
            assert got.dtype == want.dtype
        np.testing.assert_array_equal(whole.observations["a"][:, columns], part.observations["a"])
        assert whole.observations["b"][0].dtype == np.uint8
        np.testing.assert_array_equal(whole.next_observations["b"][0][:, columns], part.next_observations["b"][0])
    assert whole.rows.tolist() == [0, 1, 2, 0, 1] and whole.ranks.tolist() == [4, 4, 2, 3, 3]
    assert len(whole.episodes) == 6 and whole.version == 3
    assert side_by_side(parts[:1]) is parts[0]
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        side_by_side([make(0), make(0, steps=4)])


class Scripted:
    def __init__(self):
        self.asked = []

    def rollout(self, num_steps):
        self.asked.append(("all", num_steps))
        return make(0, envs=4, steps=num_steps)

    def rollouts(self, num_steps):
        for number in range(100):
            self.asked.append((number, num_steps))
            yield make(number % 2, steps=num_steps)


def test_an_algorithm_gets_the_rollouts_it_wants():
    envs = Scripted()
    batches = rollouts_for(VTraceConfig(num_steps=5, rollouts_per_update=3), envs)
    assert [next(batches).num_envs for _ in range(2)] == [6, 6]
    assert envs.asked == [(number, 5) for number in range(6)]  # and no more were taken than needed

    @dataclasses.dataclass
    class Waiting:
        num_steps: int = 7

    envs = Scripted()
    assert next(rollouts_for(Waiting(), envs)).num_envs == 4
    assert envs.asked == [("all", 7)]
    assert next(lockstep(envs, 2)).num_steps == 2


def test_versions_are_published_every_so_many_updates():
    assert [publishes(DQNConfig(publish_every=3), update) for update in range(1, 7)] == [False, False, True] * 2
    assert publishes(object(), 1)


def cartpole_policy():
    torch.manual_seed(0)
    return ActorCritic(spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2), (16,))


def train(seed, updates):
    policy, config = cartpole_policy(), VTraceConfig(num_steps=8, rollouts_per_update=2, minibatch_size=32)
    learner = VTrace(policy, config, spaces.Discrete(2), seed=seed)
    metrics = []
    with ce.ClusterEnv("CartPole-v1", 6, policy=policy, sync=ce.APS(0.01), num_workers=3, seed=seed) as envs:
        batches = arrivals(envs, config.num_steps, config.rollouts_per_update)
        for update in range(updates):
            batch = next(batches)
            metrics.append((learner.update(batch, update / updates), batch.rows.tolist(), batch.lag.max()))
            envs.publish()
    return policy, metrics


def test_in_one_process_an_asynchronous_run_is_the_same_twice():
    (one, first), (other, second) = train(1, 30), train(1, 30)
    assert first == second
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {row for _, rows, _ in first for row in rows} == set(range(6))
    assert any(lag > 0 for _, _, lag in first)  # the workers did not wait


def test_what_is_taken_stays_as_it_was_while_more_arrives():
    with ce.ClusterEnv("CartPole-v1", 4, policy=cartpole_policy(), num_workers=2, seed=1) as envs:
        batches = arrivals(envs, 4, 3)
        batch = next(batches)
        before = batch.observations.copy()
        for _ in range(10):
            next(batches)
        np.testing.assert_array_equal(batch.observations, before)
