"""The work that every peer is given: the same environments, network, batch and epochs; and what a driver answers.

A driver is started as ``python drivers/NAME.py '{"what": "collect", "env": "cartpole", "seconds": 5, "seed": 1}'``
by the peer's own Python, and prints one JSON object as its last line.  Needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

WORKERS = 2
ENVS_PER_WORKER = 16
NUM_ENVS = WORKERS * ENVS_PER_WORKER
HIDDEN = 64
WARM_UP_S = 1.5
WINDOW = 100


@dataclass(frozen=True)
class Task:
    """PPO with a separate 64-64 tanh actor and critic; ``target``: mean return of the last 100 training episodes."""

    env_id: str
    target: float
    num_steps: int
    gamma: float
    entropy: float
    learning_rate: float = 1e-3
    gae_lambda: float = 0.98
    epochs: int = 4
    minibatch: int = 256
    clip: float = 0.2
    value_weight: float = 0.5
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5
    reward_scale: float = 0.1

    @property
    def batch(self) -> int:
        """Steps between two updates."""
        return NUM_ENVS * self.num_steps


TASKS = {
    "cartpole": Task("CartPole-v1", 475.0, 32, gamma=0.99, entropy=0.0),
    "lunarlander": Task("LunarLander-v3", 200.0, 128, gamma=0.999, entropy=0.01),
}


class Returns:
    """The mean return of the last 100 episodes, and when it first passed the target."""

    def __init__(self, target: float) -> None:
        self._target, self._last = target, deque[float](maxlen=WINDOW)
        self._began = time.perf_counter()
        self.solved_s: float | None = None
        self.solved_steps: int | None = None

    def add(self, returns: Iterable[float], steps: int) -> bool:
        """Episodes that ended, after ``steps`` environment steps in all; True once solved."""
        self._last.extend(returns)
        if self.solved_s is None and len(self._last) == WINDOW and self.mean >= self._target:
            self.solved_s, self.solved_steps = self.seconds, steps
        return self.solved_s is not None

    @property
    def seconds(self) -> float:
        """Since training began."""
        return time.perf_counter() - self._began

    @property
    def mean(self) -> float:
        """Of the last episodes."""
        return sum(self._last) / len(self._last) if self._last else float("nan")

    def told(self, steps: int) -> dict[str, Any]:
        """What a driver answers."""
        return {
            "steps_per_s": steps / self.seconds, "steps": steps, "solved_s": self.solved_s,
            "solved_steps": self.solved_steps, "last_return": self.mean,
        }  # fmt: skip


def timed(collect: Callable[[], int], seconds: float) -> dict[str, Any]:
    """Steps per second of ``collect``, which makes some steps and says how many."""
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_UP_S:
        collect()
    steps, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        steps += collect()
    return {"steps_per_s": steps / spent, "steps": steps}


def request() -> dict[str, Any]:
    """What is asked for."""
    return json.loads(sys.argv[1])


def process_s() -> float:
    """Seconds since this process was started (Linux)."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        started = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - started


def answer(told: dict[str, Any]) -> None:
    """The last line; ``process_s``: how long all took, imports and the start of processes included."""
    print("\n" + json.dumps({**told, "process_s": process_s()}), flush=True)
