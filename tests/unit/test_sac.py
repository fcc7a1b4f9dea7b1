"""SAC and TD3: targets and losses by hand, actors and their units, the temperature, resuming."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from gymnasium import spaces

import clusterenv_hpc as ce
from clusterenv_hpc.learners import SAC, TD3, SACConfig, TD3Config
from clusterenv_hpc.learners.replay import Sample
from clusterenv_hpc.policies import (
    ActorCritic,
    DeterministicActor,
    GaussianActor,
    PolicyError,
    TwinCritic,
    acting_parameters,
    check_policy,
)

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
WIDE = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
SMALL = {"capacity": 500, "learning_starts": 20, "batch_size": 8, "samples_per_step": 1.0, "critic_hidden": 8}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Networks this small gain nothing from threads, and threads that wait for each other make the tests slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(kind, action_space=WIDE, seed=0, **settings):
    torch.manual_seed(seed)
    if kind is SAC:
        return SAC(GaussianActor(VECTOR, action_space, (8,)), SACConfig(**SMALL | settings), VECTOR, action_space, 4)
    return TD3(DeterministicActor(VECTOR, action_space, (8,)), TD3Config(**SMALL | settings), VECTOR, action_space, 4)


def make_sample(size=6, seed=0, raw=True):
    rng = np.random.default_rng(seed)
    states, following = torch.from_numpy(rng.standard_normal((2, size, 3)).astype(np.float32))
    actions = torch.from_numpy(rng.standard_normal((size, 2)).astype(np.float32))
    rewards = torch.from_numpy(rng.standard_normal(size).astype(np.float32))
    discounts = torch.from_numpy(rng.choice([0.0, 0.9], size).astype(np.float32))
    return Sample(np.arange(size), states, following, actions, rewards, discounts, torch.ones(size))


@pytest.mark.parametrize("kind", [GaussianActor, DeterministicActor])
def test_what_the_critic_sees_is_what_the_environment_gets(kind):
    actor = kind(VECTOR, WIDE, (8,))
    dist = check_policy(actor, VECTOR, WIDE)
    params = actor(torch.randn(300, 3) * 5)
    drawn = dist.sample(params, dist.noise((300,), torch.Generator().manual_seed(0)) * 20)
    given = dist.env_actions(drawn.detach().numpy())
    seen = actor.normalized(drawn).detach().numpy()
    assert (np.abs(seen) <= 1).all() and (np.abs(seen) > 0.99).any()
    np.testing.assert_allclose(given, (WIDE.low + WIDE.high) / 2 + seen * (WIDE.high - WIDE.low) / 2, atol=1e-5)


def test_only_the_network_of_an_actor_travels():
    for actor in (GaussianActor(VECTOR, WIDE, (8,)), DeterministicActor(VECTOR, WIDE, (8,))):
        assert sum(p.numel() for p in acting_parameters(actor)) == sum(p.numel() for p in actor.network.parameters())


def test_a_deterministic_actor_explores_in_the_actions_units():
    actor = DeterministicActor(VECTOR, WIDE, (8,), exploration=0.1)
    observations = torch.randn(5, 3)
    mean, log_std = actor.distribution.split(actor(observations))
    np.testing.assert_allclose(log_std.exp().detach(), np.broadcast_to([0.2, 0.5], (5, 2)), rtol=1e-5)
    torch.testing.assert_close(actor.normalized(mean), actor.action(observations))


def test_deviations_stay_in_their_range():
    actor = GaussianActor(VECTOR, WIDE, (8,), log_std=(-3.0, 1.0))
    _, log_std = actor.distribution.split(actor(torch.randn(1000, 3) * 1e4))
    assert log_std.min() >= -3 and log_std.max() <= 1 and log_std.std() > 0.5


def test_soft_targets_by_the_formula():
    learner = make(SAC, reward_scale=2.0)
    sample = make_sample()
    state = learner.generator.get_state()
    targets = learner.targets(sample, torch.tensor([0.3]))
    learner.generator.set_state(state)
    noise = torch.randn(6, 2, generator=learner.generator)
    with torch.no_grad():
        mean, log_std = learner.policy(sample.next_observations).chunk(2, -1)
        drawn = mean + log_std.exp() * noise
        # The density of tanh of a Gaussian, in units of [-1, 1].
        gaussian = torch.distributions.Normal(mean, log_std.exp()).log_prob(drawn)
        log_prob = (gaussian - torch.log(1 - drawn.tanh().square())).sum(-1)
        values = learner._target_critic(sample.next_observations, drawn.tanh()).min(0).values
    want = 2.0 * sample.rewards + sample.discounts * (values - 0.3 * log_prob)
    torch.testing.assert_close(targets, want, rtol=1e-4, atol=1e-4)


def test_entropy_does_not_depend_on_the_units_of_actions():
    """The same actor on actions a hundred times as wide: the same entropies, temperatures and critics."""
    metrics = []
    for scale in (1.0, 100.0):
        learner = make(SAC, spaces.Box(-scale, scale, (2,)))
        learner.start(0.0)
        metrics.append([learner.learn(make_sample(), 0.0).numpy() for _ in range(3)])
    np.testing.assert_allclose(metrics[0], metrics[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("wanted", "rises"), [(50.0, True), (-50.0, False)])
def test_the_temperature_moves_towards_the_wanted_entropy(wanted, rises):
    learner = make(SAC, target_entropy=wanted)
    learner.start(0.0)
    for _ in range(3):
        learner.learn(make_sample(), 0.0)
    assert (learner._log_temperature.item() > 0) == rises
    fixed = make(SAC, target_entropy=wanted, adapt_temperature=False, temperature=0.2)
    fixed.start(0.0)
    assert fixed.learn(make_sample(), 0.0)[3].item() == pytest.approx(0.2)
    assert fixed._log_temperature.exp().item() == pytest.approx(0.2)


def test_smoothed_targets_by_the_formula():
    learner = make(TD3, target_noise=0.8, target_noise_limit=0.5)
    sample = make_sample()
    state = learner.generator.get_state()
    targets = learner.targets(sample)
    learner.generator.set_state(state)
    noise = (torch.randn(6, 2, generator=learner.generator) * 0.8).clamp(-0.5, 0.5)
    with torch.no_grad():
        actions = (learner._target_actor.network(sample.next_observations).tanh() + noise).clamp(-1, 1)
        values = learner._target_critic(sample.next_observations, actions).min(0).values
    torch.testing.assert_close(targets, sample.rewards + sample.discounts * values)


def test_the_actor_and_the_targets_move_every_second_step():
    learner = make(TD3, actor_every=2)
    learner.start(0.0)
    weights = [torch.cat([p.detach().ravel() for p in module.parameters()])
               for module in (learner.policy, learner._target_critic, learner._target_actor)]  # fmt: skip
    for step in (1, 2):
        learner.learn(make_sample(), 0.0)
        learner.gradient_steps += 1
        now = [torch.cat([p.detach().ravel() for p in module.parameters()])
               for module in (learner.policy, learner._target_critic, learner._target_actor)]  # fmt: skip
        assert [not torch.equal(a, b) for a, b in zip(weights, now, strict=True)] == [step == 2] * 3


@pytest.mark.parametrize("kind", [SAC, TD3])
def test_a_known_best_action_is_found(kind):
    """A bandit: reward -|a - 0.5|^2 in [-1, 1]; the actor must end there."""
    rates = {"learning_rate": 1e-2, "actor_learning_rate": 1e-2}
    learner = make(kind, spaces.Box(-3.0, 3.0, (1,)), critic_hidden=32, **rates)
    learner.start(0.0)
    noise = torch.Generator().manual_seed(0)
    for _ in range(400):
        states = torch.zeros(32, 3)
        raw = torch.randn(32, 1, generator=noise) * (1.0 if kind is SAC else 3.0)
        rewards = -(learner.actor.normalized(raw) - 0.5).square().sum(-1) * 4
        sample = Sample(np.arange(32), states, states, raw, rewards, torch.zeros(32), torch.ones(32))
        learner.learn(sample, 0.0)
        learner.gradient_steps += 1
    best = learner.distribution.mode(learner.policy(torch.zeros(1, 3))).detach()
    assert learner.actor.normalized(best).item() == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("kind", [SAC, TD3])
def test_a_dimension_without_width_harms_nobody(kind):
    """Some environments fix an action by giving it equal bounds."""
    low, high = np.array([-1.0, 0.5], np.float32), np.array([1.0, 0.5], np.float32)
    learner = make(kind, spaces.Box(low, high))
    sample = make_sample()
    params = learner.policy(sample.observations)
    assert params.isfinite().all() and learner.distribution.proper(params).all()
    assert learner.actor.normalized(sample.actions).isfinite().all()
    learner.start(0.0)
    for _ in range(4):
        assert learner.learn(sample, 0.0).isfinite().all()
        learner.gradient_steps += 1


@pytest.fixture(scope="module", params=[SAC, TD3])
def collected(request):
    torch.manual_seed(1)
    actor = {SAC: GaussianActor, TD3: DeterministicActor}[request.param](VECTOR, spaces.Box(-2.0, 2.0, (1,)), (8,))
    with ce.ClusterEnv("Pendulum-v1", 4, policy=actor, sync=ce.APS(0.1), num_workers=2, seed=1) as envs:
        stream = envs.rollouts(10)
        found = []
        for _ in range(8):
            rollout = next(stream)
            arrays = {spec.name: getattr(rollout, spec.name) for spec in dataclasses.fields(rollout)}
            found.append(type(rollout)(**{k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arrays.items()}))
        return request.param, found


def test_resuming_goes_on_bit_for_bit(collected):
    kind, rollouts = collected
    torque = spaces.Box(-2.0, 2.0, (1,))
    straight = make(kind, torque)
    for rollout in rollouts[:4]:
        straight.update(rollout, 0.1)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed = make(kind, torque, seed=9)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for rollout in rollouts[4:]:
        metrics = straight.update(rollout, 0.2)
        assert metrics["gradient_steps"] > 0
        assert metrics == resumed.update(rollout, 0.2)
    for a, b in zip(straight.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_infinite_reward_is_told_as_such(collected):
    kind, rollouts = collected
    learner = make(kind, spaces.Box(-2.0, 2.0, (1,)))
    learner.update(rollouts[0], 0.0)
    with pytest.raises(FloatingPointError, match=r"critic_loss.*smaller learning rate"):
        for rollout in rollouts[1:]:
            learner.update(dataclasses.replace(rollout, rewards=np.full_like(rollout.rewards, 1e38)), 0.0)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="finite bounds"):
        GaussianActor(VECTOR, spaces.Box(-np.inf, np.inf, (2,)))
    with pytest.raises(ValueError, match="finite bounds"):
        DeterministicActor(VECTOR, spaces.Discrete(2))
    with pytest.raises(PolicyError, match="GaussianActor"):
        SAC(ActorCritic(VECTOR, WIDE), SACConfig(), VECTOR, WIDE, 4)
    with pytest.raises(PolicyError, match="DeterministicActor"):
        TD3(ActorCritic(VECTOR, WIDE), TD3Config(), VECTOR, WIDE, 4)
    assert TwinCritic(VECTOR, 2, (8,))(torch.zeros(5, 3), torch.zeros(5, 2)).shape == (2, 5)
