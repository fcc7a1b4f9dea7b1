"""n-step returns across ends of episodes, and a worker's first priorities made of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from clusterenv_hpc.learners import n_step
from clusterenv_hpc.learners.dqn import worker_errors
from clusterenv_hpc.policies import EpsilonGreedy
from clusterenv_hpc.rollout import Episodes, Rollout

NO, YES = False, True


def window(rewards, terminated=(), truncated=(), invalid=(), gamma=0.5):
    steps = len(rewards)
    flags = [np.isin(np.arange(steps), where)[:, None] for where in (terminated, truncated)]
    valid = ~np.isin(np.arange(steps), invalid)[:, None]
    total, length, terminal = n_step(np.array(rewards, float)[:, None], *flags, valid, gamma)
    return float(total[0]), int(length[0]), bool(terminal[0])


def test_cases_by_hand():
    assert window([1, 2, 4]) == (1 + 1 + 1, 3, NO)
    assert window([8]) == (8, 1, NO)
    assert window([1, 2, 4], terminated=[1]) == (1 + 1, 2, YES)  # nothing follows
    assert window([1, 2, 4], truncated=[1]) == (1 + 1, 2, NO)  # the final observation is bootstrapped from
    assert window([1, 2, 4], truncated=[0]) == (1, 1, NO)
    assert window([1, 2, 4], terminated=[2]) == (3, 3, YES)
    assert window([1, 2, 4], terminated=[0], truncated=[0]) == (1, 1, YES)  # death wins over the time limit
    assert window([1, 2, 4], invalid=[1]) == (1, 1, NO)  # a reset-only step is none: its reward, its ends do not count
    assert window([1, 2, 4], invalid=[1], terminated=[1]) == (1, 1, NO)
    assert window([1, 2, 4], invalid=[0]) == (0, 0, NO)
    assert window([1, 2, 4], terminated=[0], invalid=[1]) == (1, 1, YES)


def test_nan_in_steps_that_are_none_touches_nothing():
    assert window([1, np.nan, np.nan], invalid=[1, 2]) == (1, 1, NO)
    assert window([1, np.nan], terminated=[0]) == (1, 1, YES)


def make_rollout(rng, steps, envs, choices, autoreset="next step", epsilon=0.1):
    terminated, truncated = rng.random((2, steps, envs)) < 0.15
    valid = np.ones((steps, envs), bool)
    if autoreset == "next step":
        for t in range(1, steps):
            valid[t] = ~((terminated[t - 1] | truncated[t - 1]) & valid[t - 1])
    terminated &= valid
    truncated &= valid
    params = rng.standard_normal((steps, envs, choices + 1)).astype(np.float32)
    params[..., -1] = epsilon
    return Rollout(
        observations=np.zeros((steps, envs, 1), np.float32), next_observations=np.zeros((steps, envs, 1), np.float32),
        actions=rng.integers(0, choices, (steps, envs)), behaviour_params=params,
        rewards=np.where(valid, rng.standard_normal((steps, envs)), 0.0), terminated=terminated, truncated=truncated,
        valid=valid, versions=np.zeros((steps, envs), np.int64), rows=np.arange(envs), ranks=np.ones(envs, np.int64),
        episodes=Episodes(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)), version=0,
    )  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_worker_errors_against_a_loop_over_single_steps(n):
    rng = np.random.default_rng(n)
    steps, envs, choices, gamma, scale = 17, 5, 3, 0.9, 0.25
    rollout = make_rollout(rng, steps, envs, choices)
    last = rng.standard_normal(envs).astype(np.float32)
    errors = worker_errors(rollout, EpsilonGreedy(choices), last, n, gamma, scale)
    for row in range(envs):
        best = np.append(rollout.behaviour_params[:, row, :-1].max(1), last[row])
        for t in np.flatnonzero(rollout.valid[:, row]):
            total, k, terminal = 0.0, 0, False
            while k < n and t + k < steps and rollout.valid[t + k, row] and not terminal:
                total += gamma**k * scale * rollout.rewards[t + k, row]
                terminal = bool(rollout.terminated[t + k, row])
                k += 1
                if rollout.truncated[t + k - 1, row]:
                    break
            # After a truncation the reset-only step's row holds what the worker made of the final observation.
            want = total + (0.0 if terminal else gamma**k * best[t + k])
            want -= rollout.behaviour_params[t, row, rollout.actions[t, row]]
            assert errors[t, row] == pytest.approx(want, abs=1e-5)


def test_worker_errors_with_actions_that_do_not_count_from_zero():
    rng = np.random.default_rng(0)
    rollout = make_rollout(rng, 6, 2, 3)
    last = np.zeros(2, np.float32)
    plain = worker_errors(rollout, EpsilonGreedy(3), last, 2, 0.9)
    shifted = dataclasses.replace(rollout, actions=rollout.actions - 7)
    np.testing.assert_array_equal(worker_errors(shifted, EpsilonGreedy(3, -7), last, 2, 0.9), plain)
