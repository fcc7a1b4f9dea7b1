"""Sequentials without the module machinery: the same numbers, to the bit, from the same weights."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from clusterenv_hpc.policies import ActorCritic, load_flat_weights, make_lean, make_plain, num_weights

BOX = gymnasium.spaces.Box(-1.0, 1.0, (5,), np.float32)
IMAGE = gymnasium.spaces.Box(0, 255, (3, 12, 12), np.uint8)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_equal_to_the_bit_and_weights_follow(activation: str, critic: str) -> None:
    torch.manual_seed(0)
    plain = ActorCritic(BOX, gymnasium.spaces.Discrete(3), (16, 16), activation, critic)  # type: ignore[arg-type]
    lean = copy.deepcopy(plain)
    make_lean(lean)
    assert type(lean.actor) is not nn.Sequential
    observations = torch.randn(7, 5)
    with torch.inference_mode():
        assert torch.equal(plain(observations), lean(observations))
        weights = np.random.default_rng(0).normal(size=num_weights(plain)).astype(np.float32)
        load_flat_weights(plain, weights)
        load_flat_weights(lean, weights)
        assert torch.equal(plain(observations), lean(observations))
        assert torch.equal(plain.value(observations), lean.value(observations))
    assert list(lean.state_dict()) == list(plain.state_dict())
    make_plain(lean)
    assert type(lean.actor) is nn.Sequential and str(lean) == str(plain)


def test_images_and_layers_that_are_not_known() -> None:
    torch.manual_seed(0)
    plain = ActorCritic(IMAGE, gymnasium.spaces.Discrete(3))
    lean = copy.deepcopy(plain)
    make_lean(lean)
    observations = torch.randint(0, 256, (4, 3, 12, 12), dtype=torch.uint8)
    assert torch.equal(plain(observations), lean(observations))
    odd = nn.Sequential(
        nn.Linear(5, 4, bias=False), nn.ELU(alpha=0.5), nn.LayerNorm(4), nn.GELU("tanh"), nn.ReLU(inplace=True)
    )
    lean_odd = copy.deepcopy(odd)
    make_lean(lean_odd)
    x = torch.randn(3, 5)
    assert torch.equal(odd(x), lean_odd(x))


def test_gradients_flow_as_before() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    lean = copy.deepcopy(plain)
    make_lean(lean)
    x = torch.randn(3, 5)
    plain(x).sum().backward()
    lean(x).sum().backward()
    for one, other in zip(plain.parameters(), lean.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_hooks_are_still_called() -> None:
    calls: list[str] = []
    hooked_layer = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
    hooked_layer[1].register_forward_hook(lambda *_: calls.append("layer"))
    hooked_whole = nn.Sequential(nn.Linear(4, 4))
    hooked_whole.register_forward_pre_hook(lambda *_: calls.append("whole"))
    policy = nn.Sequential(hooked_layer, hooked_whole)
    make_lean(policy)
    policy(torch.randn(2, 5))
    assert calls == ["layer", "whole"]
