"""EnvPool, whose environments are C++ and step in threads, with plain PPO."""

from __future__ import annotations

import envpool
import plain_ppo
from work import NUM_ENVS, TASKS, WORKERS, answer, request


def main() -> None:
    """One measurement."""
    asked = request()
    task = TASKS[asked["env"]]
    envs = envpool.make(
        task.env_id, env_type="gymnasium", num_envs=NUM_ENVS, num_threads=WORKERS, seed=asked["seed"]
    )  # fmt: skip
    sizes = (envs.observation_space.shape[0], int(envs.action_space.n))
    if asked["what"] == "collect":
        told = plain_ppo.collect(envs, sizes, asked["seconds"], asked["seed"])
    else:
        told = plain_ppo.train(envs, sizes, task, asked["seconds"], asked["seed"])
    answer(told)


if __name__ == "__main__":
    main()
