"""Gymnasium's own vector environments (asynchronous: a process for each; or the vector entry point), plain PPO."""

from __future__ import annotations

import gymnasium
import plain_ppo
from work import NUM_ENVS, TASKS, answer, request


def main() -> None:
    """One measurement."""
    asked = request()
    task = TASKS[asked["env"]]
    kind = {"async": "async", "vector": "vector_entry_point"}[asked["variant"]]
    envs = gymnasium.make_vec(task.env_id, NUM_ENVS, vectorization_mode=kind)
    envs.reset(seed=asked["seed"])
    sizes = (envs.single_observation_space.shape[0], int(envs.single_action_space.n))
    if asked["what"] == "collect":
        told = plain_ppo.collect(envs, sizes, asked["seconds"], asked["seed"])
    else:
        told = plain_ppo.train(envs, sizes, task, asked["seconds"], asked["seed"])
    answer(told)
    envs.close()


if __name__ == "__main__":
    main()
