"""The gradient estimator against exact enumeration and finite differences, and against itself."""

from __future__ import annotations

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from clusterenv_hpc.gradients.policy_gradient import (
    Sampler,
    Trajectories,
    advantages,
    returns_to_go,
    summed_gradient,
    trajectories,
    trajectory_gradients,
)
from clusterenv_hpc.policies import ActorCritic, Categorical, distribution_for, num_weights

GAMMA = 0.9
ENDS = -1

# A small Markov decision process, written out: (state, action) -> [(probability, next state or ENDS, reward)].
START = [(0.7, 0), (0.3, 1)]
MOVES = {
    (0, 0): [(1.0, ENDS, 0.5)],
    (0, 1): [(0.6, 1, 0.2), (0.4, 0, -1.0)],
    (1, 0): [(0.5, ENDS, 2.0), (0.5, 0, 0.0)],
    (1, 1): [(1.0, 1, 0.3)],
}


class TabularEnv(gym.Env):
    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = int(self.np_random.random() < START[1][0])
        return self.state, {}

    def step(self, action):
        outcomes = MOVES[self.state, int(action)]
        index = self.np_random.choice(len(outcomes), p=[p for p, _, _ in outcomes])
        _, following, reward = outcomes[index]
        ended = following == ENDS
        self.state = self.state if ended else following
        return self.state, reward, ended, False, {}


class Table(torch.nn.Module):
    """Logits per state; float64, so that finite differences mean something."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, observations):
        return self.logits[observations.long()]


LOGITS = np.array([[0.3, -0.4], [-0.2, 0.9]])
DIST = Categorical(2)


def probabilities(logits):
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def objective(logits, horizon, ending, dead_step, step=0, state=None):
    """The expected discounted reward of a unit, by recursion over the process; shares no code with the estimator."""
    if step == horizon:
        return 0.0
    if state is None:  # an episode begins
        return sum(p * objective(logits, horizon, ending, dead_step, step, s) for p, s in START)
    total = 0.0
    for action, pi in enumerate(probabilities(logits)[state]):
        for p, following, reward in MOVES[state, action]:
            later = 0.0
            if following != ENDS:
                later = objective(logits, horizon, ending, dead_step, step + 1, following)
            elif ending == "reset":
                after = step + (2 if dead_step else 1)
                later = objective(logits, horizon, ending, dead_step, after) if after < horizon else 0.0
            total += pi * p * (GAMMA**step * reward + later)
    return total


def finite_differences(function, logits, h=1e-5):
    gradient = np.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
        up, down = logits.copy(), logits.copy()
        up[index] += h
        down[index] -= h
        gradient[index] = (function(up) - function(down)) / (2 * h)
    return gradient.reshape(-1)


def every_unit(horizon, dead_step):
    """All recordings of ``horizon`` steps, with resets, and their probability under LOGITS."""
    pi = probabilities(LOGITS)
    found = []

    def grow(prob, steps, state, dead):
        if len(steps) == horizon:
            found.append((prob, steps))
        elif dead:  # a step that only resets: the action is ignored (here 0), its reward is made up to be noticed
            grow(prob, [*steps, (state, 0, 0.0, False, False)], None, False)
        elif state is None:
            for p, s in START:
                grow(prob * p, steps, s, False)
        else:
            for action, (p, following, reward) in ((a, m) for a in (0, 1) for m in MOVES[state, a]):
                ended = following == ENDS
                step = (state, action, reward, ended, True)
                grow(prob * pi[state, action] * p, [*steps, step], state if ended and dead_step else
                     (None if ended else following), ended and dead_step)  # fmt: skip

    grow(1.0, [], None, False)
    prob = np.array([p for p, _ in found])
    columns = [np.array([[s[k] for s in steps] for _, steps in found]).T for k in range(5)]
    return prob, columns


def as_units(columns, ending):
    states, actions, rewards, ended, valid = columns
    return trajectories(states, actions, rewards, ended, valid, ending)


@pytest.mark.parametrize("horizon", [1, 2, 4])
@pytest.mark.parametrize("dead_step", [False, True])
@pytest.mark.parametrize("ending", ["reset", "absorb"])
def test_the_expected_gradient_is_the_gradient_of_the_objective(horizon, dead_step, ending):
    prob, columns = every_unit(horizon, dead_step)
    assert prob.sum() == pytest.approx(1.0)
    units = as_units(columns, ending)
    each = trajectory_gradients(Table(LOGITS), DIST, units, GAMMA)
    expected = finite_differences(lambda x: objective(x, horizon, ending, dead_step), LOGITS)
    np.testing.assert_allclose(prob @ each.astype(np.float64), expected, atol=2e-7)
    assert np.abs(expected).max() > 0.01


def test_endings_are_different_objectives_and_absorb_ignores_what_comes_after():
    reset = objective(LOGITS, 4, "reset", False)
    assert reset != pytest.approx(objective(LOGITS, 4, "absorb", False))
    assert objective(LOGITS, 4, "absorb", True) == objective(LOGITS, 4, "absorb", False)


def test_a_baseline_leaves_the_mean_and_takes_variance():
    prob, columns = every_unit(3, False)
    units = as_units(columns, "absorb")
    plain = trajectory_gradients(Table(LOGITS), DIST, units, GAMMA).astype(np.float64)
    value = prob @ returns_to_go(units.rewards, GAMMA).T
    based = trajectory_gradients(Table(LOGITS), DIST, units, GAMMA, baseline=value[:, None]).astype(np.float64)
    # The mean return to go at a step does not depend on the action there: allowed, and exact.
    np.testing.assert_allclose(prob @ based, prob @ plain, atol=1e-6)
    variance = [prob @ ((g - prob @ g) ** 2).sum(axis=1) for g in (plain, based)]
    assert variance[1] < 0.9 * variance[0]


def test_leave_one_out_is_unbiased_over_all_pairs_of_trajectories():
    prob, columns = every_unit(2, False)
    expected = finite_differences(lambda x: objective(x, 2, "absorb", False), LOGITS)
    total = np.zeros(4)
    for i, j in itertools.product(range(len(prob)), repeat=2):
        pair = as_units([c[:, [i, j]] for c in columns], "absorb")
        got = summed_gradient(Table(LOGITS), DIST, pair, GAMMA, baseline="leave_one_out")
        total += prob[i] * prob[j] * got.astype(np.float64) / 2
    np.testing.assert_allclose(total, expected, atol=1e-6)


def test_returns_to_go_discount_from_the_start():
    rewards = np.array([[1.0, 0.0], [2.0, 1.0], [4.0, 8.0]])
    expected = [[1 + 0.5 * 2 + 0.25 * 4, 0.5 + 2.0], [1 + 1, 0.5 + 2], [1, 2]]
    np.testing.assert_allclose(returns_to_go(rewards, 0.5), expected)
    np.testing.assert_allclose(returns_to_go(rewards, 1.0)[0], rewards.sum(axis=0))


SPACES = {
    "discrete": spaces.Discrete(3, start=-1),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(4),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
}


def random_units(action_space, horizon=6, n=5, seed=0, width=4):
    rng = np.random.default_rng(seed)
    distribution = distribution_for(action_space)
    params = torch.from_numpy(rng.normal(size=(horizon, n, distribution.num_params)).astype(np.float32))
    actions = distribution.sample(params, distribution.noise((horizon, n), torch.Generator().manual_seed(seed)))
    mask = rng.random((horizon, n)) < 0.7
    mask[0] = True
    observations = rng.normal(size=(horizon, n, width)).astype(np.float32)
    return distribution, Trajectories(observations, actions.numpy(), rng.normal(size=(horizon, n)), mask)


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("baseline", ["none", "leave_one_out"])
def test_the_sum_of_single_gradients_is_the_summed_gradient(name, baseline):
    torch.manual_seed(1)
    policy = ActorCritic(spaces.Box(-1, 1, (4,)), SPACES[name], hidden=(8, 8))
    distribution, units = random_units(SPACES[name])
    each = trajectory_gradients(policy, distribution, units, 0.95, baseline=baseline)
    whole = summed_gradient(policy, distribution, units, 0.95, baseline=baseline)
    assert each.shape == (5, num_weights(policy)) and each.dtype == whole.dtype == np.float32
    np.testing.assert_allclose(each.sum(axis=0), whole, rtol=1e-4, atol=1e-5)
    one = Trajectories(units.observations[:, 2:3], units.actions[:, 2:3], units.rewards[:, 2:3], units.mask[:, 2:3])
    if baseline == "none":
        np.testing.assert_allclose(summed_gradient(policy, distribution, one, 0.95), each[2], rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_gradient_lies_as_the_weights_do():
    """Moving along one entry of the flat gradient's layout changes the surrogate by that entry."""
    from clusterenv_hpc.policies import flat_weights, load_flat_weights

    policy = ActorCritic(spaces.Box(-1, 1, (4,)), SPACES["box"], hidden=(5,)).double()
    distribution, units = random_units(SPACES["box"])
    units = Trajectories(units.observations.astype(np.float64), units.actions, units.rewards, units.mask)
    gradient = summed_gradient(policy, distribution, units, 0.9)
    factors = torch.from_numpy(advantages(units, 0.9))

    def surrogate(flat):
        load_flat_weights(policy, flat)
        with torch.no_grad():
            params = policy(torch.from_numpy(units.observations))
            return float((factors * distribution.log_prob(params, torch.from_numpy(units.actions))).sum())

    start = flat_weights(policy).copy()
    for index in range(0, len(start), 3):
        up, down = start.copy(), start.copy()
        up[index] += 1e-2
        down[index] -= 1e-2
        slope = (surrogate(up) - surrogate(down)) / (float(up[index]) - float(down[index]))
        assert slope == pytest.approx(float(gradient[index]), rel=2e-3, abs=2e-3)


def test_what_happens_at_masked_steps_cannot_matter():
    policy = ActorCritic(spaces.Box(-1, 1, (4,)), SPACES["box"], hidden=(8,))
    distribution, units = random_units(SPACES["box"])
    poisoned = Trajectories(*(np.array(x) for x in (units.observations, units.actions, units.rewards, units.mask)))
    poisoned.observations[~units.mask] = np.nan
    poisoned.actions[~units.mask] = np.inf
    rewards = np.where(units.mask, units.rewards, 0.0)
    units = Trajectories(units.observations, units.actions, rewards, units.mask)
    rewards = np.where(units.mask, rewards, np.nan)
    never = np.zeros_like(units.mask)
    poisoned = trajectories(poisoned.observations, poisoned.actions, rewards, never, units.mask, "reset")
    for estimate in (summed_gradient, trajectory_gradients):
        np.testing.assert_array_equal(
            estimate(policy, distribution, units, 0.9), estimate(policy, distribution, poisoned, 0.9)
        )


def test_frozen_parameters_and_buffers_have_zeros():
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.ones(2))
            self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
            self.unused = torch.nn.Parameter(torch.ones(3))
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, observations):
            return self.layer(observations) + self.shift + self.frozen

    distribution, units = random_units(spaces.Discrete(2))
    policy = Half()
    out = np.full(num_weights(policy), 7.0, dtype=np.float32)
    assert summed_gradient(policy, distribution, units, 0.9, out=out) is out
    each = trajectory_gradients(policy, distribution, units, 0.9)
    np.testing.assert_allclose(each.sum(axis=0), out, rtol=1e-4, atol=1e-5)
    assert np.count_nonzero(out) <= 10 and len(out) == 17


# -- sampling -----------------------------------------------------------------------------------------------------


def table_envs(n, mode=AutoresetMode.NEXT_STEP):
    return SyncVectorEnv([TabularEnv] * n, autoreset_mode=mode)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("ending", ["reset", "absorb"])
def test_sampled_gradients_have_the_exact_mean(mode, ending):
    """Mean of 4,000 trajectories within 4.5 standard errors in each of 4 entries: errs once in 10^4.6 per case."""
    horizon, policy = 4, Table(LOGITS)
    sampler = Sampler(table_envs(200, mode), DIST, horizon, ending=ending, seed=5)
    generator = torch.Generator().manual_seed(11)
    each = np.concatenate(
        [trajectory_gradients(policy, DIST, sampler.collect(policy, generator), GAMMA) for _ in range(20)]
    ).astype(np.float64)
    dead = mode is AutoresetMode.NEXT_STEP
    expected = finite_differences(lambda x: objective(x, horizon, ending, dead), LOGITS)
    error = each.std(axis=0) / np.sqrt(len(each))
    assert (np.abs(each.mean(axis=0) - expected) < 4.5 * error).all()
    assert error.max() < 0.05


def test_units_are_always_H_steps_and_begin_afresh():
    steps = []

    class Counting(TabularEnv):
        def step(self, action):
            steps.append(1)
            return super().step(action)

    sampler = Sampler(SyncVectorEnv([Counting], autoreset_mode=AutoresetMode.SAME_STEP), DIST, 30, seed=1)
    units = sampler.collect(Table(LOGITS), torch.Generator().manual_seed(0))
    assert len(steps) == 30 and units.horizon == 30 and len(units) == 1
    first_end = int(units.mask.sum())
    assert first_end < 30 and (units.mask[:first_end]).all() and (units.rewards[first_end:] == 0).all()


@pytest.mark.parametrize("ending", ["reset", "absorb"])
def test_a_step_that_only_resets_is_nobodys_action(ending):
    sampler = Sampler(table_envs(20), DIST, 12, ending=ending, seed=4)
    units = sampler.collect(Table(LOGITS), torch.Generator().manual_seed(0))
    ended = sampler._ended
    assert ended[:-1].any()
    assert not units.mask[1:][ended[:-1]].any()
    alive = np.ones(20, dtype=bool)
    for step in range(12):
        wanted = alive if ending == "absorb" or step == 0 else ~ended[step - 1]
        np.testing.assert_array_equal(units.mask[step], wanted)
        alive = alive & ~ended[step]


def test_a_unit_is_given_up_between_two_steps():
    sampler = Sampler(table_envs(3), DIST, 10, seed=1)
    asked = []

    def keep_going():
        asked.append(1)
        return len(asked) <= 4

    assert sampler.collect(Table(LOGITS), keep_going=keep_going) is None
    assert len(asked) == 5
    assert sampler.collect(Table(LOGITS)).horizon == 10


def test_the_same_seeds_give_the_same_unit():
    def unit():
        sampler = Sampler(table_envs(3), DIST, 10, seed=1)
        return sampler.collect(Table(LOGITS), torch.Generator().manual_seed(3))

    a, b = unit(), unit()
    np.testing.assert_array_equal(a.actions, b.actions)
    np.testing.assert_array_equal(a.rewards, b.rewards)


def test_nested_observations():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Tuple((spaces.Discrete(4), spaces.Box(0, 1, (2,))))})

    class Nested(gym.Env):
        observation_space, action_space = space, spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            if seed is not None:
                space.seed(seed)
            return space.sample(), {}

        def step(self, action):
            return space.sample(), float(action), False, False, {}

    policy = ActorCritic(space, spaces.Discrete(2), hidden=(8,))
    sampler = Sampler(SyncVectorEnv([Nested] * 3), policy.distribution, 5)
    units = sampler.collect(policy, torch.Generator().manual_seed(3))
    each = trajectory_gradients(policy, policy.distribution, units, 0.9)
    np.testing.assert_allclose(
        each.sum(axis=0), summed_gradient(policy, policy.distribution, units, 0.9), rtol=1e-4, atol=1e-5
    )


def test_bad_input_is_named():
    distribution, units = random_units(spaces.Discrete(2))
    policy = torch.nn.Linear(4, 2)
    one = Trajectories(units.observations[:, :1], units.actions[:, :1], units.rewards[:, :1], units.mask[:, :1])
    late = units.mask.copy()
    late[0, 1] = False
    cases = [
        (lambda: Sampler(table_envs(1), DIST, 0), "horizon"),
        (lambda: Sampler(table_envs(1), DIST, -3), "horizon"),
        (lambda: Sampler(table_envs(1), DIST, 3, ending="stop"), "ending"),
        (lambda: Sampler(table_envs(1, AutoresetMode.DISABLED), DIST, 3), "autoreset"),
        (lambda: summed_gradient(policy, distribution, units, 0.0), "gamma"),
        (lambda: summed_gradient(policy, distribution, units, 1.1), "gamma"),
        (lambda: summed_gradient(policy, distribution, units, 0.9, baseline="mean"), "baseline"),
        (lambda: summed_gradient(policy, distribution, one, 0.9, baseline="leave_one_out"), "at least 2"),
        (lambda: summed_gradient(policy, distribution, units, 0.9, out=np.zeros(3, np.float32)), "out must"),
        (lambda: Trajectories(units.observations, units.actions, units.rewards[0], units.mask), "rewards must"),
        (lambda: Trajectories(units.observations, units.actions[1:], units.rewards, units.mask), "mask and actions"),
        (lambda: Trajectories(units.observations, units.actions, units.rewards, late), "first step"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
