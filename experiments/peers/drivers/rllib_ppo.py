"""RLlib's PPO with two environment runners."""

from __future__ import annotations

import os

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")

import gymnasium
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.tune.registry import register_env
from work import ENVS_PER_WORKER, HIDDEN, TASKS, WINDOW, WORKERS, Returns, answer, request, timed


def log_return(*, episode, metrics_logger, **_: object) -> None:
    """Every episode's return: RLlib's own mean over a window is one of means, of fewer episodes than it seems."""
    metrics_logger.log_value("all_returns", float(episode.get_return()), reduce="item_series")


def main() -> None:
    """One measurement."""
    asked = request()
    task = TASKS[asked["env"]]
    torch.set_num_threads(1)
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    env_id, scale = task.env_id, task.reward_scale

    def make(_: object) -> gymnasium.Env:
        return gymnasium.wrappers.TransformReward(gymnasium.make(env_id), lambda reward: scale * reward)

    register_env("scaled", make)
    config = (
        PPOConfig()
        .environment("scaled")
        .env_runners(
            num_env_runners=WORKERS, num_envs_per_env_runner=ENVS_PER_WORKER, rollout_fragment_length=task.num_steps
        )
        .learners(num_learners=0)
        .training(
            lr=task.learning_rate, gamma=task.gamma, lambda_=task.gae_lambda, train_batch_size_per_learner=task.batch,
            minibatch_size=task.minibatch, num_epochs=task.epochs, clip_param=task.clip, vf_clip_param=1e9,
            entropy_coeff=task.entropy, vf_loss_coeff=task.value_weight, grad_clip=task.max_grad_norm,
            grad_clip_by="global_norm", use_kl_loss=False,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[HIDDEN, HIDDEN], fcnet_activation="tanh", vf_share_layers=False
            )
        )
        .callbacks(on_episode_end=log_return)
        .reporting(metrics_num_episodes_for_smoothing=WINDOW, min_time_s_per_iteration=0)
        .debugging(seed=asked["seed"], log_level="ERROR")
    )  # fmt: skip
    algorithm = config.build_algo()
    if asked["what"] == "collect":

        def rollout() -> int:
            episodes = synchronous_parallel_sample(
                worker_set=algorithm.env_runner_group,
                max_env_steps=task.batch,
                sample_timeout_s=60,
                concat=True,
                _uses_new_env_runners=True,
            )
            return sum(len(episode) for episode in episodes)

        answer(timed(rollout, asked["seconds"]))
    else:
        returns, steps = Returns(task.target), 0
        while returns.seconds < asked["seconds"]:
            told = algorithm.train()["env_runners"]
            steps = int(told["num_env_steps_sampled_lifetime"])
            if returns.add([ended / scale for ended in told.get("all_returns", [])], steps):
                break
        answer(returns.told(steps))
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
