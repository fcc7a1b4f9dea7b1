"""Stable-Baselines3's PPO over its own vector environments: one process for each environment, or all in one."""

from __future__ import annotations

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from work import HIDDEN, NUM_ENVS, TASKS, Returns, answer, request, timed


class Watch(BaseCallback):
    """Ends training at the target or the limit."""

    def __init__(self, returns: Returns, limit_s: float) -> None:
        super().__init__()
        self.returns, self.limit_s = returns, limit_s

    def _on_step(self) -> bool:
        ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return not self.returns.add(ended, self.num_timesteps) and self.returns.seconds < self.limit_s


def main() -> None:
    """One measurement."""
    asked = request()
    task = TASKS[asked["env"]]
    torch.set_num_threads(1)

    def make() -> gymnasium.Env:
        scale = task.reward_scale
        return gymnasium.wrappers.TransformReward(Monitor(gymnasium.make(task.env_id)), lambda reward: scale * reward)

    if asked["variant"] == "subproc":
        envs = SubprocVecEnv([make] * NUM_ENVS, start_method="fork")
    else:
        envs = DummyVecEnv([make] * NUM_ENVS)
    model = PPO(
        "MlpPolicy", envs, learning_rate=task.learning_rate, n_steps=task.num_steps, batch_size=task.minibatch,
        n_epochs=task.epochs, gamma=task.gamma, gae_lambda=task.gae_lambda, clip_range=task.clip, ent_coef=task.entropy,
        vf_coef=task.value_weight, max_grad_norm=task.max_grad_norm, seed=asked["seed"], device="cpu",
        policy_kwargs={"net_arch": {"pi": [HIDDEN] * 2, "vf": [HIDDEN] * 2}},
    )  # fmt: skip
    if asked["what"] == "collect":
        _, callback = model._setup_learn(10**9)

        def rollout() -> int:
            model.collect_rollouts(envs, callback, model.rollout_buffer, task.num_steps)
            return task.batch

        told = timed(rollout, asked["seconds"])
    else:
        returns = Returns(task.target)
        model.learn(10**9, callback=Watch(returns, asked["seconds"]))
        told = returns.told(model.num_timesteps)
    answer(told)
    envs.close()


if __name__ == "__main__":
    main()
