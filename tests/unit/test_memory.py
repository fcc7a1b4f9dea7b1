"""Sizes that no machine has the memory for are refused by their key, before anything is allocated."""

from __future__ import annotations

import pytest
from gymnasium import spaces

from clusterenv_hpc.run.config import ConfigError, compose
from clusterenv_hpc.run.errors import describe
from clusterenv_hpc.run.memory import demand_memory

OBSERVATION, ACTION = spaces.Box(-1, 1, (8,)), spaces.Discrete(4)  # 32 and 8 bytes, and 24 for the rest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["algo.num_steps=2_000_000_000"],
            r"^algo.num_steps=2000000000: for the 4 environments .* at least 512 GB, .*",
        ),
        (["algo.num_steps=15626"], r"this machine has 0 GB; allowed: less than 15,625$"),
        (["algo.num_steps=15625"], None),
        (["algo=dqn", "algo.capacity=62501"], r"^algo.capacity=62501: for the replay .* allowed: less than 62,500$"),
        (["algo=rennala_nigt", "algo.horizon=20000"], r"^algo.horizon=20000: for the 4 environments"),
        (["policy.hidden=[1000,1001]"], r"^policy.hidden=\[1000, 1001\]: the weights are at least"),
        (["policy.hidden=[900,900]"], None),
    ],
)
def test_the_key_is_named(words: list[str], said: str | None) -> None:
    config = compose(["env=cartpole", "envs_per_worker=4", *words])
    if said is None:
        return demand_memory(config, OBSERVATION, ACTION, memory=4_000_000)
    with pytest.raises(ConfigError, match=said):
        demand_memory(config, OBSERVATION, ACTION, memory=4_000_000)


def test_ordinary_runs_fit_this_machine() -> None:
    demand_memory(compose(["env=cartpole"]), OBSERVATION, ACTION)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 5 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_says_what_needs_less(error: Exception) -> None:
    assert "envs_per_worker, or smaller algo.num_steps" in describe(error) and "\n" not in describe(error)
