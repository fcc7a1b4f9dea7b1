"""Sample Factory's APPO with two rollout workers; it has no collection without learning."""

from __future__ import annotations

import sys
import tempfile

import gymnasium
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from work import ENVS_PER_WORKER, HIDDEN, TASKS, WINDOW, WORKERS, Returns, answer, request

NAMES = {"LunarLander-v3": "LunarLander-v2"}
"""What Gymnasium 0.29, which Sample Factory needs, calls it."""


def make(name, cfg, env_config, render_mode=None):  # the signature is theirs
    """One environment."""
    return gymnasium.make(NAMES.get(name, name), render_mode=render_mode)


def main() -> None:
    """One measurement."""
    asked = request()
    task = TASKS[asked["env"]]
    register_env(task.env_id, make)
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "env": task.env_id, "train_dir": folder, "experiment": "run", "device": "cpu", "seed": asked["seed"],
            "num_workers": WORKERS, "num_envs_per_worker": ENVS_PER_WORKER, "worker_num_splits": 2,
            "rollout": task.num_steps, "recurrence": 1, "batch_size": task.minibatch,
            "num_batches_per_epoch": task.batch // task.minibatch, "num_epochs": task.epochs, "gamma": task.gamma,
            "gae_lambda": task.gae_lambda, "ppo_clip_ratio": task.clip, "ppo_clip_value": 1e6,
            "exploration_loss_coeff": task.entropy, "value_loss_coeff": task.value_weight,
            "max_grad_norm": task.max_grad_norm, "learning_rate": task.learning_rate, "adam_eps": task.adam_eps,
            "reward_scale": task.reward_scale, "normalize_input": False, "normalize_returns": False, "use_rnn": False,
            "encoder_mlp_layers": [HIDDEN, HIDDEN], "nonlinearity": "tanh", "actor_critic_share_weights": False,
            "save_every_sec": 10**6, "stats_avg": WINDOW, "with_wandb": False,
            "train_for_seconds": int(asked["seconds"]),
            "train_for_env_steps": 10**9, "async_rl": True, "batched_sampling": False, "restart_behavior": "overwrite",
        }  # fmt: skip
        argv = []
        for key, value in words.items():
            argv.append(f"--{key}" + ("" if isinstance(value, list) else f"={value}"))
            argv += [str(item) for item in value] if isinstance(value, list) else []
        parser, _ = parse_sf_args(argv)
        _, runner = make_runner(parse_full_cfg(parser, argv))
        if runner.init() != ExperimentStatus.SUCCESS:
            sys.exit("Sample Factory could not start")
        returns, ends = Returns(task.target), runner._should_end_training

        def ends_or_solved() -> bool:
            """Asked by their loop now and then."""
            window = list(runner.policy_avg_stats.get("reward", [[]])[0])[-WINDOW:]
            solved = len(window) == WINDOW and returns.add(window, sum(runner.env_steps.values()))
            return solved or ends()

        runner._should_end_training = ends_or_solved
        runner.run()
        answer(returns.told(sum(runner.env_steps.values())))


if __name__ == "__main__":
    main()
