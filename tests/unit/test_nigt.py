"""The optimizers against references written out by hand."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch

from clusterenv_hpc.gradients.nigt import NIGT, Ascent, DivergedError, linear, norm, polynomial
from clusterenv_hpc.gradients.torch_nigt import TorchNIGT


def reference(theta0, gradients_at, alpha, eta, updates):
    """The outer loop as the paper prints it; returns all theta_t and all theta~_t."""
    thetas, points = [np.array(theta0, dtype=np.float64)], []
    d = None
    for t in range(updates):
        point = thetas[0] if t == 0 else thetas[t] + ((1 - eta) / eta) * (thetas[t] - thetas[t - 1])
        points.append(point)
        g = gradients_at(t, point)
        d = g if t == 0 else (1 - eta) * d + eta * g
        length = np.linalg.norm(d)
        thetas.append(thetas[t] + (alpha * d / length if length > 0 else 0.0))
    return thetas, points


def noisy_quadratic(seed, size=7):
    rng = np.random.default_rng(seed)
    curvature, best = rng.uniform(0.1, 1.0, size), rng.normal(size=size)
    noise = rng.normal(size=(1000, size))
    return lambda t, point: -curvature * (point - best) + 0.3 * noise[t]


@pytest.mark.parametrize("eta", [1.0, 0.5, 0.1, 0.001])
@pytest.mark.parametrize("alpha", [2.0**-10, 0.3])
def test_iterates_equal_the_formulas(eta, alpha):
    gradients_at = noisy_quadratic(3)
    theta0 = np.linspace(-1, 1, 7)
    thetas, points = reference(theta0, gradients_at, alpha, eta, 200)
    optimizer = NIGT(theta0, alpha=alpha, eta=eta, dtype=np.float64)
    for t in range(200):
        np.testing.assert_allclose(optimizer.iterate, thetas[t], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(optimizer.point, points[t], rtol=1e-9, atol=1e-12 / eta)
        optimizer.step(gradients_at(t, optimizer.point))
    assert optimizer.updates == 200


def test_first_update_takes_the_whole_first_gradient():
    optimizer = NIGT([0.0, 0.0], alpha=1.0, eta=0.1, dtype=np.float64)
    optimizer.step([3.0, 4.0])
    np.testing.assert_array_equal(optimizer.direction, [3.0, 4.0])
    np.testing.assert_allclose(optimizer.iterate, [0.6, 0.8], rtol=1e-15)
    np.testing.assert_allclose(optimizer.point, [6.0, 8.0], rtol=1e-14)  # 0.6 + 9 * 0.6


def test_no_step_where_the_direction_is_zero():
    optimizer = NIGT([1.0, 2.0], alpha=0.5, eta=1.0)
    done = optimizer.step([0.0, 0.0])
    assert not done.moved
    np.testing.assert_array_equal(optimizer.iterate, [1.0, 2.0])
    optimizer.step([1.0, 0.0])
    assert optimizer.step([0.0, 0.0]).moved is False  # eta = 1 forgets the gradient before
    np.testing.assert_array_equal(optimizer.point, optimizer.iterate)


def test_momentum_that_cancels_gives_no_step_and_no_extrapolation():
    optimizer = NIGT([0.0], alpha=1.0, eta=0.5, dtype=np.float64)
    optimizer.step([1.0])
    assert optimizer.point[0] == 2.0
    assert not optimizer.step([-1.0]).moved
    assert optimizer.iterate[0] == optimizer.point[0] == 1.0


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30, 1e200, 1e308])
def test_step_length_is_alpha_whatever_the_gradients_scale(size):
    optimizer = NIGT(np.zeros(4), alpha=0.25, eta=0.1, dtype=np.float64)
    optimizer.step(size * np.array([1.0, -1.0, 1.0, 1.0]))
    np.testing.assert_allclose(optimizer.iterate, 0.125 * np.array([1, -1, 1, 1]), rtol=1e-12)


def test_norm_does_not_lose_small_or_large_vectors():
    assert norm(np.array([3e-200, 4e-200])) == pytest.approx(5e-200, rel=1e-12)
    assert norm(np.array([3e200, 4e200])) == pytest.approx(5e200, rel=1e-12)
    assert norm(np.zeros(3)) == 0.0


def test_steps_below_a_float32_ulp_add_up():
    theta = np.full(10_000, 8.0)
    optimizer = NIGT(theta, alpha=2.0**-10, eta=1.0)
    for _ in range(1000):
        optimizer.step(np.ones(10_000))
    # one step moves an entry by about 1e-5, twenty times an ulp of 8.0 in float32, of which rounding loses a part
    np.testing.assert_allclose(optimizer.iterate, 8.0 + 1000 * 2.0**-10 / 100, rtol=1e-7)


def test_points_are_snapshots():
    optimizer = NIGT([0.0, 0.0], alpha=1.0)
    first = optimizer.point
    optimizer.step([1.0, 0.0])
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, [0.0, 0.0])
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1.0


def test_schedules_are_asked_with_the_update():
    alpha, eta = polynomial(1.0, 1.0), linear(1.0, 0.5, 2)
    optimizer = NIGT([0.0], alpha=alpha, eta=eta, dtype=np.float64)
    for expected_alpha, expected_eta in [(1.0, 1.0), (1 / 2, 0.75), (1 / 3, 0.5), (1 / 4, 0.5)]:
        assert (optimizer.alpha, optimizer.eta) == pytest.approx((expected_alpha, expected_eta))
        optimizer.step([1.0])
    assert optimizer.iterate[0] == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4)


def test_plain_ascent():
    optimizer = Ascent([1.0, 1.0], alpha=0.5, dtype=np.float64)
    assert optimizer.step([2.0, -4.0]).gradient_norm == pytest.approx(math.sqrt(20))
    np.testing.assert_array_equal(optimizer.iterate, [2.0, -1.0])
    np.testing.assert_array_equal(optimizer.point, optimizer.iterate)
    with pytest.raises(ValueError, match="smaller alpha"):
        Ascent([1e308], alpha=10.0).step([1e308])


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: NIGT([0.0], alpha=1e300), "smaller alpha, or a larger eta$"),
        (lambda: NIGT([0.0], alpha=0.1, eta=1e-40), "smaller alpha, or a larger eta$"),
        (lambda: Ascent([0.0], alpha=1e300), "smaller alpha$"),
    ],
)
def test_a_point_that_leaves_float32_is_no_point(make, remedy):
    optimizer = make()
    optimizer.step([1.0])
    with pytest.raises(DivergedError, match=f"after 1 updates does not fit into float32.*{remedy}"):
        _ = optimizer.point


@pytest.mark.parametrize("make", [lambda: NIGT([1.0, 2.0], alpha=0.1, eta=0.3), lambda: Ascent([1.0, 2.0], alpha=0.1)])
@pytest.mark.parametrize("gradient", [[math.nan, 1.0], [1.0, math.inf], [1.0], [[1.0, 2.0]]])
def test_a_bad_gradient_changes_nothing(make, gradient):
    optimizer = make()
    optimizer.step([1.0, -1.0])
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="gradient must"):
        optimizer.step(gradient)
    for name, tensor in optimizer.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("eta", [0, -0.1, 1.0001, math.nan, "0.1", None, True, 1e-320])
def test_eta_outside_its_range_is_refused(eta):
    with pytest.raises(ValueError, match="eta"):
        NIGT([0.0], alpha=0.1, eta=eta)


@pytest.mark.parametrize("alpha", [0, -1, math.nan, math.inf, "1", None, True])
@pytest.mark.parametrize("kind", [NIGT, Ascent])
def test_alpha_that_is_not_positive_is_refused(kind, alpha):
    with pytest.raises(ValueError, match="alpha"):
        kind([0.0], alpha=alpha)


def test_a_schedule_that_leaves_its_range_is_named_with_the_update():
    optimizer = NIGT([0.0], alpha=linear(1.0, -1.0, 2), eta=0.5)
    optimizer.step([1.0])
    with pytest.raises(ValueError, match=r"alpha \(at update 1\)"):
        optimizer.step([1.0])
    assert optimizer.updates == 1


@pytest.mark.parametrize("theta", [[], [math.nan], [[1.0]], 1.0])
def test_a_bad_start_is_refused(theta):
    with pytest.raises(ValueError, match="theta must"):
        NIGT(theta, alpha=0.1)


def test_state_continues_bit_for_bit_through_a_file():
    gradients_at = noisy_quadratic(5)
    whole = NIGT(np.zeros(7), alpha=0.01, eta=0.1)
    for t in range(10):
        whole.step(gradients_at(t, whole.point))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    resumed = NIGT(np.ones(7), alpha=0.01, eta=0.1)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for t in range(10, 20):
        np.testing.assert_array_equal(whole.point, resumed.point)
        whole.step(gradients_at(t, whole.point))
        resumed.step(gradients_at(t, resumed.point))
    np.testing.assert_array_equal(whole.iterate, resumed.iterate)
    assert resumed.updates == 20


def test_a_state_that_does_not_fit_is_refused():
    optimizer = NIGT([0.0, 0.0], alpha=0.1)
    with pytest.raises(ValueError, match="entries"):
        optimizer.load_state_dict(Ascent([0.0, 0.0], alpha=0.1).state_dict())
    with pytest.raises(ValueError, match="2 finite entries"):
        optimizer.load_state_dict(NIGT([0.0], alpha=0.1).state_dict())


# -- torch parameters -------------------------------------------------------------------------------------------


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


def test_torch_parameters_follow_the_flat_reference():
    inputs, targets = torch.randn(16, 3).double(), torch.randn(16, 1).double()
    model, twin = small_model(), small_model()

    def descent(_, point):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(point), twin.parameters())
        twin.zero_grad()
        torch.nn.functional.mse_loss(twin(inputs), targets).backward()
        return -torch.cat([p.grad.reshape(-1) for p in twin.parameters()]).numpy()

    thetas, points = reference(flat(model), descent, 0.05, 0.2, 30)
    optimizer = TorchNIGT(model.parameters(), alpha=0.05, eta=0.2)
    for t in range(30):
        np.testing.assert_allclose(flat(model), points[t], rtol=1e-9, atol=1e-12)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    with optimizer.at_iterate():
        np.testing.assert_allclose(flat(model), thetas[30], rtol=1e-9, atol=1e-12)
    assert optimizer.updates == 30


def test_torch_maximize_and_missing_gradients():
    used, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(3))
    optimizer = TorchNIGT([used, unused], alpha=1.0, eta=1.0, maximize=True)
    with pytest.raises(ValueError, match="backward"):
        optimizer.step()
    (used * torch.tensor([3.0, 4.0])).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(used.detach().numpy(), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(unused.detach().numpy(), np.ones(3))
    optimizer.zero_grad()
    assert used.grad is None


def test_torch_state_and_refusals():
    def build():
        return TorchNIGT([torch.nn.Parameter(torch.zeros(2))], alpha=0.5, eta=0.5)

    first, second = build(), build()
    for step in range(3):
        first.params[0].grad = torch.tensor([1.0, float(step)])
        first.step()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.params[0], first.params[0])
    first.params[0].grad = torch.tensor([math.nan, 0.0])
    with pytest.raises(ValueError, match="finite"):
        first.step()
    assert torch.equal(second.params[0], first.params[0])
    wild = TorchNIGT([torch.nn.Parameter(torch.zeros(2))], alpha=1e39)
    wild.params[0].grad = torch.ones(2)
    with pytest.raises(DivergedError, match=r"torch.float32 after 1 updates; choose a smaller alpha"):
        wild.step()
    with pytest.raises(ValueError, match="floating-point"):
        TorchNIGT([torch.zeros(2, dtype=torch.int64)], alpha=0.1)
    with pytest.raises(ValueError, match="at least one"):
        TorchNIGT([], alpha=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_torch_parameters_keep_their_dtype(dtype):
    param = torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype))
    optimizer = TorchNIGT([param], alpha=1.0, eta=1.0)
    param.grad = torch.ones(2, 2, dtype=dtype)
    optimizer.step()
    assert param.dtype is dtype and torch.equal(param.float(), torch.full((2, 2), -0.5))
