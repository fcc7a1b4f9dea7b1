"""PPO: its loss against the published formula, what enters it, resuming, and the trap of stale policies."""

from __future__ import annotations

import copy
import dataclasses
import io

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv_hpc.learners import PPO, Learner, PPOConfig
from clusterenv_hpc.learners.optimizer import FlatAdam
from clusterenv_hpc.learners.ppo import clipped_ratio, ratio_bounds
from clusterenv_hpc.policies import ActorCritic, PolicyError, distribution_for
from clusterenv_hpc.rollout import Episodes, Rollout

VECTOR, FOUR = spaces.Box(-1, 1, (3,)), spaces.Discrete(4)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Networks this small gain nothing from threads, and threads that wait for each other make the tests slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


NO_EPISODES = Episodes(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


def make_rollout(policy, action_space=FOUR, steps=12, envs=4, seed=0, behaviour=None):
    """A rollout of random observations with next-step autoreset; actions from ``behaviour`` (default: the policy)."""
    rng = np.random.default_rng(seed)
    dist = distribution_for(action_space)
    observations = rng.standard_normal((steps + 1, envs, 3)).astype(np.float32)
    terminated, truncated = rng.random((2, steps, envs)) < 0.1
    valid = np.ones((steps, envs), bool)
    for t in range(1, steps):
        valid[t] = ~((terminated[t - 1] | truncated[t - 1]) & valid[t - 1])
    terminated &= valid
    truncated &= valid
    next_observations = observations[1:].copy()
    ended = terminated | truncated
    next_observations[ended] = rng.standard_normal((ended.sum(), 3))
    with torch.no_grad():
        params = (behaviour or policy)(torch.from_numpy(observations[:-1]))
    noise = dist.noise((steps, envs), torch.Generator().manual_seed(seed))
    return Rollout(
        observations=observations[:-1],
        next_observations=next_observations,
        actions=dist.sample(params, noise).numpy(),
        behaviour_params=params.numpy(),
        rewards=rng.standard_normal((steps, envs)),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        versions=np.zeros((steps, envs), np.int64),
        rows=np.arange(envs),
        ranks=np.ones(envs, np.int64),
        episodes=NO_EPISODES,
        version=0,
    )


def make_policy(seed=0, action_space=FOUR, **settings):
    torch.manual_seed(seed)
    policy = ActorCritic(VECTOR, action_space, hidden=(16,), **settings)
    with torch.no_grad():
        for parameter in policy.actor[-1].parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # away from uniform
    return policy


def weights(policy):
    return torch.cat([p.detach().reshape(-1) for p in policy.parameters()])


# ---- the loss


def policy_loss(new, old, advantages, clip):
    return -clipped_ratio(new, old, *ratio_bounds(advantages, clip)) * advantages


def test_policy_loss_and_gradient_are_those_of_the_published_formula():
    rng = torch.Generator().manual_seed(0)
    new = torch.randn(500, generator=rng).mul(0.3).requires_grad_()
    old, advantages = 0.3 * torch.randn(500, generator=rng), torch.randn(500, generator=rng)
    ratio = (new - old).exp()
    published = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    ours = policy_loss(new, old, advantages, 0.2)
    torch.testing.assert_close(ours, published)
    (expected,) = torch.autograd.grad(published.sum(), new, retain_graph=True)
    (got,) = torch.autograd.grad(ours.sum(), new)
    torch.testing.assert_close(got, expected)
    assert (got == 0).any()
    assert (got != 0).any()


def test_policy_loss_survives_absurd_ratios():
    new = torch.tensor([500.0, 500.0, -500.0, -500.0, -torch.inf], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    loss = policy_loss(new, torch.zeros(5), advantages, 0.2)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad.isfinite().all()


def test_an_update_is_the_textbook_update():
    """One epoch in one batch, against the formulas written out by hand with autograd and a plain Adam."""
    settings = {"epochs": 1, "minibatch_size": 10_000, "reward_scale": 0.5, "gamma": 0.9, "gae_lambda": 0.8}
    config = PPOConfig(**settings, entropy_coef=0.03, value_coef=0.7, max_grad_norm=0.1, max_importance=1.1)
    policy, stale = make_policy(0), make_policy(1)
    rollout = make_rollout(policy, behaviour=stale, steps=20)
    reference = copy.deepcopy(policy)

    valid = rollout.valid
    observations = torch.from_numpy(rollout.observations)
    with torch.no_grad():
        values = reference.value(observations).numpy()
        next_values = reference.value(torch.from_numpy(rollout.next_observations)).numpy()
    advantages = np.zeros(valid.shape)
    for env in range(valid.shape[1]):
        following = 0.0
        for t in reversed(range(valid.shape[0])):
            if not valid[t, env]:
                following = 0.0
                continue
            if rollout.terminated[t, env] or rollout.truncated[t, env]:
                following = 0.0
            bootstrap = 0.0 if rollout.terminated[t, env] else 0.9 * next_values[t, env]
            delta = 0.5 * rollout.rewards[t, env] + bootstrap - values[t, env]
            following = advantages[t, env] = delta + 0.9 * 0.8 * following
    targets = torch.from_numpy((advantages + values)[valid]).float()
    advantages = torch.from_numpy(advantages[valid]).float()
    advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    actions = torch.from_numpy(rollout.actions[valid])
    rows = torch.arange(len(actions))
    behaviour = torch.from_numpy(rollout.behaviour_params[valid]).log_softmax(-1)[rows, actions]

    optimizer = torch.optim.Adam(reference.parameters(), lr=3e-4 * 0.75, eps=1e-5)
    log_probs = reference(observations[torch.from_numpy(valid)]).log_softmax(-1)
    log_prob = log_probs[rows, actions]
    importance = (log_prob.detach() - behaviour).exp()
    assert (importance > 1.1).any()
    ratio = (log_prob - log_prob.detach()).exp()
    surrogate = (importance.clamp(max=1.1) * advantages * ratio).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    value_loss = (reference.value(observations[torch.from_numpy(valid)]) - targets).square().mean()
    (0.7 * value_loss - surrogate - 0.03 * entropy).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert norm > 0.1
    optimizer.step()

    metrics = PPO(policy, config, FOUR).update(rollout, progress=0.25)
    torch.testing.assert_close(weights(policy), weights(reference), rtol=1e-5, atol=1e-7)
    for key, expected in {
        "policy_loss": -surrogate.detach(),
        "entropy": entropy.detach(),
        "value_loss": value_loss.detach(),
        "grad_norm": norm,
        "importance_mean": importance.mean(),
        "importance_clipped": (importance > 1.1).float().mean(),
        "learning_rate": 3e-4 * 0.75,
        "epochs_run": 1,
        "clip_fraction": 0,
    }.items():
        assert metrics[key] == pytest.approx(float(expected), rel=1e-4, abs=1e-6), key
    start = (advantages * 0 + targets - torch.from_numpy(values[valid])).var() / targets.var()
    assert metrics["explained_variance"] == pytest.approx(1 - start.item(), rel=1e-4)
    with torch.no_grad():
        before = log_probs.detach()
        after = policy(observations[torch.from_numpy(valid)]).log_softmax(-1)
    assert metrics["kl_update"] == pytest.approx((before.exp() * (before - after)).sum(-1).mean().item(), rel=1e-2)
    assert all(type(value) is float for value in metrics.values())


# ---- the trap


def policy_gradient(objective, distance):
    """Norm of the first policy gradient when the behaviour policy is ``distance`` logits away; and the KL between."""
    policy = make_policy(0)
    stale = copy.deepcopy(policy)
    with torch.no_grad():
        # The learner has since moved towards action 0, which the advantages below favour.
        policy.actor[-1].bias += torch.tensor([distance, 0, 0, 0])
        policy.critic[-1].weight.zero_()  # so that an advantage has the sign of its reward
    rollout = make_rollout(policy, behaviour=stale, steps=50)
    rollout = dataclasses.replace(
        rollout,
        rewards=np.where(rollout.actions == 0, 1.0, -1.0),
        terminated=np.ones_like(rollout.terminated),
        truncated=np.zeros_like(rollout.truncated),
        valid=np.ones_like(rollout.valid),
    )
    config = PPOConfig(
        objective=objective, epochs=1, minibatch_size=10_000, entropy_coef=0.0, value_coef=0.0, max_grad_norm=None
    )
    dist = distribution_for(FOUR)
    with torch.no_grad():
        kl = dist.kl(torch.from_numpy(rollout.behaviour_params), policy(torch.from_numpy(rollout.observations))).mean()
    return PPO(policy, config, FOUR).update(rollout, 0.0)["grad_norm"], kl.item()


def test_a_stale_behaviour_policy_silences_the_coupled_objective_and_not_the_decoupled():
    fresh, _ = policy_gradient("coupled", 0.0)
    coupled, kl = policy_gradient("coupled", 2.0)
    decoupled, _ = policy_gradient("decoupled", 2.0)
    assert kl > 0.3  # a worker with delta = 0.3 would only now ask for weights
    assert fresh > 0.01
    assert coupled < 1e-6 * fresh
    assert decoupled > 0.1 * fresh


def test_both_objectives_agree_when_the_data_is_fresh():
    updated = []
    for objective in ("coupled", "decoupled"):
        policy = make_policy()
        PPO(policy, PPOConfig(objective=objective), FOUR, seed=1).update(make_rollout(policy), 0.0)
        updated.append(weights(policy))
    torch.testing.assert_close(*updated, rtol=1e-4, atol=1e-6)


def test_importance_weights_are_truncated_where_told():
    policy, stale = make_policy(0), make_policy(3)
    rollout = make_rollout(policy, behaviour=stale, steps=60)
    metrics = {
        limit: PPO(copy.deepcopy(policy), PPOConfig(max_importance=limit), FOUR).update(rollout, 0.0)
        for limit in (1.0, 1e6)
    }
    assert 0.1 < metrics[1.0]["importance_clipped"] < 0.9
    assert metrics[1e6]["importance_clipped"] == 0


# ---- what enters


def test_invalid_steps_never_enter():
    policy = make_policy()
    rollout = make_rollout(policy, steps=30)
    assert not rollout.valid.all()
    holes = ~rollout.valid

    def spoilt(array, value):
        array = array.copy()
        array[holes] = value
        return array

    dirty = dataclasses.replace(
        rollout,
        observations=spoilt(rollout.observations, np.nan),
        next_observations=spoilt(rollout.next_observations, np.nan),
        actions=spoilt(rollout.actions, 99),
        behaviour_params=spoilt(rollout.behaviour_params, np.nan),
        rewards=spoilt(rollout.rewards, np.nan),
    )
    twin = copy.deepcopy(policy)
    clean_metrics = PPO(policy, PPOConfig(), FOUR).update(rollout, 0.0)
    assert PPO(twin, PPOConfig(), FOUR).update(dirty, 0.0) == clean_metrics
    assert torch.equal(weights(policy), weights(twin))


def test_time_limits_bootstrap_from_the_final_observation_and_death_does_not():
    policy = make_policy()
    rollout = make_rollout(policy, steps=30)

    def update_with_final_observations_moved(where):
        moved = rollout.next_observations.copy()
        moved[where] += 1.0
        twin = copy.deepcopy(policy)
        PPO(twin, PPOConfig(), FOUR).update(dataclasses.replace(rollout, next_observations=moved), 0.0)
        return weights(twin)

    unmoved = update_with_final_observations_moved(np.zeros_like(rollout.valid))
    assert torch.equal(update_with_final_observations_moved(rollout.terminated), unmoved)
    assert not torch.equal(update_with_final_observations_moved(rollout.truncated & ~rollout.terminated), unmoved)
    last = np.zeros_like(rollout.valid)
    last[-1] = rollout.valid[-1] & ~rollout.terminated[-1]
    assert not torch.equal(update_with_final_observations_moved(last), unmoved)


def test_a_rollout_without_valid_steps_changes_nothing():
    policy = make_policy()
    rollout = make_rollout(policy)
    before = weights(policy)
    metrics = PPO(policy, PPOConfig(), FOUR).update(
        dataclasses.replace(rollout, valid=np.zeros_like(rollout.valid)), 0.0
    )
    assert metrics["epochs_run"] == 0
    assert torch.equal(weights(policy), before)


def test_a_single_valid_step_is_enough():
    policy = make_policy()
    rollout = make_rollout(policy, steps=3)
    valid = np.zeros_like(rollout.valid)
    valid[1, 2] = True
    metrics = PPO(policy, PPOConfig(), FOUR).update(dataclasses.replace(rollout, valid=valid), 0.0)
    assert all(np.isfinite(value) for value in metrics.values())


def test_arrays_that_are_read_only_or_strided_are_taken():
    policy = make_policy()
    rollout = make_rollout(policy)
    twin = copy.deepcopy(policy)
    changed = {}
    for field in dataclasses.fields(Rollout):
        value = getattr(rollout, field.name)
        if isinstance(value, np.ndarray) and value.ndim > 1:
            value = np.asfortranarray(value)
            value.setflags(write=False)
            changed[field.name] = value
    PPO(policy, PPOConfig(), FOUR).update(rollout, 0.0)
    PPO(twin, PPOConfig(), FOUR).update(dataclasses.replace(rollout, **changed), 0.0)
    assert torch.equal(weights(policy), weights(twin))


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Discrete(3, start=5),
        spaces.MultiDiscrete([2, 3], start=[1, 1]),
        spaces.MultiBinary(3),
        spaces.Box(-1, 1, (2, 1)),
        spaces.Box(-1, 1, (2,), np.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_every_action_space_learns_its_good_actions(action_space, critic):
    """Rewards favour actions near the space's first corner; log-probability of these must rise."""
    torch.manual_seed(0)
    policy = ActorCritic(VECTOR, action_space, hidden=(16,), critic=critic)
    dist = distribution_for(action_space)
    learner = PPO(policy, PPOConfig(learning_rate=3e-3, gamma=0.0, minibatch_size=64), action_space)
    means = []
    for seed in range(12):
        rollout = make_rollout(policy, action_space, steps=64, seed=seed)
        actions = rollout.actions.reshape(*rollout.rewards.shape, -1)
        corner = {spaces.Box: -1, spaces.MultiBinary: 0}.get(type(action_space), getattr(action_space, "start", 0))
        reward = -np.minimum(np.abs(actions - corner), 4).mean(-1)
        means.append(reward[rollout.valid].mean())
        metrics = learner.update(dataclasses.replace(rollout, rewards=reward), 0.0)
        assert all(np.isfinite(value) for value in metrics.values())
    assert means[-1] > means[0] + 0.1
    assert dist.num_params == rollout.behaviour_params.shape[-1]


def test_nested_observations():
    space = spaces.Dict(a=VECTOR, b=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 255, (6, 6), np.uint8)]))
    torch.manual_seed(0)
    policy = ActorCritic(space, FOUR)
    flat = make_rollout(make_policy(), steps=20)
    rng = np.random.default_rng(0)

    def nested(observations):
        shape = observations.shape[:2]
        images = rng.integers(0, 256, (*shape, 6, 6), dtype=np.uint8)
        return {"a": observations, "b": (rng.integers(0, 3, shape), images)}

    rollout = dataclasses.replace(
        flat, observations=nested(flat.observations), next_observations=nested(flat.next_observations)
    )
    before = weights(policy)
    metrics = PPO(policy, PPOConfig(), FOUR).update(rollout, 0.0)
    assert np.isfinite(metrics["policy_loss"])
    assert not torch.equal(weights(policy), before)


def test_actions_masked_since_then_do_no_harm():
    class Masked(ActorCritic):
        def forward_and_value(self, observations):
            params, values = super().forward_and_value(observations)
            return params.index_fill(-1, torch.tensor([2]), -torch.inf), values

    torch.manual_seed(0)
    policy = Masked(VECTOR, FOUR)
    rollout = make_rollout(make_policy())
    assert (rollout.actions == 2).any()
    metrics = PPO(policy, PPOConfig(), FOUR).update(rollout, 0.0)
    assert all(np.isfinite(value) for value in metrics.values())
    assert weights(policy).isfinite().all()


# ---- schedules and stops


@pytest.mark.parametrize(("schedule", "rates"), [("linear", [1.0, 0.5, 0.0]), ("constant", [1.0, 1.0, 1.0])])
def test_learning_rate_schedules(schedule, rates):
    learner = PPO(policy := make_policy(), PPOConfig(lr_schedule=schedule, epochs=1), FOUR)
    for progress, rate in zip((0.0, 0.5, 1.0), rates, strict=True):
        before = weights(policy)
        metrics = learner.update(make_rollout(policy), progress)
        assert metrics["learning_rate"] == pytest.approx(3e-4 * rate)
        assert torch.equal(before, weights(policy)) == (rate == 0)


def test_target_kl_stops_the_epochs():
    policy = make_policy()
    rollout = make_rollout(policy)
    run = {}
    for target in (None, 1e-9, 1e9):
        config = PPOConfig(epochs=5, learning_rate=1e-2, target_kl=target)
        run[target] = PPO(copy.deepcopy(policy), config, FOUR).update(rollout, 0.0)
    assert run[1e-9]["epochs_run"] == 1
    assert run[1e-9]["kl_update"] > 1e-9
    assert run[1e9] == run[None]
    assert run[None]["epochs_run"] == 5
    assert run[None]["kl_update"] > run[1e-9]["kl_update"]


@pytest.mark.parametrize("minibatch_size", [1, 32, 45, 70, 120, 10_000])
def test_minibatches_cover_the_rollout_in_equal_parts(minibatch_size):
    policy = make_policy()
    sizes = []
    original = policy.forward_and_value
    rollout = make_rollout(policy, steps=33)
    total = int(rollout.valid.sum())

    def spy(observations):
        if torch.is_grad_enabled():
            sizes.append(len(observations))
        return original(observations)

    policy.forward_and_value = spy
    PPO(policy, PPOConfig(epochs=2, minibatch_size=minibatch_size), FOUR).update(rollout, 0.0)
    assert sum(sizes) == 2 * total
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == 2 * max(1, round(total / minibatch_size))


def test_value_clip_holds_values_near_the_old_ones():
    policy = make_policy()
    rollout = dataclasses.replace(make_rollout(policy), rewards=np.full((12, 4), 100.0))
    observations = torch.from_numpy(rollout.observations)
    moved = {}
    for clip in (None, 1e-3, 1e9):
        twin = copy.deepcopy(policy)
        config = PPOConfig(epochs=30, learning_rate=1e-2, value_clip=clip, max_grad_norm=None)
        PPO(twin, config, FOUR).update(rollout, 0.0)
        moved[clip] = (twin.value(observations) - policy.value(observations)).abs().mean().item()
    assert moved[1e9] == pytest.approx(moved[None], rel=1e-5)
    assert moved[1e-3] < 0.5 * moved[None]


@pytest.mark.parametrize("progress", [-0.1, 1.1, float("nan")])
def test_progress_outside_the_run_is_refused(progress):
    policy = make_policy()
    with pytest.raises(ValueError, match="from 0 to 1"):
        PPO(policy, PPOConfig(), FOUR).update(make_rollout(policy), progress)


# ---- the optimizer


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_flat_adam_is_adam_with_a_norm_clip(max_grad_norm):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    ours.unused = nn.Parameter(torch.ones(2))
    ours[2].weight.data = torch.randn(5, 2).t()  # not contiguous
    theirs = copy.deepcopy(ours)
    flat = FlatAdam(ours.parameters(), 1.0, 1e-5, max_grad_norm)
    adam = torch.optim.Adam(theirs.parameters(), eps=1e-5)
    for step in range(20):
        rate = 0.01 * (1 - step / 20)
        x = torch.randn(7, 3)
        flat.start(rate)
        norm = flat.step(100 * ours(x).square().mean())
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        (100 * theirs(x).square().mean()).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm or float("inf"))
        adam.step()
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(weights(ours), weights(theirs))
    assert (ours.unused == 1).all()
    assert all(p.grad is None for p in ours.parameters())


def test_flat_adam_takes_up_weights_that_others_changed():
    layer = nn.Linear(2, 2)
    flat = FlatAdam(layer.parameters(), 0.0, 1e-5, None)
    with torch.no_grad():
        layer.weight.fill_(3)
    flat.start(0.0)
    flat.step(layer(torch.ones(1, 2)).sum())
    assert (layer.weight == 3).all()


def test_flat_adam_trains_mixed_precisions():
    layers = nn.ModuleList([nn.Linear(2, 2).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)])
    before = [layer.weight.clone() for layer in layers]
    flat = FlatAdam(layers.parameters(), 0.1, 1e-5, 1.0)
    flat.start(0.1)
    flat.step(sum(layer(torch.ones(1, 2, dtype=layer.weight.dtype)).double().sum() for layer in layers))
    for layer, old in zip(layers, before, strict=True):
        assert layer.weight.dtype == old.dtype
        torch.testing.assert_close(layer.weight, old - 0.1, rtol=0.02, atol=0.01)


# ---- determinism and resuming


def test_equal_seeds_give_equal_weights_and_metrics():
    runs = []
    for seed in (0, 0, 1):
        policy = make_policy()
        learner = PPO(policy, PPOConfig(minibatch_size=16), FOUR, seed=seed)
        torch.manual_seed(len(runs))  # the global generator has no part in it
        runs.append((learner.update(make_rollout(policy), 0.0), weights(policy)))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][1], runs[2][1])


def test_a_resumed_run_is_bit_equal():
    config = PPOConfig(minibatch_size=16)
    policy = make_policy()
    learner: Learner = PPO(policy, config, FOUR, seed=5)
    rollouts = [make_rollout(policy, seed=seed) for seed in range(4)]
    for rollout in rollouts[:2]:
        learner.update(rollout, 0.1)
    file = io.BytesIO()
    state = learner.state_dict()
    torch.save(state, file)
    expected = [learner.update(rollout, 0.6) for rollout in rollouts[2:]]

    file.seek(0)
    other = make_policy(seed=9)
    resumed = PPO(other, config, FOUR, seed=77)
    resumed.update(rollouts[0], 0.0)  # whatever it did before
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert [resumed.update(rollout, 0.6) for rollout in rollouts[2:]] == expected
    assert torch.equal(weights(other), weights(policy))
    # The state is a snapshot: training on did not change it.
    third = make_policy(seed=10)
    again = PPO(third, config, FOUR)
    again.load_state_dict(state)
    assert [again.update(rollout, 0.6) for rollout in rollouts[2:]] == expected


# ---- errors


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("learning_rate", 0.0, "above 0"),
        ("learning_rate", "3e-4", "above 0"),
        ("learning_rate", float("inf"), "above 0"),
        ("learning_rate", True, "above 0"),
        ("lr_schedule", "cosine", "linear, constant"),
        ("adam_eps", -1e-5, "above 0"),
        ("gamma", 1.01, "from 0 to 1"),
        ("gamma", float("nan"), "from 0 to 1"),
        ("gae_lambda", -0.1, "from 0 to 1"),
        ("clip", 0, "above 0"),
        ("clip", 1.0, "below 1"),
        ("epochs", 0, "whole number"),
        ("epochs", 2.0, "whole number"),
        ("minibatch_size", -1, "whole number"),
        ("entropy_coef", -0.01, "at least 0"),
        ("value_coef", None, "at least 0"),
        ("max_grad_norm", 0.0, "above 0 or null"),
        ("target_kl", -1.0, "above 0 or null"),
        ("reward_scale", 0.0, "above 0"),
        ("normalize_advantages", 1, "True, False"),
        ("objective", "both", "decoupled, coupled"),
        ("max_importance", 0, "above 0"),
        ("value_clip", 0.0, "above 0 or null"),
    ],
)
def test_bad_settings_name_key_value_and_what_is_allowed(key, value, words):
    with pytest.raises(ValueError) as error:
        PPOConfig(**{key: value})
    assert str(error.value).startswith(f"{key}={value!r} ")
    assert words in str(error.value)


def test_a_policy_without_values_or_parameters_is_refused():
    actor = nn.Linear(3, 4)
    with pytest.raises(PolicyError, match="value"):
        PPO(actor, PPOConfig(), FOUR).update(make_rollout(make_policy()), 0.0)
    with pytest.raises(PolicyError, match="no parameters"):
        PPO(nn.Identity(), PPOConfig(), FOUR)


def test_values_with_a_trailing_dimension_are_refused_rather_than_broadcast():
    class Column(nn.Linear):
        def value(self, observations):
            return self(observations)[:, :1]

    policy = Column(3, 4)
    with pytest.raises(PolicyError, match=r"values \(\d+, 1\)"):
        PPO(policy, PPOConfig(), FOUR).update(make_rollout(policy), 0.0)


def test_the_environment_behind_a_bad_observation_is_named():
    policy = make_policy()
    rollout = make_rollout(policy)
    rollout.observations[5, 2] = np.nan
    assert rollout.valid[5, 2]
    rollout = dataclasses.replace(rollout, rows=np.arange(4) + 10, ranks=np.array([1, 1, 2, 2]))
    with pytest.raises(FloatingPointError, match="environment 12 of worker rank 2"):
        PPO(policy, PPOConfig(), FOUR).update(rollout, 0.0)


def test_the_settings_are_a_typed_schema_for_omegaconf():
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(PPOConfig)
    merged = OmegaConf.merge(schema, {"target_kl": 0.02, "epochs": 3})
    assert OmegaConf.to_object(merged) == PPOConfig(target_kl=0.02, epochs=3)


@pytest.mark.parametrize("field", ["observations", "next_observations", "rewards"])
def test_numbers_that_are_not_finite_stop_the_update_before_the_weights(field):
    policy = make_policy()
    rollout = make_rollout(policy)
    spoilt = getattr(rollout, field).copy()
    spoilt[rollout.truncated if field == "next_observations" else rollout.valid] = np.nan
    before = weights(policy)
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        PPO(policy, PPOConfig(), FOUR).update(dataclasses.replace(rollout, **{field: spoilt}), 0.0)
    assert torch.equal(weights(policy), before)
