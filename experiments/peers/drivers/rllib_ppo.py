"""RLlib's PPO with two environment runners."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")

import gymnasium
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.tune.registry import register_env
from work import ENVS_PER_WORKER, HIDDEN, TASKS, WINDOW, WORKERS, Returns, answer, request, timed


class Ended(gymnasium.Wrapper):
    """Appends each episode's return to a file: of RLlib's metrics only means of windows come out whole."""

    def __init__(self, env: gymnasium.Env, folder: str) -> None:
        super().__init__(env)
        self._log = open(f"{folder}/{os.getpid()}-{id(self)}", "w", buffering=1)  # noqa: SIM115 (as long as the env)
        self._sum = 0.0

    def reset(self, **words: object) -> tuple:
        """Begin an episode."""
        self._sum = 0.0
        return self.env.reset(**words)

    def step(self, action: object) -> tuple:
        """One step; at the end of an episode, a line."""
        told = self.env.step(action)
        self._sum += float(told[1])
        if told[2] or told[3]:
            self._log.write(f"{self._sum}\n")
        return told


class Log:
    """What ``Ended`` has written since the last look."""

    def __init__(self, folder: str) -> None:
        self._folder, self._read = Path(folder), dict[Path, int]()

    def new(self) -> list[float]:
        """Returns of episodes."""
        found: list[float] = []
        for path in sorted(self._folder.iterdir()):
            lines = path.read_text().splitlines()
            found += map(float, lines[self._read.get(path, 0) :])
            self._read[path] = len(lines)
        return found


def main() -> None:
    """One measurement."""
    asked = request()
    task = TASKS[asked["env"]]
    torch.set_num_threads(1)
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    env_id, scale, folder = task.env_id, task.reward_scale, tempfile.mkdtemp(prefix="rllib-returns-")

    def make(_: object) -> gymnasium.Env:
        env = Ended(gymnasium.make(env_id), folder)
        return gymnasium.wrappers.TransformReward(env, lambda reward: scale * reward)

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
        returns, log, steps = Returns(task.target), Log(folder), 0
        while returns.seconds < asked["seconds"]:
            told = algorithm.train()["env_runners"]
            steps = int(told["num_env_steps_sampled_lifetime"])
            if returns.add(log.new(), steps):
                break
        answer(returns.told(steps))
    algorithm.stop()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
