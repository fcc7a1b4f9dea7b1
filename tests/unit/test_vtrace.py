"""V-trace: the recursion against the published sums, hand-computed cases, ends of episodes, and the learner on it."""

from __future__ import annotations

import copy
import dataclasses
import io

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv_hpc.learners import VTrace, VTraceConfig
from clusterenv_hpc.learners.returns import gae, vtrace
from clusterenv_hpc.policies import ActorCritic, PolicyError, distribution_for
from clusterenv_hpc.rollout import Episodes, Rollout


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


VECTOR, FOUR = spaces.Box(-1, 1, (3,)), spaces.Discrete(4)
NO_EPISODES = Episodes(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Networks this small gain nothing from threads, and threads that wait for each other make the tests slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_policy(seed=0, action_space=FOUR):
    torch.manual_seed(seed)
    policy = ActorCritic(VECTOR, action_space, hidden=(16,))
    with torch.no_grad():
        for parameter in policy.actor[-1].parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))  # away from uniform
    return policy


def make_rollout(behaviour, action_space=FOUR, steps=12, envs=5, seed=0):
    """Random observations with next-step autoreset, actions from ``behaviour``."""
    rng, dist = np.random.default_rng(seed), distribution_for(action_space)
    observations = rng.standard_normal((steps + 1, envs, 3)).astype(np.float32)
    terminated, truncated = rng.random((2, steps, envs)) < 0.1
    valid = np.ones((steps, envs), bool)
    for t in range(1, steps):
        valid[t] = ~((terminated[t - 1] | truncated[t - 1]) & valid[t - 1])
    terminated &= valid
    truncated &= valid
    with torch.no_grad():
        params = behaviour(torch.from_numpy(observations[:-1]))
    noise = dist.noise((steps, envs), torch.Generator().manual_seed(seed))
    return Rollout(
        observations=observations[:-1], next_observations=observations[1:],
        actions=dist.sample(params, noise).numpy(), behaviour_params=params.numpy(),
        rewards=rng.standard_normal((steps, envs)), terminated=terminated, truncated=truncated, valid=valid,
        versions=np.zeros((steps, envs), np.int64), rows=np.arange(envs), ranks=np.ones(envs, np.int64),
        episodes=NO_EPISODES, version=0,
    )  # fmt: skip


def weights(policy):
    return torch.cat([p.detach().reshape(-1) for p in policy.parameters()])


@pytest.mark.parametrize("action_space", [FOUR, spaces.Box(-1, 1, (2,))])
def test_a_gradient_step_follows_the_written_loss(action_space):
    """The learner's step against the same objective put together here from the definition."""
    config = VTraceConfig(
        learning_rate=0.05, lr_schedule="constant", minibatch_size=1000, gamma=0.9, rho_bar=1.5, c_bar=0.8,
        entropy_coef=0.03, value_coef=0.7, max_grad_norm=None, reward_scale=0.5, scale_advantages=False,
    )  # fmt: skip
    policy = make_policy(1, action_space)
    twin = copy.deepcopy(policy)
    rollout = make_rollout(make_policy(2, action_space), action_space)
    metrics = VTrace(policy, config, action_space).update(rollout, 0.0)

    dist = distribution_for(action_space)
    flat = torch.from_numpy(rollout.observations).reshape(-1, 3)
    params, values = twin.forward_and_value(flat)
    actions = torch.from_numpy(rollout.actions).flatten(0, 1)
    log_prob = dist.log_prob(params, actions)
    ratio = log_prob - dist.log_prob(torch.from_numpy(rollout.behaviour_params).flatten(0, 1), actions)
    grid = lambda tensor: tensor.detach().numpy().reshape(12, 5).astype(float)  # noqa: E731
    with torch.no_grad():
        after = grid(twin.value(torch.from_numpy(rollout.next_observations.copy()).reshape(-1, 3)))
    targets, advantages = np.zeros((2, 12, 5))
    for env in range(5):
        case = (grid(ratio), rollout.rewards * 0.5, grid(values), after, rollout.terminated, rollout.truncated)
        targets[:, env], advantages[:, env] = by_definition(
            *(array[:, env] for array in case), rollout.valid[:, env], 0.9, 1.0, 1.5, 0.8
        )
    valid = torch.from_numpy(rollout.valid).reshape(-1)
    target, advantage = (torch.from_numpy(a.reshape(-1).astype(np.float32)) for a in (targets, advantages))
    surrogate = (log_prob * advantage)[valid].mean()
    value_loss = (values - target).square()[valid].mean()
    loss = 0.7 * value_loss - surrogate - 0.03 * dist.entropy(params)[valid].mean()
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.05, eps=config.adam_eps)
    loss.backward()
    optimizer.step()
    assert metrics["policy_loss"] == pytest.approx(-surrogate.item(), rel=1e-3)
    assert metrics["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    torch.testing.assert_close(weights(policy), weights(twin), rtol=1e-3, atol=1e-4)


def test_what_invalid_steps_hold_teaches_nothing():
    rollout = make_rollout(make_policy(2), seed=3)
    assert not rollout.valid.all()
    dirty = dataclasses.replace(
        rollout,
        observations=np.where(rollout.valid[..., None], rollout.observations, np.float32(1e9)),
        rewards=np.where(rollout.valid, rollout.rewards, np.nan),
        behaviour_params=np.where(rollout.valid[..., None], rollout.behaviour_params, np.float32(np.nan)),
    )
    results = []
    for one in (rollout, dirty):
        learner = VTrace(make_policy(1), VTraceConfig(), FOUR)
        learner.update(one, 0.0)
        results.append(weights(learner.policy))
    assert torch.equal(*results)


def test_every_valid_step_is_used_once_an_epoch_and_judged_anew(monkeypatch):
    rollout = make_rollout(make_policy(), steps=10, envs=8)
    learner = VTrace(make_policy(), VTraceConfig(minibatch_size=20, epochs=3), FOUR)
    seen, judgements = [], []
    step = learner._step

    def spy(steps, judged, part):
        seen.append(part.tolist())
        if not judgements or judgements[-1] is not judged:
            judgements.append(judged)
        return step(steps, judged, part)

    monkeypatch.setattr(learner, "_step", spy)
    called = []
    learner.meanwhile = lambda: called.append(1)
    metrics = learner.update(rollout, 0.0)
    per_epoch = len(seen) // 3
    assert per_epoch == round(rollout.env_steps / 20)
    for epoch in range(3):
        rows = [row for part in seen[epoch * per_epoch : (epoch + 1) * per_epoch] for row in part]
        assert sorted(rows) == list(range(rollout.env_steps)) and rows != sorted(rows)
    assert metrics["gradient_steps"] == len(seen) == len(called)
    assert len(judgements) == 3 and not torch.equal(judgements[0].targets, judgements[1].targets)


def test_resuming_goes_on_bit_for_bit():
    rollouts = [make_rollout(make_policy(2), seed=seed) for seed in range(4)]
    config = VTraceConfig(minibatch_size=20)
    straight = VTrace(make_policy(1), config, FOUR, seed=3)
    for rollout in rollouts[:2]:
        straight.update(rollout, 0.1)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed = VTrace(make_policy(5), config, FOUR, seed=8)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for rollout in rollouts[2:]:
        assert straight.update(rollout, 0.2) == resumed.update(rollout, 0.2)
    assert torch.equal(weights(straight.policy), weights(resumed.policy))


def test_it_learns_from_a_policy_that_is_far_away_where_a_coupled_clip_would_not():
    """The good action is rare under the behaviour policy, which never changes: the learner still finds it."""
    behaviour = make_policy(2)
    learner = VTrace(make_policy(1), VTraceConfig(learning_rate=0.02, lr_schedule="constant", gamma=0.0), FOUR)
    for seed in range(60):
        rollout = make_rollout(behaviour, steps=20, envs=8, seed=seed)
        learner.update(dataclasses.replace(rollout, rewards=(rollout.actions == 2).astype(float)), 0.0)
    with torch.no_grad():
        chosen = learner.policy(torch.randn(500, 3)).argmax(-1)
    assert (chosen == 2).float().mean() > 0.95


def test_a_rollout_without_a_valid_step_changes_nothing():
    learner = VTrace(make_policy(), VTraceConfig(), FOUR)
    before = weights(learner.policy)
    rollout = make_rollout(make_policy())
    metrics = learner.update(dataclasses.replace(rollout, valid=np.zeros_like(rollout.valid)), 0.5)
    assert metrics["gradient_steps"] == 0 and torch.equal(before, weights(learner.policy))


def test_bad_numbers_are_named():
    learner = VTrace(make_policy(), VTraceConfig(), FOUR)
    rollout = make_rollout(make_policy())
    observations = rollout.observations.copy()
    observations[0, 3] = np.nan
    with pytest.raises(FloatingPointError, match="first for environment 3 of worker rank 1"):
        learner.update(dataclasses.replace(rollout, observations=observations), 0.0)
    with pytest.raises(FloatingPointError, match="rewards"):
        learner.update(dataclasses.replace(rollout, rewards=np.full_like(rollout.rewards, np.inf)), 0.0)
    with pytest.raises(ValueError, match="rho_bar=0"):
        VTrace(make_policy(), VTraceConfig(rho_bar=0), FOUR)
    with pytest.raises(ValueError, match="progress"):
        learner.update(rollout, 1.5)

    class NoCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, observations):
            return self.layer(observations)

    with pytest.raises(PolicyError, match="V-trace needs state values"):
        VTrace(NoCritic(), VTraceConfig(), FOUR).update(rollout, 0.0)
