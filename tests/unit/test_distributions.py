"""Distributions against closed forms in NumPy, exact enumeration, and sampled frequencies.

Frequency tests compare with bounds of 5 standard errors: with a correct sampler one comparison fails with
probability 6e-7, and the seeds are fixed, so that a failure is a finding and not weather.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from clusterenv_hpc.policies import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    distribution_for,
)

INF = float("inf")


def box(low=-1.0, high=1.0, shape=(2,), dtype=np.float32):
    return spaces.Box(low, high, shape, dtype)


ALL = {
    "categorical": Categorical(5, start=-2),
    "categorical-int32": Categorical(3, dtype=np.int32),
    "multi": MultiCategorical([2, 4, 3], start=[1, 0, -5]),
    "multi-equal": MultiCategorical([3, 3]),
    "multi-2d": MultiCategorical([[2, 3], [1, 4]]),
    "bernoulli": Bernoulli(4),
    "bernoulli-2d": Bernoulli((2, 3)),
    "gaussian": DiagonalGaussian(box()),
    "gaussian-2d": DiagonalGaussian(box(-INF, INF, (2, 2))),
    "gaussian-scalar": DiagonalGaussian(box(shape=())),
    "gaussian-float64": DiagonalGaussian(box(dtype=np.float64)),
    "tanh": DiagonalGaussian(box(-3.0, 1.0), squash="tanh"),
}
every = pytest.mark.parametrize("dist", list(ALL.values()), ids=list(ALL))


def random_params(dist, *shape, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy((scale * rng.standard_normal((*shape, dist.num_params))).astype(np.float32))


def draw(dist, params, seed=0):
    return dist.sample(params, dist.noise(params.shape[:-1], torch.Generator().manual_seed(seed)))


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---- shapes, dtypes, determinism: the same for all


@every
@pytest.mark.parametrize("batch", [(), (1,), (7,), (3, 5)], ids=str)
def test_shapes_and_dtypes_for_any_leading_dimensions(dist, batch):
    params = random_params(dist, *batch)
    noise = dist.noise(batch, torch.Generator().manual_seed(1))
    assert noise.shape == (*batch, dist.noise_size)
    assert noise.dtype == torch.float32
    for actions in (dist.sample(params, noise), dist.mode(params)):
        assert actions.shape == (*batch, *dist.action_shape)
        assert actions.numpy().dtype == dist.action_dtype
    actions = dist.sample(params, noise)
    log_prob, entropy = dist.log_prob_and_entropy(params, actions)
    for numbers in (log_prob, entropy, dist.log_prob(params, actions), dist.entropy(params), dist.kl(params, params)):
        assert numbers.shape == batch
    torch.testing.assert_close(log_prob, dist.log_prob(params, actions), rtol=0, atol=0)
    torch.testing.assert_close(entropy, dist.entropy(params), rtol=0, atol=0)


@every
def test_a_rollout_of_noise_gives_the_same_actions_step_by_step(dist):
    params = random_params(dist, 6, 4)
    noise = dist.noise((6, 4), torch.Generator().manual_seed(3))
    at_once = dist.sample(params, noise)
    by_step = torch.stack([dist.sample(params[t], noise[t]) for t in range(6)])
    assert torch.equal(at_once, by_step)
    assert torch.equal(noise, dist.noise((6, 4), torch.Generator().manual_seed(3)))
    assert not torch.equal(noise, dist.noise((6, 4), torch.Generator().manual_seed(4)))


@every
def test_noise_leaves_the_global_generator_alone(dist):
    before = torch.get_rng_state()
    dist.noise((5,), torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())


@every
def test_kl_is_zero_for_equal_positive_for_different_and_per_state(dist):
    p, q = random_params(dist, 50), random_params(dist, 50, seed=1)
    assert torch.equal(dist.kl(p, p), torch.zeros(50))
    kl = dist.kl(p, q)
    assert (kl > 0).all()
    torch.testing.assert_close(kl[7], dist.kl(p[7], q[7]))
    nearly = p + 1e-6 * (q - p)
    assert (dist.kl(p, nearly) >= 0).all()


@every
def test_kl_agrees_with_sampled_log_ratios(dist):
    p, q = random_params(dist, 1, scale=0.5), random_params(dist, 1, seed=1, scale=0.5)
    n = 40_000
    actions = draw(dist, p.expand(n, -1))
    ratios = (dist.log_prob(p.expand(n, -1), actions) - dist.log_prob(q.expand(n, -1), actions)).double()
    assert abs(ratios.mean() - dist.kl(p, q)[0]) < 5 * ratios.std() / n**0.5


@every
def test_entropy_agrees_with_sampled_log_probabilities(dist):
    p = random_params(dist, 1, scale=0.5)
    n = 40_000
    log_prob = dist.log_prob(p.expand(n, -1), draw(dist, p.expand(n, -1))).double()
    assert abs(-log_prob.mean() - dist.entropy(p)[0]) < 5 * log_prob.std() / n**0.5 + 1e-5


@every
def test_gradients_are_finite(dist):
    params = random_params(dist, 9).requires_grad_()
    actions = draw(dist, params.detach())
    log_prob, entropy = dist.log_prob_and_entropy(params, actions)
    (log_prob.sum() + entropy.sum() + dist.kl(random_params(dist, 9, seed=1), params).sum()).backward()
    assert params.grad.isfinite().all()
    assert (params.grad != 0).any()


@pytest.mark.parametrize("name", [name for name in ALL if "multi" in name or "cat" in name or "bern" in name])
def test_probabilities_of_all_actions_sum_to_one(name):
    dist = ALL[name]
    actions = torch.tensor(np.array(list(all_actions(dist)), dist.action_dtype))
    params = random_params(dist, 1).expand(len(actions), -1)
    log_prob = dist.log_prob(params, actions)
    np.testing.assert_allclose(log_prob.exp().sum(), 1, rtol=1e-5)
    # Exact enumeration of entropy and KL.
    q = random_params(dist, 1, seed=1).expand(len(actions), -1)
    p = log_prob.double().exp()
    np.testing.assert_allclose(dist.entropy(params)[0], -(p * log_prob).sum(), rtol=1e-5)
    np.testing.assert_allclose(dist.kl(params, q)[0], (p * (log_prob - dist.log_prob(q, actions))).sum(), rtol=1e-4)
    assert torch.equal(dist.mode(params[0]), actions[log_prob.argmax()])
    # Frequencies of whole actions.
    n = 40_000
    drawn = draw(dist, params[:1].expand(n, -1)).reshape(n, -1)
    for action, probability in zip(actions.reshape(len(actions), -1), p, strict=True):
        frequency = (drawn == action).all(-1).double().mean()
        assert abs(frequency - probability) <= 5 * (probability * (1 - probability) / n) ** 0.5 + 1e-12


def all_actions(dist):
    if isinstance(dist, Categorical):
        return range(dist.start, dist.start + dist.num_params)
    if isinstance(dist, Bernoulli):
        return (np.reshape(bits, dist.action_shape) for bits in itertools.product((0, 1), repeat=dist.num_params))
    starts = {"multi": [1, 0, -5]}.get(next(k for k, v in ALL.items() if v is dist), [0] * dist.nvec.size)
    ranges = [range(s, s + n) for s, n in zip(starts, dist.nvec.flat, strict=True)]
    return (np.reshape(choice, dist.action_shape) for choice in itertools.product(*ranges))


# ---- categorical kinds


def test_categorical_against_numpy():
    dist, rng = Categorical(4, start=10), np.random.default_rng(0)
    p, q = rng.standard_normal((2, 30, 4)).astype(np.float32)
    actions = rng.integers(10, 14, 30)
    P, Q = softmax(p.astype(float)), softmax(q.astype(float))
    tp, tq = torch.from_numpy(p), torch.from_numpy(q)
    np.testing.assert_allclose(
        dist.log_prob(tp, torch.from_numpy(actions)), np.log(P[np.arange(30), actions - 10]), rtol=1e-5
    )
    np.testing.assert_allclose(dist.entropy(tp), -(P * np.log(P)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(dist.kl(tp, tq), (P * np.log(P / Q)).sum(-1), rtol=1e-4)
    assert (dist.mode(tp).numpy() == p.argmax(-1) + 10).all()


def test_multi_categorical_is_a_product_of_categoricals():
    nvec, rng = np.array([[2, 5], [3, 1]]), np.random.default_rng(0)
    dist = MultiCategorical(nvec, start=np.array([[0, 1], [2, 3]]))
    assert dist.num_params == 11
    p, q = rng.standard_normal((2, 20, 11)).astype(np.float32)
    actions = rng.integers(0, nvec, (20, 2, 2)) + np.array([[0, 1], [2, 3]])
    places = [Categorical(int(n), int(s)) for n, s in zip(nvec.flat, (0, 1, 2, 3), strict=True)]
    cuts = np.cumsum(nvec.flat)[:-1]
    parts = [
        (place, torch.from_numpy(pp.copy()), torch.from_numpy(qq.copy()), torch.from_numpy(a.copy()))
        for place, pp, qq, a in zip(
            places, np.split(p, cuts, -1), np.split(q, cuts, -1), actions.reshape(20, 4).T, strict=True
        )
    ]
    tp, tq, ta = map(torch.from_numpy, (p, q, actions))
    torch.testing.assert_close(dist.log_prob(tp, ta), sum(d.log_prob(pp, a) for d, pp, _, a in parts))
    torch.testing.assert_close(dist.entropy(tp), sum(d.entropy(pp) for d, pp, _, _ in parts))
    torch.testing.assert_close(dist.kl(tp, tq), sum(d.kl(pp, qq) for d, pp, qq, _ in parts))


@pytest.mark.parametrize(
    ("dist", "fill"),
    [(Categorical(4), 0.0), (MultiCategorical([4, 2]), 0.0), (MultiCategorical([4, 4]), 0.0)],
    ids=["categorical", "padded", "equal"],
)
def test_masked_logits_are_never_chosen_and_never_nan(dist, fill):
    params = torch.full((20_000, dist.num_params), fill)
    params[:, 1] = -INF
    params[:, 3] = -INF
    actions = draw(dist, params).reshape(20_000, -1)
    assert set(actions[:, 0].tolist()) == {0, 2}
    row = params[:1].clone().requires_grad_()
    log_prob, entropy = dist.log_prob_and_entropy(row, actions[:1].reshape(1, *dist.action_shape))
    rest = dist.num_params - 4
    np.testing.assert_allclose(entropy.item(), np.log(2) + (np.log(rest) if rest else 0), rtol=1e-6)
    (log_prob.sum() + entropy.sum() + dist.kl(row, row).sum()).backward()
    assert row.grad.isfinite().all()
    assert dist.kl(params[:1], params[:1]).item() == 0
    # What p masks, q may allow at a finite price; the other way round the price is infinite.
    free = torch.full((1, dist.num_params), fill)
    np.testing.assert_allclose(dist.kl(params[:1], free).item(), np.log(2), rtol=1e-6)
    assert dist.kl(free, params[:1]).item() == INF
    assert dist.proper(params).all()


def test_huge_logits_are_certain():
    for params in ([1e30, -1e30, 0.0], [3e38, -3e38, 0.0], [200.0, -200.0, 0.0]):
        for dist in (Categorical(3), MultiCategorical([3])):
            p, q = torch.tensor([params]), torch.zeros(1, 3)
            assert (draw(dist, p.expand(1000, -1)) == 0).all()
            assert dist.entropy(p).item() == 0
            np.testing.assert_allclose(dist.kl(p, q).item(), np.log(3), rtol=1e-6)


def test_rare_actions_appear_at_their_rate():
    dist, n = Categorical(2), 2_000_000
    rate = 1e-4
    params = torch.tensor([[0.0, np.log(rate / (1 - rate))]], dtype=torch.float32).expand(n, -1)
    assert abs(draw(dist, params).double().mean() - rate) < 5 * (rate / n) ** 0.5


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_narrow_action_dtypes_do_not_overflow(dtype):
    dist = Categorical(100, start=-100, dtype=dtype)
    params = random_params(dist, 500)
    actions = draw(dist, params)
    assert actions.numpy().dtype == dtype
    reference = Categorical(100)
    torch.testing.assert_close(dist.log_prob(params, actions), reference.log_prob(params, actions.long() + 100))


def test_improper_logits_are_recognised():
    dist = Categorical(2)
    rows = torch.tensor([[0.0, 1.0], [-INF, 0.0], [-INF, -INF], [INF, 0.0], [float("nan"), 0.0]])
    assert dist.proper(rows).tolist() == [True, True, False, False, False]
    pair = torch.tensor([[0.0, 0.0, 0.0, -INF], [0.0, 0.0, -INF, -INF]])
    assert MultiCategorical([2, 2]).proper(pair).tolist() == [True, False]


# ---- bits


def test_bernoulli_against_numpy():
    dist, rng = Bernoulli((2, 2)), np.random.default_rng(0)
    p, q = 2 * rng.standard_normal((2, 30, 4)).astype(np.float32)
    actions = rng.integers(0, 2, (30, 2, 2)).astype(np.int8)
    P, Q = 1 / (1 + np.exp(-p.astype(float))), 1 / (1 + np.exp(-q.astype(float)))
    bits = actions.reshape(30, 4)
    tp, tq = torch.from_numpy(p), torch.from_numpy(q)
    expected = np.log(np.where(bits, P, 1 - P)).sum(-1)
    np.testing.assert_allclose(dist.log_prob(tp, torch.from_numpy(actions)), expected, rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(tp), -(P * np.log(P) + (1 - P) * np.log(1 - P)).sum(-1), rtol=1e-5)
    kl = (P * np.log(P / Q) + (1 - P) * np.log((1 - P) / (1 - Q))).sum(-1)
    np.testing.assert_allclose(dist.kl(tp, tq), kl, rtol=1e-4)


@pytest.mark.parametrize("logit", [-4.0, -1.0, 2.0])
def test_bits_come_at_the_sigmoid_of_their_logit(logit):
    dist, n = Bernoulli(1), 1_000_000
    rate = 1 / (1 + np.exp(-logit))
    frequency = draw(dist, torch.full((n, 1), logit)).double().mean()
    assert abs(frequency - rate) < 5 * (rate * (1 - rate) / n) ** 0.5


def test_extreme_bits_are_certain_without_nan():
    dist = Bernoulli(4)
    params = torch.tensor([[INF, -INF, 500.0, -500.0]], requires_grad=True)
    actions = draw(dist, params.detach().expand(1000, -1))
    assert (actions == torch.tensor([1, 0, 1, 0], dtype=torch.int8)).all()
    entropy = dist.entropy(params)
    assert entropy.item() == 0
    assert dist.log_prob(params, actions[:1]).item() == 0
    assert dist.kl(params, params).item() == 0
    np.testing.assert_allclose(dist.kl(params, torch.zeros(1, 4)).item(), 4 * np.log(2), rtol=1e-6)
    assert dist.kl(torch.zeros(1, 4), params).item() == INF


# ---- Gaussian


def test_gaussian_against_numpy():
    dist, rng = DiagonalGaussian(box(-1, 1, (3,))), np.random.default_rng(0)
    mean, log_std, mean2, log_std2, x = rng.standard_normal((5, 30, 3))
    std, std2 = np.exp(log_std), np.exp(log_std2)
    p = torch.from_numpy(np.concatenate((mean, log_std), -1).astype(np.float32))
    q = torch.from_numpy(np.concatenate((mean2, log_std2), -1).astype(np.float32))
    density = (-0.5 * ((x - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi))).sum(-1)
    np.testing.assert_allclose(dist.log_prob(p, torch.from_numpy(x.astype(np.float32))), density, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dist.entropy(p), (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1), rtol=1e-4)
    kl = (log_std2 - log_std + (std**2 + (mean - mean2) ** 2) / (2 * std2**2) - 0.5).sum(-1)
    np.testing.assert_allclose(dist.kl(p, q), kl, rtol=1e-4)


def test_gaussian_samples_have_the_right_moments():
    dist, n = DiagonalGaussian(box(-INF, INF, (2,))), 100_000
    params = torch.tensor([[3.0, -1.0, np.log(0.5), np.log(2.0)]], dtype=torch.float32)
    x = draw(dist, params.expand(n, -1)).double()
    std = torch.tensor([0.5, 2.0])
    assert ((x.mean(0) - torch.tensor([3.0, -1.0])).abs() < 5 * std / n**0.5).all()
    assert ((x.var(0) / std**2 - 1).abs() < 5 * (2 / n) ** 0.5).all()
    assert abs(torch.corrcoef(x.T)[0, 1]) < 5 / n**0.5


@pytest.mark.parametrize("log_std", [-1e9, -100.0, -20.0, 20.0, 100.0, 1e9])
@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_extreme_log_std_stays_finite(log_std, squash):
    dist = DiagonalGaussian(box(), squash=squash)
    params = torch.tensor([[0.5, -0.5, log_std, -log_std]], requires_grad=True)
    other = torch.tensor([[0.5, -0.5, -log_std, log_std]])
    actions = draw(dist, params.detach())
    assert actions.isfinite().all()
    numbers = [dist.log_prob(params, actions), dist.entropy(params), dist.kl(params, other), dist.kl(params, params)]
    assert all(number.isfinite().all() for number in numbers)
    assert np.isfinite(dist.env_actions(actions.numpy())).all()
    sum(number.sum() for number in numbers).backward()
    assert params.grad.isfinite().all()


def test_small_gaussian_divergences_are_not_lost_in_rounding():
    dist = DiagonalGaussian(box(shape=(1,)))
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[1e-4, 0.0]])
    np.testing.assert_allclose(dist.kl(p, q).item(), 5e-9, rtol=1e-4)


def test_tanh_log_prob_is_a_density_over_env_actions():
    dist = DiagonalGaussian(box(-3.0, 1.0, (1,)), squash="tanh")
    params = torch.tensor([0.3, -0.7])
    a = np.linspace(-3, 1, 400_001)[1:-1]
    u = np.arctanh((a + 1) / 2)
    log_prob = dist.log_prob(params.expand(len(u), 2).double(), torch.from_numpy(u[:, None]))
    density = np.exp(log_prob.numpy())
    width = a[1] - a[0]
    np.testing.assert_allclose(density.sum() * width, 1, rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(params), -(density * log_prob.numpy()).sum() * width, rtol=1e-4)


@pytest.mark.parametrize(("std", "tolerance"), [(0.1, 1e-5), (1.0, 1e-5), (2.0, 1e-4), (3.0, 1e-3), (10.0, 0.1)])
def test_tanh_entropy_quadrature(std, tolerance):
    dist = DiagonalGaussian(box(-1, 1, (1,)), squash="tanh")
    for mean in (0.0, 0.7, -3.0):
        z = np.linspace(-9, 9, 200_001)
        weights = np.exp(-0.5 * z**2)
        x = np.abs(mean + std * z)
        slope = 2 * (np.log(2) - x - np.log1p(np.exp(-2 * x)))
        expected = np.log(std) + 0.5 * np.log(2 * np.pi * np.e) + (slope * weights).sum() / weights.sum()
        entropy = dist.entropy(torch.tensor([mean, np.log(std)], dtype=torch.float64)).item()
        assert abs(entropy - expected) < tolerance


def test_tanh_kl_is_that_of_the_gaussian():
    clip, tanh = DiagonalGaussian(box()), DiagonalGaussian(box(), squash="tanh")
    p, q = random_params(clip, 10), random_params(clip, 10, seed=1)
    assert torch.equal(clip.kl(p, q), tanh.kl(p, q))


def test_env_actions_clip_to_the_bounds_and_keep_the_dtype():
    space = spaces.Box(np.array([-1, -INF, 0], np.float32), np.array([1, 5, INF], np.float32))
    dist = DiagonalGaussian(space)
    raw = np.array([[-7, -7, -7], [7, 7, 7], [0.5, 0.5, 0.5]], np.float32)
    clipped = dist.env_actions(raw)
    assert clipped.tolist() == [[-1, -7, 0], [1, 5, 7], [0.5, 0.5, 0.5]]
    assert clipped.dtype == np.float32
    assert raw[0, 0] == -7


def test_env_actions_are_the_same_array_where_nothing_is_to_do():
    for dist in (Categorical(3), MultiCategorical([2, 2]), Bernoulli(3), DiagonalGaussian(box(-INF, INF))):
        actions = np.zeros((4, *dist.action_shape), dist.action_dtype)
        assert dist.env_actions(actions) is actions


def test_env_actions_of_tanh_stay_within_and_reach_the_bounds():
    for low, high in ((-1.0, 1.0), (0.1, 0.7), (-1e-3, 1e6)):
        space = box(low, high, (1,))
        dist = DiagonalGaussian(space, squash="tanh")
        actions = dist.env_actions(np.array([[-100.0], [0.0], [0.5], [100.0]], np.float32))
        assert all(space.contains(action) for action in actions)
        np.testing.assert_allclose(actions[[0, -1], 0], [low, high], rtol=1e-6, atol=abs(high) * 1e-6)
        np.testing.assert_allclose(actions[2, 0], (low + high) / 2 + (high - low) / 2 * np.tanh(0.5), rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64, np.float16, np.float64])
def test_boxes_of_any_dtype_get_members_of_the_space(dtype):
    space = spaces.Box(0, 200, (2,), dtype)
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        space = spaces.Box(limits.min, limits.max, (2,), dtype)
    dist = distribution_for(space)
    # Samples are not rounded to the space's dtype: theirs is the log-probability that is meant.
    assert dist.action_dtype == (np.float64 if dtype == np.float64 else np.float32)
    raw = np.array([[-1e30, 1e30], [3.4, 3.6]], dist.action_dtype)
    actions = dist.env_actions(raw)
    assert all(space.contains(action) for action in actions)
    if np.dtype(dtype).kind in "iu":
        assert actions[1].tolist() == [3, 4]


def test_unbounded_tanh_and_unknown_squash_are_refused():
    with pytest.raises(ValueError, match="finite bounds"):
        DiagonalGaussian(box(-INF, 1.0), squash="tanh")
    with pytest.raises(ValueError, match="'clip', 'tanh'"):
        DiagonalGaussian(box(), squash="sigmoid")


# ---- spaces


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4),
        spaces.Discrete(3, start=-1),
        spaces.Discrete(5, dtype=np.int32),
        spaces.MultiDiscrete([3, 2]),
        spaces.MultiDiscrete([[3, 2], [4, 1]], start=[[1, 0], [0, 9]]),
        spaces.MultiDiscrete([2, 2], dtype=np.int32),
        spaces.MultiBinary(3),
        spaces.MultiBinary([2, 3]),
        spaces.Box(-1, 1, (3, 2)),
        spaces.Box(-INF, INF, ()),
    ],
    ids=str,
)
def test_sampled_actions_are_members_of_the_space(space):
    dist = distribution_for(space)
    params = random_params(dist, 200)
    actions = dist.env_actions(draw(dist, params).numpy())
    assert actions.dtype == space.dtype
    assert all(space.contains(np.asarray(action) if isinstance(space, spaces.Box) else action) for action in actions)
    greedy = dist.env_actions(dist.mode(params).numpy())
    assert all(space.contains(np.asarray(action) if isinstance(space, spaces.Box) else action) for action in greedy)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict(a=spaces.Discrete(2)), spaces.Tuple([])], ids=str)
def test_spaces_without_a_distribution_are_named_with_what_to_do(space):
    with pytest.raises(ValueError, match="expected Discrete, MultiDiscrete, MultiBinary or Box") as error:
        distribution_for(space)
    assert str(space) in str(error.value)
    assert "distribution" in str(error.value)
