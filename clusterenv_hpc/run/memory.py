"""Sizes that no machine has the memory for, refused by the key that asks for them rather than by the kernel."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import Any

import gymnasium

from clusterenv_hpc.envs.spaces import leaves
from clusterenv_hpc.run.config import ConfigError
from clusterenv_hpc.run.schema import Config

STEP_BYTES = 24
"""Beside observation and action a step has at least a reward, a version, flags and an action distribution."""


def demand_memory(
    config: Config, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], memory: int = 0
) -> None:
    """Raises ConfigError where a single rollout, the replay or a layer would be larger than this machine's memory.

    What is counted is far below what a run needs: this finds slips of the keyboard.

    memory: in bytes; 0: of this machine.
    """
    memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    step = STEP_BYTES + sum(
        leaf.dtype.itemsize * math.prod(leaf.shape)
        for space in (observation_space, action_space)
        for leaf in leaves(space)
    )
    steps = "num_steps" if hasattr(config.algo, "num_steps") else "horizon"
    for key, what, factor in (
        (f"algo.{steps}", f"the {config.envs_per_worker} environments of a worker", config.envs_per_worker),
        ("algo.capacity", "the replay", 1),
    ):
        count = getattr(config.algo, key.partition(".")[2], 0)
        if (size := count * factor * step) > memory:
            raise ConfigError(
                f"{key}={count}: for {what} that is at least {_words(size)}, and this machine has {_words(memory)}; "
                f"allowed: less than {memory // (factor * step):,}"
            )
    hidden = config.policy.hidden
    if (size := 4 * sum(a * b for a, b in pairwise([1, *hidden, 1]))) > memory:
        raise ConfigError(
            f"policy.hidden={hidden}: the weights are at least {_words(size)}, and this machine has {_words(memory)}; "
            "allowed: fewer or smaller layers"
        )


def _words(size: int) -> str:
    return f"{size / 1e9:,.0f} GB"
