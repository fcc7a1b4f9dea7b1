"""The networks, and the protocol that any user's module is held to."""

from __future__ import annotations

import copy
import math
import random
import re
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv_hpc.policies import (
    ActorCritic,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    PolicyError,
    as_tensors,
    check_policy,
    distribution_of,
    evaluate,
)

VECTOR = spaces.Box(-1, 1, (8,))
FOUR = spaces.Discrete(4)

OBSERVATIONS = {
    "vector": VECTOR,
    "float64": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "scalar": spaces.Box(-1, 1, ()),
    "matrix": spaces.Box(-1, 1, (3, 4)),
    "integers": spaces.Box(-5, 5, (4,), np.int32),
    "bytes": spaces.Box(0, 255, (16,), np.uint8),
    "nature": spaces.Box(0, 255, (84, 84, 4), np.uint8),
    "nature-first": spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "rgb": spaces.Box(0, 255, (64, 96, 3), np.uint8),
    "grey": spaces.Box(0, 255, (84, 84), np.uint8),
    "minatar": spaces.Box(0, 1, (10, 10, 4), np.uint8),
    "minatar-bool": spaces.Box(0, 1, (10, 10, 4), bool),
    "tiny": spaces.Box(0, 255, (2, 2), np.uint8),
    "narrow": spaces.Box(0, 255, (20, 100, 3), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete-from": spaces.Discrete(5, start=-2),
    "multi": spaces.MultiDiscrete([3, 2]),
    "multi-2d": spaces.MultiDiscrete([[3, 2], [1, 4]], start=[[0, 1], [-4, 7]]),
    "bits": spaces.MultiBinary(6),
    "bits-2d": spaces.MultiBinary([2, 3]),
    "dict": spaces.Dict(
        z=spaces.Box(-1, 1, (2,)), a=spaces.Discrete(3), deep=spaces.Dict(image=spaces.Box(0, 255, (12, 12), np.uint8))
    ),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Tuple([spaces.MultiBinary(2), spaces.Box(0, 1, (2, 2))])]),
    "dotted keys": spaces.Dict({"a.b": spaces.Discrete(2), "": spaces.Discrete(2)}),
}


def batch(space, shape, seed=0):
    """Sampled observations with leading dimensions ``shape``, as a NumPy tree."""
    space = copy.deepcopy(space)
    space.seed(seed)
    items = [space.sample() for _ in range(int(np.prod(shape)))]

    def stack(part, items):
        if isinstance(part, spaces.Dict):
            return {k: stack(s, [item[k] for item in items]) for k, s in part.spaces.items()}
        if isinstance(part, spaces.Tuple):
            return tuple(stack(s, [item[i] for item in items]) for i, s in enumerate(part.spaces))
        array = np.stack([np.asarray(item, part.dtype) for item in items])
        return array.reshape(*shape, *array.shape[1:])

    return stack(space, items)


def at(tree, index):
    if isinstance(tree, dict):
        return {k: at(v, index) for k, v in tree.items()}
    return tuple(at(v, index) for v in tree) if isinstance(tree, tuple) else tree[index]


# ---- every space, every batch shape


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("space", list(OBSERVATIONS.values()), ids=list(OBSERVATIONS))
def test_any_observation_space_with_any_batch_dimensions(space, critic):
    torch.manual_seed(0)
    policy = ActorCritic(space, FOUR, critic=critic)
    check_policy(policy, space, FOUR)
    observations = as_tensors(batch(space, (2, 3)))
    params, values = evaluate(policy, observations)
    assert params.shape == (2, 3, 4)
    assert values.shape == (2, 3)
    assert params.dtype == values.dtype == torch.float32
    torch.testing.assert_close(policy(observations), params)
    torch.testing.assert_close(policy.value(observations), values)
    one = policy(at(observations, 1))
    torch.testing.assert_close(one, params[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(policy(at(at(observations, 1), 2)), params[1, 2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("space", list(OBSERVATIONS.values()), ids=list(OBSERVATIONS))
def test_every_part_of_an_observation_reaches_the_output(space):
    """Values differ between any two different observations: nothing is dropped, merged or scaled away."""
    torch.manual_seed(0)
    policy = ActorCritic(space, FOUR, hidden=(64,))
    values = policy.value(as_tensors(batch(space, (6,)))).tolist()
    rows = [str(at(batch(space, (6,)), i)) for i in range(6)]
    assert len(set(np.round(values, 5))) == len(set(rows))


@pytest.mark.parametrize(
    ("action_space", "num_params"),
    [
        (FOUR, 4),
        (spaces.MultiDiscrete([3, 2]), 5),
        (spaces.MultiBinary(3), 3),
        (spaces.Box(-1, 1, (2, 3)), 12),
    ],
    ids=str,
)
def test_any_action_space(action_space, num_params):
    policy = ActorCritic(VECTOR, action_space)
    distribution = check_policy(policy, VECTOR, action_space)
    assert policy(torch.zeros(5, 8)).shape == (5, num_params) == (5, distribution.num_params)
    # The first policy is nearly uniform: the actor's last layer starts small.
    params = policy(torch.randn(50, 8))
    assert (params.abs() < 0.1).all()


def test_the_lunarlander_recipe_is_a_plain_sequential_of_separate_networks():
    policy = ActorCritic(VECTOR, FOUR)
    for network, outputs in ((policy.actor, 4), (policy.critic, 1)):
        kinds = [type(layer) for layer in network]
        assert kinds == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
        assert [network[i].weight.shape for i in (0, 2, 4)] == [(64, 8), (64, 64), (outputs, 64)]
    assert not {id(p) for p in policy.actor.parameters()} & {id(p) for p in policy.critic.parameters()}


def test_orthogonal_initialisation_with_the_documented_gains():
    policy = ActorCritic(VECTOR, FOUR)
    for network, gain in ((policy.actor, 0.01), (policy.critic, 1.0)):
        hidden, last = network[2].weight, network[4].weight
        torch.testing.assert_close(hidden @ hidden.T, 2 * torch.eye(64), atol=1e-5, rtol=0)
        torch.testing.assert_close(last @ last.T, gain**2 * torch.eye(len(last)), atol=1e-6, rtol=1e-4)
        assert all((layer.bias == 0).all() for layer in (network[0], network[2], network[4]))


def test_the_actor_alone_travels_unless_the_critic_shares_its_trunk():
    separate, shared = (ActorCritic(VECTOR, spaces.Box(-1, 1, (2,)), critic=kind) for kind in ("separate", "shared"))
    actor = 8 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2 + 2
    assert sum(p.numel() for p in separate.acting_parameters()) == actor
    assert sum(p.numel() for p in shared.acting_parameters()) == actor


def test_gaussian_log_std_are_parameters_that_start_where_told_and_learn():
    policy = ActorCritic(VECTOR, spaces.Box(-1, 1, (2,)), log_std=-0.5)
    params = policy(torch.randn(7, 8))
    assert (params[:, 2:] == -0.5).all()
    params[:, 2:].sum().backward()
    assert (policy.actor[-1].log_std.grad == 7).all()


@pytest.mark.parametrize("log_std", [-3.0, 0.0, 2.0])
def test_softplus_std_start_where_told_and_depend_on_the_state(log_std):
    torch.manual_seed(0)
    policy = ActorCritic(VECTOR, spaces.Box(-1, 1, (2,)), log_std=log_std, std="softplus")
    params = policy(torch.randn(50, 8))
    torch.testing.assert_close(params[:, 2:], torch.full((50, 2), log_std), rtol=0, atol=0.05)
    assert params[:, 2].std() > 0 and not hasattr(policy.actor[-1], "log_std")
    policy.actor[-1].outputs.weight.data *= 100
    features = torch.randn(50, 8)
    raw = policy.actor(features), policy.actor[-1].outputs(policy.actor[:-1](features))
    torch.testing.assert_close(raw[0][:, 2:].exp(), (1 + raw[1][:, 2:].double().exp()).log().float())


def test_softplus_std_in_the_closed_forms():
    """Log-probability, entropy and KL of the raw sample, from deviations by hand; gradients reach the deviations."""
    torch.manual_seed(1)
    space = spaces.Box(-1, 1, (2,))
    policy = ActorCritic(VECTOR, space, std="softplus", hidden=(16,)).double()
    policy.actor[-1].outputs.weight.data *= 100
    seen, other, u = torch.randn(20, 8).double(), torch.randn(20, 8).double(), torch.randn(20, 2).double()

    def by_hand(x):
        mean, raw = policy.actor[-1].outputs(policy.actor[:-1](x)).chunk(2, -1)
        return mean, torch.log1p(raw.exp())

    (m, s), (n, t) = by_hand(seen), by_hand(other)
    d, p, q = policy.distribution, policy(seen), policy(other)
    density = torch.distributions.Normal(m, s)
    torch.testing.assert_close(d.log_prob(p, u), density.log_prob(u).sum(-1))
    torch.testing.assert_close(d.entropy(p), (s.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1))
    kl = (t.log() - s.log() + (s**2 + (m - n) ** 2) / (2 * t**2) - 0.5).sum(-1)
    torch.testing.assert_close(d.kl(p, q), kl)
    d.log_prob(p, u).sum().backward()
    assert (policy.actor[-1].outputs.weight.grad[2:] != 0).any()


def test_softplus_std_far_below_and_above_zero_stay_finite():
    policy = ActorCritic(VECTOR, spaces.Box(-1, 1, (2,)), std="softplus")
    for value, expected in ((-300.0, -300.0), (-16.0, -16.0), (300.0, math.log(300.0))):
        policy.zero_grad()
        policy.actor[-1].outputs.bias.data[2:] = value
        params = policy(torch.zeros(3, 8))
        torch.testing.assert_close(params[:, 2:], torch.full((3, 2), expected))
        params.sum().backward()
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in policy.parameters())


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
def test_activations_and_depths(activation):
    for hidden in ((), (5,), (8, 8, 8)):
        for critic in ("separate", "shared"):
            check_policy(ActorCritic(VECTOR, FOUR, hidden, activation, critic), VECTOR, FOUR)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"std": "exp"}, "'exp'.*free, softplus"),
        ({"activation": "sine"}, "'sine'.*tanh, relu"),
        ({"critic": "none"}, "'none'.*separate, shared"),
        ({"hidden": (64, 0)}, r"\(64, 0\).*at least 1"),
        ({"hidden": (6.5,)}, "6.5"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        ActorCritic(VECTOR, FOUR, **settings)


def test_unreadable_observation_spaces_are_named():
    with pytest.raises(PolicyError, match=r"Text.*expected Box, Discrete"):
        ActorCritic(spaces.Dict(a=spaces.Text(5)), FOUR)


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(VECTOR), spaces.Dict(a=spaces.Text(5))], ids=str)
def test_spaces_without_a_fixed_array_form_are_named_to_the_owner_of_a_policy(space):
    with pytest.raises(PolicyError, match=r"no fixed array form; expected Box, Discrete"):
        check_policy(Linear(), space, FOUR)


# ---- what the encoders see


def test_one_hot_of_discrete_kinds_by_hand():
    space = spaces.MultiDiscrete([3, 2], start=[-1, 5])
    encoder = ActorCritic(space, FOUR).actor[0]
    rows = torch.tensor([[-1, 5], [1, 6], [0, 6]])
    assert encoder(rows).tolist() == [[1, 0, 0, 1, 0], [0, 0, 1, 0, 1], [0, 1, 0, 0, 1]]
    discrete = ActorCritic(spaces.Discrete(3, start=7), FOUR).actor[0]
    assert discrete(torch.tensor([7, 9])).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_images_of_both_channel_orders_are_the_same_to_the_network():
    last, first = spaces.Box(0, 255, (40, 50, 3), np.uint8), spaces.Box(0, 255, (3, 40, 50), np.uint8)
    a, b = ActorCritic(last, FOUR), ActorCritic(first, FOUR)
    b.load_state_dict(a.state_dict())
    images = torch.from_numpy(batch(last, (2,)))
    torch.testing.assert_close(a(images), b(images.movedim(-1, 1)))


def test_images_are_scaled_to_the_unit_interval():
    space = spaces.Box(0, 255, (40, 40, 3), np.uint8)
    policy = ActorCritic(space, FOUR)
    seen = []
    policy.actor[0].layers.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    policy(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 40, 40, 3))
    assert seen[0].unique().tolist() == [0, 1]
    # MinAtar's planes hold 0 and 1 already; dividing these by 255 would blind the network.
    small = ActorCritic(spaces.Box(0, 1, (10, 10, 4), np.uint8), FOUR)
    small.actor[0].layers.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    small(torch.ones(1, 10, 10, 4, dtype=torch.uint8))
    assert seen[1].unique().tolist() == [1]


def test_dict_parts_are_found_by_key_not_by_position():
    space = OBSERVATIONS["dict"]
    policy = ActorCritic(space, FOUR)
    observations = as_tensors(batch(space, (4,)))
    backwards = dict(reversed(observations.items()))
    assert torch.equal(policy(observations), policy(backwards))


# ---- as_tensors


def test_as_tensors_keeps_structure_and_dtypes_and_shares_memory():
    tree = {"a": np.zeros((2, 3), np.uint8), "b": (np.zeros(2, bool), [np.zeros(2, np.int32)])}
    tensors = as_tensors(tree)
    assert tensors["a"].dtype == torch.uint8
    assert tensors["b"][0].dtype == torch.bool
    assert tensors["b"][1][0].dtype == torch.int32
    tree["a"][1, 2] = 7
    assert tensors["a"][1, 2] == 7
    already = torch.zeros(2)
    assert as_tensors(already) is already


def test_as_tensors_copies_what_torch_cannot_view_without_a_word():
    frozen = np.arange(3.0)
    frozen.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_tensors(frozen).tolist() == [0, 1, 2]
        assert as_tensors(np.arange(3)[::-1]).tolist() == [2, 1, 0]
        assert as_tensors(np.arange(3, dtype=">f4")).tolist() == [0, 1, 2]
        assert as_tensors(np.float32(2)).item() == 2


# ---- the protocol


class Linear(nn.Module):
    def __init__(self, outputs=4, inputs=8):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, observations):
        return self.layer(observations)


class Critical(Linear):
    def value(self, observations):
        return self.layer(observations)[:, 0]


class Together(Linear):
    def forward_and_value(self, observations):
        params = self.layer(observations)
        return params, params[:, 0]


def test_evaluate_takes_the_shortest_way():
    x = torch.zeros(3, 8)
    assert evaluate(Linear(), x)[1] is None
    assert evaluate(Critical(), x)[1].shape == (3,)
    assert evaluate(Together(), x)[1].shape == (3,)


def test_a_fitting_module_is_accepted_and_its_distribution_returned():
    for policy in (Linear(), Critical(), Together(), nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 4))):
        assert isinstance(check_policy(policy, VECTOR, FOUR), Categorical)
    own = Linear()
    own.distribution = Categorical(4, start=0)
    assert check_policy(own, VECTOR, FOUR) is own.distribution
    own = Linear(4)
    own.distribution = DiagonalGaussian(spaces.Box(-1, 1, (2,)), squash="tanh")
    assert check_policy(own, VECTOR, spaces.Box(-1, 1, (2,))) is own.distribution


class Returning(nn.Module):
    def __init__(self, output, value=None):
        super().__init__()
        self.output = output
        if value is not None:
            self.value = lambda observations: value

    def forward(self, observations):
        return self.output


GOOD = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Linear(5), [r"\(3, 5\)", r"\(3, 4\)", r"Discrete\(4\)", "4 logits", r"Linear\(features, 4\)"]),
        (Linear(4, inputs=7), ["failed on a batch", r"\(3, 8\) float32", "RuntimeError"]),
        (Returning(torch.zeros(4)), [r"shape \(4,\)", r"\(3, 4\)"]),
        (Returning((GOOD, GOOD)), ["tuple", "expected a tensor"]),
        (Returning(None), ["NoneType"]),
        (Returning(GOOD.numpy()), ["ndarray"]),
        (Returning(GOOD.long()), ["int64", "floating-point"]),
        (Returning(GOOD * float("nan")), ["no the action space|numbers"]),
        (Returning(GOOD - float("inf")), ["numbers"]),
        (Returning(GOOD, torch.zeros(3, 1)), ["value", r"\(3, 1\)", r"\(3,\)", "squeeze"]),
        (Returning(GOOD, torch.full((3,), float("nan"))), ["value", "NaN"]),
        (Linear, ["type", "instance", "torch.nn.Module"]),
        (lambda x: x, ["function", "torch.nn.Module"]),
    ],
    ids=[
        "outputs",
        "inputs",
        "no batch",
        "tuple",
        "none",
        "numpy",
        "integers",
        "nan",
        "all masked",
        "value",
        "nan value",
        "class",
        "function",
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(policy, words):
    with pytest.raises(PolicyError) as error:
        check_policy(policy, VECTOR, FOUR)
    for word in words:
        assert re.search(word, str(error.value)), f"{word!r} not in: {error.value}"


def test_masking_policies_are_accepted():
    masked = GOOD.clone()
    masked[:, 1] = -float("inf")
    check_policy(Returning(masked), VECTOR, FOUR)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(-1, 1, (3,)), "3 means.*3 logarithms.*Linear\\(features, 6\\)"),
        (spaces.MultiDiscrete([2, 3]), "5 logits.*2 choices"),
        (spaces.MultiBinary(5), "5 logits, one per bit"),
    ],
    ids=str,
)
def test_the_message_says_what_each_kind_of_action_takes(space, words):
    with pytest.raises(PolicyError, match=words):
        check_policy(Linear(7), VECTOR, space)


def test_a_distribution_of_the_wrong_kind_or_shape_is_refused():
    policy = Linear()
    policy.distribution = "categorical"
    with pytest.raises(PolicyError, match=r"str.*clusterenv_hpc\.policies\.Distribution"):
        distribution_of(policy, FOUR)
    policy.distribution = Bernoulli(3)
    with pytest.raises(PolicyError, match=r"\(3,\).*Discrete\(4\).*\(\)"):
        distribution_of(policy, FOUR)


def test_checking_leaves_no_trace():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))

        def forward(self, observations):
            random.random()
            np.random.rand()
            torch.rand(1)
            return self.layers(observations)

    policy = Fickle()
    policy.layers[2].eval()
    modes = [module.training for module in policy.modules()]
    before = copy.deepcopy(policy.state_dict())
    space = spaces.Box(-1, 1, (8,), seed=3)
    twin = spaces.Box(-1, 1, (8,), seed=3)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    check_policy(policy, space, FOUR)
    assert [module.training for module in policy.modules()] == modes
    assert all(torch.equal(before[key], value) for key, value in policy.state_dict().items())
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    assert (space.sample() == twin.sample()).all()
    assert all(p.grad is None for p in policy.parameters())


def test_modes_return_even_if_the_policy_fails():
    policy = Linear(inputs=3)
    with pytest.raises(PolicyError):
        check_policy(policy, VECTOR, FOUR)
    assert policy.training
