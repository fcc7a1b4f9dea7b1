"""One learner and three workers, of which the last is ten times slower: rollouts in lockstep, then as they arrive.

Prints a line of JSON: environment steps per second of both, and the steps of each rank.
"""

from __future__ import annotations

import json
import time

import torch
from gymnasium import spaces

import clusterenv_hpc as ce
from clusterenv_hpc.envs.delays import Delay
from clusterenv_hpc.policies import ActorCritic

SECONDS, STEP_S, NUM_STEPS = 4.0, 0.01, 10

torch.set_num_threads(1)
torch.manual_seed(0)
policy = ActorCritic(spaces.Box(-float("inf"), float("inf"), (4,)), spaces.Discrete(2), (8,))
delay = Delay("straggler", STEP_S, 10.0)
with ce.ClusterEnv("CartPole-v1", 12, policy=policy, sync=ce.APS(0.1), delay=delay, seed=1) as envs:
    told = {}
    for kind in ("lockstep", "arrivals"):
        before, steps, began = dict(envs.stats.env_steps), 0, time.monotonic()
        stream = envs.rollouts(NUM_STEPS) if kind == "arrivals" else iter(lambda: envs.rollout(NUM_STEPS), None)
        for rollout in stream:
            steps += rollout.env_steps
            envs.publish()
            assert envs.poll() <= 6
            if time.monotonic() - began > SECONDS:
                break
        told[kind] = steps / (time.monotonic() - began)
        told[f"{kind}_by_rank"] = {rank: count - before.get(rank, 0) for rank, count in envs.stats.env_steps.items()}
print(json.dumps(told), flush=True)
