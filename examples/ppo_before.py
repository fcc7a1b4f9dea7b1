"""PPO on CartPole in one file, on Gymnasium's vector environments in this process."""

import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

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
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * NUM_ENVS)
    observation, _ = envs.reset(seed=1)
    fresh, running, returns = np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS), []
    for _ in range(total_steps // (NUM_ENVS * NUM_STEPS)):
        store = {name: [] for name in ("obs", "next", "actions", "rewards", "terminated", "truncated", "valid")}
        for _ in range(NUM_STEPS):
            with torch.no_grad():
                action = Categorical(logits=agent(torch.from_numpy(observation))).sample().numpy()
            following, reward, terminated, truncated, _ = envs.step(action)
            for name, value in zip(
                store, (observation, following, action, reward, terminated, truncated, ~fresh), strict=True
            ):
                store[name].append(value)
            running = np.where(fresh, 0.0, running + reward)
            returns += running[terminated | truncated].tolist()
            observation, fresh = following, terminated | truncated
        obs, after, actions, rewards, terminated, truncated, valid = (
            torch.from_numpy(np.stack(values)) for values in store.values()
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
    print(f"mean return of the last 20 of {len(returns)} episodes: {np.mean(returns[-20:]):.1f}")
    envs.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
