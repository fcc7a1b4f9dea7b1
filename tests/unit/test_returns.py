"""GAE against a loop over single environments in plain Python, on random episode structures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clusterenv_hpc.learners import gae


def by_hand(rewards, values, next_values, terminated, truncated, valid, gamma, lam):
    """One environment: split into stretches of consecutive steps, then the definition as a double sum."""
    steps = len(rewards)
    advantages = np.zeros(steps)
    for t in range(steps):
        if not valid[t]:
            continue
        total, weight, k = 0.0, 1.0, t
        while True:
            bootstrap = 0.0 if terminated[k] else gamma * next_values[k]
            total += weight * (rewards[k] + bootstrap - values[k])
            if terminated[k] or truncated[k] or k + 1 == steps or not valid[k + 1]:
                break
            weight *= gamma * lam
            k += 1
        advantages[t] = total
    return advantages


def random_case(rng, steps, envs, autoreset):
    """Episode ends, followed by reset-only steps (next-step autoreset) or by none (same-step), or holes anywhere."""
    terminated = rng.random((steps, envs)) < 0.15
    truncated = rng.random((steps, envs)) < 0.15  # sometimes both
    valid = np.ones((steps, envs), bool)
    if autoreset == "next step":
        for t in range(1, steps):
            valid[t] = ~((terminated[t - 1] | truncated[t - 1]) & valid[t - 1])
            terminated[t] &= valid[t]
            truncated[t] &= valid[t]
    elif autoreset == "holes":
        valid = rng.random((steps, envs)) < 0.8
    rewards, values, next_values = rng.standard_normal((3, steps, envs))
    return rewards, values, next_values, terminated, truncated, valid


@pytest.mark.parametrize("autoreset", ["next step", "same step", "holes"])
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.9), (0.999, 0.98)])
def test_against_the_definition(autoreset, gamma, lam):
    rng = np.random.default_rng(0)
    for steps in (1, 2, 7, 40):
        case = random_case(rng, steps, 5, autoreset)
        advantages, targets = gae(*map(torch.from_numpy, case), gamma, lam)
        valid = case[-1]
        for env in range(5):
            expected = by_hand(*(array[:, env] for array in case), gamma, lam)
            np.testing.assert_allclose(advantages[:, env], expected, atol=1e-12)
        np.testing.assert_allclose(targets, advantages.numpy() + case[1])
        assert (advantages.numpy()[~valid] == 0).all()


def test_lambda_one_targets_are_discounted_returns():
    rewards = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    values = torch.tensor([[9.0], [-4.0], [5.0]], dtype=torch.float64)
    off, on = torch.zeros(3, 1, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool)
    died = torch.tensor([[False], [False], [True]])
    successor = torch.tensor([[-4.0], [5.0], [10.0]], dtype=torch.float64)
    _, targets = gae(rewards, values, successor, died, off, on, 0.5, 1.0)
    assert targets[:, 0].tolist() == [1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3, 3]
    # A time limit is not death: what lies behind it counts.
    _, targets = gae(rewards, values, successor, off, died, on, 0.5, 1.0)
    assert targets[:, 0].tolist() == [1 + 0.5 * 2 + 0.25 * 3 + 0.125 * 10, 2 + 0.5 * 3 + 0.25 * 10, 3 + 0.5 * 10]
    # Died at the time limit: death wins.
    _, targets = gae(rewards, values, successor, died, died, on, 0.5, 1.0)
    assert targets[-1, 0] == 3


def test_invalid_steps_touch_nothing_whatever_they_hold():
    rng = np.random.default_rng(1)
    case = [array.copy() for array in random_case(rng, 30, 4, "next step")]
    clean, _ = gae(*map(torch.from_numpy, case), 0.99, 0.95)
    valid = case[-1]
    assert not valid.all()
    for array in case[:3]:
        array[~valid] = np.nan
    case[2][case[3]] = np.inf  # nor does the successor of a terminal step
    dirty, _ = gae(*map(torch.from_numpy, case), 0.99, 0.95)
    assert torch.equal(clean, dirty)


def test_inputs_are_left_alone_and_float32_stays():
    rng = np.random.default_rng(2)
    case = [torch.from_numpy(a.astype(np.float32) if a.dtype == float else a) for a in random_case(rng, 9, 3, "holes")]
    before = [array.clone() for array in case]
    advantages, targets = gae(*case, 0.99, 0.95)
    assert advantages.dtype == targets.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(before, case, strict=True))
