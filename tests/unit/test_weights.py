"""Weights as one flat float32 array."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv_hpc.policies import (
    ActorCritic,
    PolicyError,
    flat_weights,
    load_flat_weights,
    num_weights,
    weights_layout,
)


def small(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).to(dtype)


def test_the_flat_array_is_every_parameter_then_every_floating_buffer_in_order():
    policy = small()
    policy[1].running_mean += torch.tensor([5.0, 6.0])
    expected = np.concatenate(
        [p.detach().numpy().ravel() for p in policy.parameters()] + [np.array([5, 6, 1, 1], np.float32)]
    )
    flat = flat_weights(policy)
    assert flat.dtype == np.float32
    assert num_weights(policy) == len(flat) == 3 * 2 + 2 + 2 + 2 + 2 + 1 + 4
    assert (flat == expected).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_round_trip_in_place_for_every_precision(dtype):
    source, target = small(dtype, seed=1), small(dtype, seed=2)
    flat = flat_weights(source)
    pointers = [p.data_ptr() for p in target.parameters()]
    load_flat_weights(target, flat)
    assert [p.data_ptr() for p in target.parameters()] == pointers
    assert (flat_weights(target) == flat).all()
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert b.dtype == dtype
        assert b.requires_grad
        assert torch.equal(a.to(torch.float32), b.to(torch.float32))


def test_mixed_precision_and_unusual_strides():
    policy = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2).double()])
    policy[0].weight.data = torch.randn(3, 2).t()
    flat = np.arange(num_weights(policy), dtype=np.float32)
    load_flat_weights(policy, flat)
    assert policy[0].weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (flat_weights(policy) == flat).all()


def test_a_fresh_array_is_immutable_and_independent():
    policy = small()
    flat = flat_weights(policy)
    before = flat.copy()
    with pytest.raises(ValueError, match="read-only"):
        flat[0] = 1
    with torch.no_grad():
        policy[0].weight.fill_(9)
    assert (flat == before).all()


def test_read_only_snapshots_load_without_warning_and_stay_apart():
    policy, flat = small(), flat_weights(small(seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_flat_weights(policy, flat)
        load_flat_weights(small(torch.bfloat16), flat)
    before = flat.copy()
    with torch.no_grad():
        policy[0].weight.fill_(9)
    assert (flat == before).all()


def test_out_is_filled_and_returned():
    policy = small()
    buffer = np.zeros(num_weights(policy) + 2, np.float32)
    out = buffer[1:-1]
    assert flat_weights(policy, out) is out
    assert (out == flat_weights(policy)).all()
    assert buffer[0] == buffer[-1] == 0
    assert out.flags.writeable


def test_tied_parameters_count_once():
    policy = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    policy[1].weight = policy[0].weight
    assert num_weights(policy) == 4 + 2 + 2
    load_flat_weights(policy, np.arange(8, dtype=np.float32))
    assert policy[1].weight is policy[0].weight
    assert policy[0].weight.tolist() == [[0, 1], [2, 3]]
    assert policy[1].bias.tolist() == [6, 7]


def test_only_acting_parameters_travel():
    policy = ActorCritic(spaces.Box(-1, 1, (8,)), spaces.Discrete(4))
    critic = [p.detach().clone() for p in policy.critic.parameters()]
    load_flat_weights(policy, np.zeros(num_weights(policy), np.float32))
    assert all((p == 0).all() for p in policy.actor.parameters())
    assert all(torch.equal(p, before) for p, before in zip(policy.critic.parameters(), critic, strict=True))


def test_a_generator_of_repeated_tensors_is_counted_once():
    class Policy(nn.Linear):
        def acting_parameters(self):
            yield self.weight
            yield self.weight

    assert num_weights(Policy(3, 2)) == 6


@pytest.mark.parametrize(
    "flat",
    [
        np.zeros(5, np.float32),
        np.zeros(18, np.float32),
        np.zeros(19, np.float64),
        np.zeros((19, 1), np.float32),
        [0.0] * 19,
    ],
    ids=["short", "one short", "float64", "shape", "list"],
)
def test_wrong_sizes_and_dtypes_change_nothing(flat):
    policy = small()
    assert num_weights(policy) == 19
    before = flat_weights(policy)
    with pytest.raises(PolicyError, match=r"float32 array of shape \(19,\), got"):
        load_flat_weights(policy, flat)
    assert (flat_weights(policy) == before).all()
    with pytest.raises(PolicyError):
        flat_weights(policy, flat)


def test_the_layout_tells_policies_apart():
    layout = weights_layout(small())
    assert layout.splitlines()[:2] == ["0.weight [2, 3] float32", "0.bias [2] float32"]
    assert layout == weights_layout(small(seed=5))
    others = [
        small(torch.float64),
        nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)),
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(2), nn.Linear(2, 1)),
    ]
    assert len({layout, *map(weights_layout, others)}) == 4


def test_a_module_without_weights():
    assert flat_weights(nn.Identity()).shape == (0,)
    load_flat_weights(nn.Identity(), np.zeros(0, np.float32))
    assert weights_layout(nn.Identity()) == ""
