"""PPO in one file over any Gymnasium vector environment: what Gymnasium and EnvPool leave to their user."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn
from work import HIDDEN, NUM_ENVS, Returns, Task, timed


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """64-64 tanh."""
    sizes, layers = [inputs, HIDDEN, HIDDEN, outputs], []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(n_in, n_out)
        nn.init.orthogonal_(linear.weight, gain if i == 2 else 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def networks(observations: int, actions: int, seed: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Actor and critic."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return network(observations, actions, 0.01), network(observations, 1, 1.0)


def log_probs(logits: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Of the actions taken."""
    return logits.log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)


def sample(logits: torch.Tensor) -> torch.Tensor:
    """By the Gumbel trick, which is quicker than torch's multinomial for so few actions."""
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)


def collect(envs: Any, sizes: tuple[int, int], seconds: float, seed: int) -> dict[str, Any]:
    """Steps per second with the actor sampling in this process."""
    actor, _ = networks(*sizes, seed)
    state = envs.reset()[0]

    @torch.inference_mode()
    def steps() -> int:
        nonlocal state
        for _ in range(32):
            state = envs.step(sample(actor(torch.from_numpy(state))).numpy())[0]
        return 32 * NUM_ENVS

    return timed(steps, seconds)


def train(envs: Any, sizes: tuple[int, int], task: Task, limit_s: float, seed: int) -> dict[str, Any]:
    """PPO until the target or the limit."""
    actor, critic = networks(*sizes, seed)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=task.learning_rate, eps=task.adam_eps)
    returns, steps = Returns(task.target), 0
    state, fresh, running = envs.reset()[0], np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS)
    while returns.seconds < limit_s:
        store: list[tuple[Any, ...]] = []
        ended: list[float] = []
        for _ in range(task.num_steps):
            with torch.no_grad():
                action = sample(actor(torch.from_numpy(state))).numpy()
            following, reward, terminated, truncated, _ = envs.step(action)
            done = terminated | truncated
            store.append((state, following, action, reward, terminated, done, ~fresh))
            running = np.where(fresh, 0.0, running + reward)
            ended += running[done & ~fresh].tolist()
            state, fresh = following, done & ~fresh
        obs, after, actions, rewards, terminated, done, valid = (
            torch.from_numpy(np.stack(values)) for values in zip(*store, strict=True)
        )
        steps += int(valid.sum())
        if returns.add(ended, steps):
            break
        update(actor, critic, optimizer, task, (obs, after, actions.long(), rewards, terminated, done, valid))
    return returns.told(steps)


def update(actor: Any, critic: Any, optimizer: Any, task: Task, batch: tuple[torch.Tensor, ...]) -> None:
    """One PPO update."""
    obs, after, actions, rewards, terminated, done, valid = batch
    with torch.no_grad():
        old = log_probs(actor(obs), actions)
        values, following = critic(obs).squeeze(-1), critic(after).squeeze(-1)
        advantages, trace = torch.zeros_like(values), torch.zeros(values.shape[1])
        for t in reversed(range(len(values))):
            delta = task.reward_scale * rewards[t].float() + task.gamma * following[t] * ~terminated[t] - values[t]
            trace = (delta + task.gamma * task.gae_lambda * trace * ~done[t]) * valid[t]
            advantages[t] = trace
    flat = [x[valid] for x in (obs, actions, old, advantages, values + advantages)]
    for _ in range(task.epochs):
        for index in torch.randperm(len(flat[0])).split(task.minibatch):
            o, a, logp, adv, target = (x[index] for x in flat)
            logits = actor(o)
            log_all = logits.log_softmax(-1)
            ratio = (log_probs(logits, a) - logp).exp()
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            loss = -torch.min(ratio * adv, ratio.clamp(1 - task.clip, 1 + task.clip) * adv).mean()
            loss = loss + task.value_weight * (critic(o).squeeze(-1) - target).square().mean()
            loss = loss + task.entropy * (log_all.exp() * log_all).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], task.max_grad_norm)
            optimizer.step()
