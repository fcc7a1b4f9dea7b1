"""The same PPO, with its environments on the worker ranks: python ppo_after.py, or mpiexec -n 3 python ppo_after.py."""

import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import clusterenv_hpc as ce

NUM_ENVS, NUM_STEPS, GAMMA, LAMBDA = 8, 128, 0.99, 0.95


def layer(inputs, outputs, gain=2**0.5):
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self, observation_space, action_space):
        super().__init__()
        size = observation_space.shape[0]
        self.actor = nn.Sequential(
            layer(size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, action_space.n, 0.01)
        )
        self.critic = nn.Sequential(layer(size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))

    def forward(self, observations):
        return self.actor(observations)


def main(total_steps):
    torch.set_num_threads(1)  # more only cost time with networks this small
    torch.manual_seed(1)
    example = gym.make("CartPole-v1")
    agent = Agent(example.observation_space, example.action_space)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    envs = ce.ClusterEnv("CartPole-v1", NUM_ENVS, policy=agent)
    envs.reset(seed=1)
    returns = []
    for _ in range(total_steps // (NUM_ENVS * NUM_STEPS)):
        rollout = envs.rollout(NUM_STEPS)
        returns += rollout.episodes.returns.tolist()
        names = ("observations", "next_observations", "actions", "rewards", "terminated", "truncated", "valid")
        obs, after, actions, rewards, terminated, truncated, valid = (
            torch.from_numpy(getattr(rollout, name)) for name in names
        )

        with torch.no_grad():
            old = Categorical(logits=agent(obs)).log_prob(actions)
            values, following = agent.critic(obs).squeeze(-1), agent.critic(after).squeeze(-1)
            advantages, trace = torch.zeros_like(values), torch.zeros(NUM_ENVS)
            for t in reversed(range(NUM_STEPS)):
                delta = rewards[t].float() + GAMMA * following[t] * ~terminated[t] - values[t]
                trace = delta + GAMMA * LAMBDA * trace * ~(terminated[t] | truncated[t])
                advantages[t] = trace = trace * valid[t]
        batch = [x[valid] for x in (obs, actions, old, advantages, values + advantages)]
        for _ in range(4):
            for index in torch.randperm(len(batch[0])).split(256):
                o, a, logp, adv, target = (x[index] for x in batch)
                policy = Categorical(logits=agent(o))
                ratio = (policy.log_prob(a) - logp).exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                loss = (
                    loss - 0.01 * policy.entropy().mean() + 0.5 * (agent.critic(o).squeeze(-1) - target).pow(2).mean()
                )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        envs.publish()
    print(f"mean return of the last 20 of {len(returns)} episodes: {np.mean(returns[-20:]):.1f}")
    envs.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
