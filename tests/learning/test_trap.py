"""The trap: PPO's own clip, taken against workers that lag, stops learning for good; the decoupled objective goes on.

With APS and a large delta the update is clipped away before the divergence ever reaches delta, so no worker asks.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import clusterenv_hpc as ce
from clusterenv_hpc.learners.ppo import PPO, PPOConfig
from clusterenv_hpc.policies import ActorCritic

STEPS, UPDATES = 64, 40


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def learn(objective: str, seed: int) -> tuple[float, float, int]:
    """Mean return of the first and the last episodes, and weight requests beside each worker's first."""
    single = gym.make("CartPole-v1")
    torch.manual_seed(seed)
    policy = ActorCritic(single.observation_space, single.action_space)
    config = PPOConfig(
        learning_rate=1e-3, lr_schedule="constant", epochs=4, minibatch_size=256, gae_lambda=0.95, objective=objective
    )
    learner = PPO(policy, config, single.action_space, seed=seed)
    returns: list[float] = []
    with ce.ClusterEnv(
        "CartPole-v1",
        32,
        policy=policy,
        sync=ce.APS(delta=0.3, max_lag=None),
        backend="vector",
        num_workers=2,
        seed=seed,
    ) as envs:
        for update in range(UPDATES):
            rollout = envs.rollout(STEPS)
            returns += rollout.episodes.returns.tolist()
            learner.update(rollout, update / UPDATES)
            envs.publish()
        asked = envs.stats.weight_requests - envs.num_workers
    return float(np.mean(returns[:100])), float(np.mean(returns[-50:])), asked


def test_decoupled_learns_on_where_coupled_stalls() -> None:
    begun, reached, asked = learn("decoupled", seed=1)
    assert reached > 5 * begun, f"decoupled: {begun:.0f} to {reached:.0f}"
    assert asked > 0
    begun, reached, asked = learn("coupled", seed=1)
    assert asked == 0, "the coupled objective moved the policy by more than delta: then this is no trap"
    assert reached < 2 * begun, f"coupled: {begun:.0f} to {reached:.0f}"
