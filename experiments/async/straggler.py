"""What one worker ten times slower costs:  mpiexec -n 4 python experiments/async/straggler.py     writes straggler.json

Three workers whose every step takes 10 ms, then the same with the last taking 100 ms; collected in lockstep, and as
rollouts arrive.  Sleeps stand for the environments' time, so that the machine's own speed hardly counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gymnasium import spaces

import clusterenv_hpc as ce
from clusterenv_hpc.bench.command import circumstances
from clusterenv_hpc.envs.delays import Delay
from clusterenv_hpc.policies import ActorCritic

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, store

SECONDS, STEP_S, NUM_STEPS, WORKERS, ENVS = 12.0, 0.01, 10, 3, 12


def lockstep(envs: ce.ClusterEnv) -> Iterator[ce.Rollout]:
    """Rollouts of all workers, none of which begins the next before all are done."""
    while True:
        yield envs.rollout(NUM_STEPS)


def speed(envs: ce.ClusterEnv, kind: str) -> float:
    """Environment steps per second; without the end of the stream, for which a slow worker finishes its rollout."""
    steps, spent, began = 0, 0.0, time.monotonic()
    for rollout in lockstep(envs) if kind == "lockstep" else envs.rollouts(NUM_STEPS):
        steps += rollout.env_steps
        spent = time.monotonic() - began
        if spent > SECONDS:
            break
        envs.publish()
    return steps / spent


def main() -> None:
    """Measure and store."""
    command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = ActorCritic(spaces.Box(-float("inf"), float("inf"), (4,)), spaces.Discrete(2), (8,))
    told: dict[str, dict[str, float]] = {}
    for scheme in ("equal", "straggler"):
        delay = Delay(scheme, STEP_S, 10.0)
        envs = ce.ClusterEnv("CartPole-v1", ENVS, policy=policy, delay=delay, seed=1, exit_workers=False)
        if not envs.is_learner:
            continue
        with envs:
            for kind in ("lockstep", "arrivals"):
                told.setdefault(kind, {})[scheme] = speed(envs, kind)
    if told:
        share = 1.0 / WORKERS
        report = {
            "steps_per_s": told,
            "kept": {kind: speeds["straggler"] / speeds["equal"] for kind, speeds in told.items()},
            "expected_of_arrivals": 1.0 - share + share / 10.0,
            **circumstances([]),
            "command": "mpiexec -n 4 python experiments/async/straggler.py",
        }
        store(Path(__file__).with_name("straggler.json"), report)
        print(json.dumps({"steps_per_s": told, "kept": report["kept"]}))


if __name__ == "__main__":
    main()
