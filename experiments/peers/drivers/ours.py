"""clusterenv_hpc: one learner and two worker ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from work import ENVS_PER_WORKER, NUM_ENVS, TASKS, WINDOW, WORKERS, answer, request, timed

BACKENDS = {"sync": "sync", "vector": "vector", "aps": "sync"}
"""By variant.  ``aps`` is the recipes' own rule; the others learn from fresh policies, as all peers do."""


def collect(asked: dict) -> None:
    """On every rank: rollouts in the order they arrive, with nothing learned."""
    import torch

    import clusterenv_hpc as ce
    from clusterenv_hpc.policies import ActorCritic

    task = TASKS[asked["env"]]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    import gymnasium

    example = gymnasium.make(task.env_id)
    policy = ActorCritic(example.observation_space, example.action_space)
    with ce.ClusterEnv(
        task.env_id, NUM_ENVS, policy=policy, sync=ce.APS(0.1), backend=BACKENDS[asked["variant"]], seed=asked["seed"]
    ) as envs:
        rollouts = envs.rollouts(task.num_steps)
        told = timed(lambda: next(rollouts).env_steps, asked["seconds"])
        rollouts.close()
    answer(told)


def train(asked: dict) -> None:
    """``clusterenv-hpc train``; what its metrics say."""
    task = TASKS[asked["env"]]
    sync = "aps" if asked["variant"] == "aps" else "always"
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"env={asked['env']}", f"sync={sync}", f"env.backend={BACKENDS[asked['variant']]}", f"workers={WORKERS}",
            f"envs_per_worker={ENVS_PER_WORKER}", f"seed={asked['seed']}", f"run_dir={folder}/run",
            f"algo.num_steps={task.num_steps}", f"algo.minibatch_size={task.minibatch}", f"algo.epochs={task.epochs}",
            f"algo.learning_rate={task.learning_rate}", "algo.lr_schedule=constant", f"algo.gamma={task.gamma}",
            f"algo.gae_lambda={task.gae_lambda}", f"algo.clip={task.clip}", f"algo.entropy_coef={task.entropy}",
            f"algo.reward_scale={task.reward_scale}", f"log.window={WINDOW}", "log.every_s=0.5", "log.progress=none",
            "log.tensorboard=false", f"stop.at_return={task.target}", "eval.episodes=0", "total_steps=1e9",
        ]  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "clusterenv_hpc.cli", "train", *words], stdout=subprocess.DEVNULL
        )
        metrics = Path(folder, "run", "metrics.jsonl")
        told = watch(process, metrics, task.target, asked["seconds"])
    answer(told)


def watch(process: subprocess.Popen, metrics: Path, target: float, limit_s: float) -> dict:
    """Ends the run at the target or at the limit, both by the run's own clock."""
    row: dict = {}
    done, solved = 0, None
    while process.poll() is None and solved is None and row.get("wall_s", 0.0) < limit_s:
        try:
            process.wait(0.25)
        except subprocess.TimeoutExpired:
            lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            for line in lines[done:]:
                if not line.endswith("\n"):
                    break
                row, done = json.loads(line), done + 1
                if row["return_mean"] is not None and row["episodes"] >= WINDOW and row["return_mean"] >= target:
                    solved = row
                    break
    process.terminate()
    process.wait()
    return {
        "steps_per_s": row["env_steps"] / row["wall_s"], "steps": row["env_steps"], "last_return": row["return_mean"],
        "solved_s": solved["wall_s"] if solved else None, "solved_steps": solved["env_steps"] if solved else None,
    }  # fmt: skip


def main() -> int:
    """One measurement."""
    asked = request()
    if asked["what"] != "collect":
        train(asked)
        return 0
    if asked.get("rank"):
        collect(asked)
        return 0
    from clusterenv_hpc.run.launch import launch_program

    return launch_program([sys.executable, __file__, json.dumps({**asked, "rank": True})], WORKERS + 1).code


if __name__ == "__main__":
    sys.exit(main())
