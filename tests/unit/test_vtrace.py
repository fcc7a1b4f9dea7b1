"""V-trace: the recursion against the published sums, hand-computed cases, ends of episodes, and the learner on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clusterenv_hpc.learners.returns import gae, vtrace


def by_definition(log_ratios, rewards, values, next_values, terminated, truncated, valid, gamma, lam, rho_bar, c_bar):
    """One environment, as the paper writes it: a sum over the steps ahead of products of traces."""
    steps = len(rewards)
    ratios = np.exp(log_ratios)
    rho, c = np.minimum(ratios, rho_bar), lam * np.minimum(ratios, c_bar)

    def after(t):
        return 0.0 if terminated[t] else next_values[t]

    def goes_on(t):
        return valid[t] and not terminated[t] and not truncated[t] and t + 1 < steps and valid[t + 1]

    targets = np.array(values, float)
    for s in range(steps):
        t, product = s, 1.0
        while valid[s]:
            targets[s] += product * rho[t] * (rewards[t] + gamma * after(t) - values[t])
            if not goes_on(t):
                break
            product *= gamma * c[t]
            t += 1
    advantages = np.zeros(steps)
    for s in range(steps):
        if valid[s]:
            following = targets[s + 1] - values[s + 1] + after(s) if goes_on(s) else after(s)
            advantages[s] = rho[s] * (rewards[s] + gamma * following - values[s])
    return targets, advantages


def random_case(rng, steps, envs):
    terminated, truncated = rng.random((2, steps, envs)) < 0.15
    valid = rng.random((steps, envs)) < 0.85
    log_ratios, rewards, values, next_values = rng.standard_normal((4, steps, envs))
    return [log_ratios, rewards, values, next_values, terminated, truncated, valid]


@pytest.mark.parametrize(
    ("gamma", "lam", "rho_bar", "c_bar"),
    [(0.99, 1.0, 1.0, 1.0), (0.9, 0.8, 2.0, 0.7), (1.0, 1.0, 1e9, 1e9), (0.0, 1.0, 1.0, 1.0)],
)
def test_against_the_published_sums(gamma, lam, rho_bar, c_bar):
    rng = np.random.default_rng(0)
    for steps in (1, 2, 5, 30):
        case = random_case(rng, steps, 6)
        targets, advantages = vtrace(*map(torch.from_numpy, case), gamma, lam, rho_bar, c_bar)
        for env in range(6):
            want = by_definition(*(array[:, env] for array in case), gamma, lam, rho_bar, c_bar)
            np.testing.assert_allclose(targets[:, env], want[0], rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(advantages[:, env], want[1], rtol=1e-10, atol=1e-10)


def column(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)


def test_a_case_computed_by_hand():
    # Ratios 2 and 1/2, truncated at 1: rho = c = (1, 0.5); gamma 0.5, V = (1, 2), and 4 after the last step.
    no = column(False, False, dtype=torch.bool)
    targets, advantages = vtrace(
        column(np.log(2), np.log(0.5)), column(1.0, 3.0), column(1.0, 2.0), column(2.0, 4.0), no, no, ~no, 0.5
    )
    # t=1: 2 + 0.5 (3 + 0.5 * 4 - 2) = 3.5;  t=0: 1 + 1 (1 + 0.5 * 2 - 1) + 0.5 * 1 * (3.5 - 2) = 2.75
    np.testing.assert_allclose(targets[:, 0], [2.75, 3.5])
    # t=1: 0.5 (3 + 0.5 * 4 - 2) = 1.5;  t=0: 1 + 0.5 * 3.5 - 1 = 1.75
    np.testing.assert_allclose(advantages[:, 0], [1.75, 1.5])


def test_on_policy_targets_are_n_step_returns():
    rng = np.random.default_rng(1)
    steps, envs, gamma = 12, 4, 0.97
    rewards, values = rng.standard_normal((2, steps, envs))
    next_values = np.concatenate([values[1:], rng.standard_normal((1, envs))])
    no = np.zeros((steps, envs), bool)
    tensors = map(torch.from_numpy, (np.zeros((steps, envs)), rewards, values, next_values, no, no, ~no))
    targets, advantages = vtrace(*tensors, gamma)
    want = next_values[-1].copy()
    for t in reversed(range(steps)):
        want = rewards[t] + gamma * want
        np.testing.assert_allclose(targets[t], want, atol=1e-12)
    np.testing.assert_allclose(advantages, targets - torch.from_numpy(values), atol=1e-12)


def test_on_policy_it_is_gae_with_the_same_decay():
    rng = np.random.default_rng(2)
    case = random_case(rng, 20, 5)
    case[0] = np.zeros((20, 5))
    # GAE takes V_{t+1} from next_values throughout, so they must agree with values where steps are linked.
    _, _, values, next_values, terminated, truncated, valid = case
    linked = valid[:-1] & valid[1:] & ~(terminated | truncated)[:-1]
    next_values[:-1][linked] = values[1:][linked]
    tensors = [torch.from_numpy(array) for array in case]
    targets, _ = vtrace(*tensors, 0.95, 0.9)
    _, want = gae(*tensors[1:], 0.95, 0.9)
    torch.testing.assert_close(targets, want)


def test_ratio_zero_stops_everything_behind_it():
    no = column(False, False, False, dtype=torch.bool)
    far = column(0.0, -np.inf, 0.0)
    rewards, values, next_values = column(1.0, 1.0, 100.0), column(0.0, 7.0, 0.0), column(7.0, 0.0, 0.0)
    targets, advantages = vtrace(far, rewards, values, next_values, no, no, ~no, 1.0)
    np.testing.assert_allclose(targets[:, 0], [8.0, 7.0, 100.0])
    np.testing.assert_allclose(advantages[:, 0], [8.0, 0.0, 100.0])


def test_what_invalid_steps_hold_touches_nothing():
    rng = np.random.default_rng(3)
    case = random_case(rng, 15, 4)
    clean = [array.copy() for array in case]
    for array in case[:4]:
        array[~case[-1]] = np.nan
    case[3][case[4]] = np.nan  # nor is the value after a terminal state read
    dirty = vtrace(*map(torch.from_numpy, case), 0.9)
    want = vtrace(*map(torch.from_numpy, clean), 0.9)
    valid = torch.from_numpy(case[-1])
    for got, expected in zip(dirty, want, strict=True):
        torch.testing.assert_close(got[valid], expected[valid])
    assert (dirty[1][~valid] == 0).all()


def test_a_huge_ratio_is_truncated_and_finite():
    no = torch.zeros(3, 2, dtype=torch.bool)
    ones = torch.ones(3, 2)
    for output in vtrace(torch.full((3, 2), 1e30), ones, ones, ones, no, no, ~no, 0.99, rho_bar=1e9, c_bar=1.0):
        assert output.isfinite().all()
