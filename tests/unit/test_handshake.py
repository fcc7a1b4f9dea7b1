"""What ranks compare before the first step, and who gets which environments."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

import gymnasium as gym
import pytest

from clusterenv_hpc.comm.channel import HandshakeError
from clusterenv_hpc.comm.codec import encode
from clusterenv_hpc.envs.spaces import encode_space
from clusterenv_hpc.handshake import Hello, compare, deal, plain_metadata, software_versions


@pytest.mark.parametrize("num_envs", [1, 2, 3, 7, 128])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 64])
def test_rows_are_dealt_out_whole_in_order_and_evenly(num_envs: int, workers: int) -> None:
    blocks = deal(num_envs, workers)
    assert len(blocks) == workers
    assert [row for first, end in blocks for row in range(first, end)] == list(range(num_envs))
    sizes = [end - first for first, end in blocks]
    assert sorted(sizes, reverse=True) == sizes and max(sizes) - min(sizes) <= 1


def hello(rank: int, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "rank": rank,
        "world_rank": rank,
        "host": f"node{rank}",
        "pid": 100 + rank,
        "rows": (2 * rank - 2, 2 * rank),
        "versions": software_versions(),
        "config_hash": "abc",
        "num_envs": 4,
        "observation_space": encode_space(gym.spaces.Discrete(3)),
        "action_space": encode_space(gym.spaces.Discrete(2)),
        "autoreset_mode": "NextStep",
        "backend": "sync",
        "policy_layout": "weight [2, 3] float32",
        "num_weights": 6,
        "seed": None,
        "num_probes": 64,
        "num_params": 2,
        "sync": {"name": "aps", "delta": 0.1, "max_lag": 100},
        "metadata": {},
        "render_mode": None,
    }
    return Hello(**(fields | changes))


OWN = {
    "rank": 0,
    "host": "node0",
    "versions": software_versions(),
    "config_hash": "abc",
    "num_envs": 4,
    "seed": None,
    "num_probes": 64,
    "policy_layout": "weight [2, 3] float32",
    "num_weights": 6,
    "sync": {"name": "aps", "delta": 0.1, "max_lag": 100},
}


def test_ranks_that_fit_together() -> None:
    hellos = [hello(1), hello(2)]
    assert compare(hellos, OWN) is hellos[0]
    idle = hello(3, rows=(4, 4), observation_space=b"", action_space=b"", autoreset_mode="", num_params=0)
    assert compare([*hellos, idle], OWN) is hellos[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": software_versions() | {"gymnasium": "0.1"}}, ["version of gymnasium", "0.1 on rank 2 (node2)"]),
        ({"versions": software_versions() | {"protocol": "0"}}, ["protocol", "same environment on every node"]),
        ({"config_hash": "xyz"}, ["configuration's hash is abc on rank 0 (node0, learner) but xyz on rank 2 (node2)"]),
        ({"num_envs": 5}, ["num_envs is 4 on rank 0", "but 5 on rank 2", "same script with the same arguments"]),
        ({"seed": 7}, ["the seed is None on rank 0", "but 7 on rank 2"]),
        ({"num_probes": 7}, ["num_probes is 64 on rank 0", "but 7 on rank 2"]),
        ({"num_weights": 7}, ["number of weights is 6", "but 7", "build the policy the same way"]),
        ({"policy_layout": "weight [3, 2] float32"}, ["policy's layout", "[2, 3]", "[3, 2]"]),
        ({"sync": {"name": "never"}}, ["the sync rule is", "aps", "but {'name': 'never'} on rank 2"]),
        (
            {"observation_space": encode_space(gym.spaces.Discrete(4))},
            ["the observation space is Discrete(3) on rank 1 (node1) but Discrete(4) on rank 2 (node2)"],
        ),
        (
            {"num_weights": 7, "observation_space": encode_space(gym.spaces.Discrete(4))},  # the one follows the other
            ["the observation space is Discrete(3) on rank 1 (node1) but Discrete(4) on rank 2 (node2)"],
        ),
        ({"action_space": encode_space(gym.spaces.Discrete(3))}, ["action space is Discrete(2)", "Discrete(3)"]),
        ({"autoreset_mode": "SameStep"}, ["autoreset mode is NextStep on rank 1", "SameStep on rank 2"]),
        ({"backend": "vector"}, ["backend is sync on rank 1", "vector on rank 2"]),
        ({"num_params": 3}, ["number of distribution parameters is 2", "3 on rank 2"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_both_values_and_both_ranks_are_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(HandshakeError) as caught:
        compare([hello(1), hello(2, **changes)], OWN)
    for word in ["the ranks do not fit together: ", *words]:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(HandshakeError) as caught:
        compare([hello(1, policy_layout="x" * 10_000)], OWN)
    assert len(str(caught.value)) < 700 and "..." in str(caught.value)


def test_a_greeting_survives_the_wire() -> None:
    one = hello(2, metadata={"fps": 30, "modes": ["a"], "pair": (1, 2)}, seed=3)
    assert Hello.unpack(one.pack()) == one
    assert replace(one, rank=3) != one


def test_a_greeting_of_another_version_is_told_from_whom() -> None:
    fields = vars(hello(2)) | {"unheard_of": 1, "versions": {"clusterenv_hpc": "9.9"}}
    with pytest.raises(HandshakeError, match=r"rank 2 on node2 speaks another version of clusterenv_hpc \(9\.9\)"):
        Hello.unpack(encode(fields))


def test_metadata_that_cannot_be_sent_stays_behind() -> None:
    class Colour(Enum):
        RED = 1

    metadata = {"fps": 30, "modes": ["human"], "colour": Colour.RED, "thing": object(), "names": ("a", "b")}
    assert plain_metadata(metadata) == {"fps": 30, "modes": ["human"], "names": ("a", "b")}
