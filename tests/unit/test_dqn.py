"""DQN: its targets by hand, epsilon-greedy behaviour against its definition, workers' ladder, resuming, APS."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import clusterenv_hpc as ce
from clusterenv_hpc.learners import DQN, DQNConfig
from clusterenv_hpc.learners.replay import Sample
from clusterenv_hpc.policies import ActorCritic, EpsilonGreedy, PolicyError, QNetwork, check_policy

VECTOR, THREE = spaces.Box(-1, 1, (4,)), spaces.Discrete(3)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Networks this small gain nothing from threads, and threads that wait for each other make the tests slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def probabilities(params):
    """Of each action, by the definition."""
    n, epsilon = params.shape[-1] - 1, params[..., -1:]
    best = np.eye(n)[params[..., :-1].argmax(-1)]
    return epsilon / n + (1 - epsilon) * best


def random_params(seed=0, rows=500, n=4, epsilon=None):
    rng = np.random.default_rng(seed)
    params = rng.standard_normal((rows, n + 1)).astype(np.float32)
    params[:, -1] = rng.random(rows) if epsilon is None else epsilon
    return params


def test_epsilon_greedy_against_its_definition():
    p, q = random_params(0), random_params(1)
    dist = EpsilonGreedy(4, start=-2)
    actions = np.random.default_rng(2).integers(-2, 2, 500)
    chances = probabilities(p)
    tensor = torch.from_numpy(p)
    taken = chances[np.arange(500), actions + 2]
    np.testing.assert_allclose(dist.log_prob(tensor, torch.from_numpy(actions)), np.log(taken), rtol=1e-4)
    np.testing.assert_allclose(dist.entropy(tensor), -(chances * np.log(chances)).sum(-1), rtol=1e-4, atol=1e-6)
    q[:, -1] = np.random.default_rng(3).random(500)  # the second policy's epsilon must not matter
    held = probabilities(np.concatenate((q[:, :-1], p[:, -1:]), 1))
    want = (chances * np.log(chances / held)).sum(-1)
    np.testing.assert_allclose(dist.kl(tensor, torch.from_numpy(q)), want, rtol=1e-4, atol=1e-6)
    assert (dist.mode(tensor).numpy() == p[:, :-1].argmax(-1) - 2).all()


def test_divergence_at_the_ends_of_epsilon():
    dist = EpsilonGreedy(2)
    one, other = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    assert dist.kl(one, one) == 0
    assert dist.kl(one, other) == torch.inf  # without exploration the other action is impossible
    one[-1] = other[-1] = 1.0
    assert dist.kl(one, other) == 0  # and with nothing else the values do not matter


def test_samples_have_their_probabilities():
    dist, draws = EpsilonGreedy(4), 200_000
    for epsilon in (0.0, 0.3, 1.0):
        params = torch.tensor([0.5, -1.0, 2.0, 0.0, epsilon])
        actions = dist.sample(params.expand(draws, -1), dist.noise((draws,), torch.Generator().manual_seed(0)))
        share = np.bincount(actions.numpy(), minlength=4) / draws
        np.testing.assert_allclose(share, probabilities(params.numpy()), atol=5 * 0.5 / np.sqrt(draws))


def make(config=None, num_envs=4, seed=0, **settings):
    torch.manual_seed(seed)
    policy = QNetwork(VECTOR, THREE, (16,), dueling=config.dueling if config else True, **settings)
    return policy, DQN(policy, config or DQNConfig(), THREE, num_envs, seed=seed)


def test_dueling_values_are_the_state_value_and_centred_advantages():
    policy, _ = make()
    observations = torch.randn(7, 4)
    output = policy.network(observations)
    want = output[:, :1] + output[:, 1:] - output[:, 1:].mean(1, keepdim=True)
    torch.testing.assert_close(policy(observations)[:, :-1], want)
    assert policy(observations).shape == (7, 4)
    check_policy(policy, VECTOR, THREE)


class Table(nn.Module):
    """Values straight from the observation, so that targets can be computed by hand."""

    def __init__(self, weights):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(weights))
        self.distribution = EpsilonGreedy(2)

    def forward(self, observations):
        return nn.functional.pad(observations * self.weights, (0, 1), value=0.1)


@pytest.mark.parametrize(("double", "want"), [(True, [1.0 + 0.5 * -3.0, 2.0]), (False, [1.0 + 0.5 * 2.0, 2.0])])
def test_targets_by_hand(double, want):
    config = DQNConfig(double=double, dueling=False, prioritized=False)
    learner = DQN(Table([1.0, 1.0]), config, spaces.Discrete(2), 1)
    with torch.no_grad():
        learner._target.weights.copy_(torch.tensor([2.0, -1.5]))
    # In state (1, 2) the learner prefers action 1, worth -3 to the target network, which prefers action 0, worth 2.
    following = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    sample = Sample(np.arange(2), following, following, torch.zeros(2, dtype=torch.int64),
                    torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]), torch.ones(2))  # fmt: skip
    np.testing.assert_allclose(learner.targets(sample), want)


def test_the_loss_is_weighted_and_priorities_are_the_new_errors():
    config = DQNConfig(dueling=False, priority_exponent=0.5, tau=0.25, learning_rate=0.1)
    learner = DQN(Table([1.0, 1.0]), config, spaces.Discrete(2), 2)
    told = {}
    learner.replay.set_priorities = lambda index, values: told.update(zip(index.tolist(), values.tolist(), strict=True))
    states = torch.tensor([[3.0, 0.0], [0.5, 0.0]])
    sample = Sample(np.array([7, 9]), states, states, torch.zeros(2, dtype=torch.int64),
                    torch.tensor([1.0, 1.0]), torch.zeros(2), torch.tensor([1.0, 0.5]))  # fmt: skip
    learner.start(0.0)
    loss, error, value, _ = learner.learn(sample, 0.0).tolist()
    # Errors -2 and 0.5; Huber: 2 - 0.5 = 1.5 and 0.125, of weight 1 and 0.5.
    assert loss == pytest.approx((1.5 + 0.0625) / 2)
    assert (error, value) == (pytest.approx(1.25), pytest.approx(1.75))
    assert told == {7: pytest.approx(np.sqrt(2.0), rel=1e-4), 9: pytest.approx(np.sqrt(0.5), rel=1e-4)}
    moved = learner.policy.weights.detach()
    torch.testing.assert_close(learner._target.weights, 1.0 + 0.25 * (moved - 1.0))


@pytest.fixture(scope="module")
def rollouts():
    """Real ones, from two workers in arrival order, all by the first weights."""
    torch.manual_seed(1)
    policy = QNetwork(spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2), (16,))
    with ce.ClusterEnv("CartPole-v1", 4, policy=policy, sync=ce.APS(0.1), num_workers=2, seed=1) as envs:
        stream = envs.rollouts(20)
        return [copy_of(next(stream)) for _ in range(12)]


def copy_of(rollout):
    arrays = {spec.name: getattr(rollout, spec.name) for spec in dataclasses.fields(rollout)}
    return type(rollout)(**{k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arrays.items()})


CARTPOLE = DQNConfig(capacity=1000, learning_starts=50, batch_size=16, samples_per_step=2.0)


def cartpole_learner(config=CARTPOLE, seed=0):
    torch.manual_seed(seed)
    policy = QNetwork(spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2), (16,), dueling=config.dueling)
    return DQN(policy, config, spaces.Discrete(2), 4, seed=seed)


def test_workers_explore_by_a_ladder_and_say_so(rollouts):
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.behaviour_params[..., -1], {1: 0.4, 2: 0.4**8}[int(rollout.ranks[0])], 1e-4)
    assert {int(rollout.ranks[0]) for rollout in rollouts} == {1, 2}
    policy, _ = make()
    ladder = []
    for index in range(5):
        policy.for_worker(index, 5)
        ladder.append(policy.epsilon)
    np.testing.assert_allclose(ladder, 0.4 ** (1 + np.arange(5) / 4 * 7))
    policy.for_worker(0, 1)
    assert policy.epsilon == pytest.approx(0.4**4.5)


def test_first_priorities_are_the_errors_of_the_workers_own_values(rollouts):
    learner = cartpole_learner()
    learner.policy.load_state_dict(learner.policy.state_dict())
    rollout = rollouts[0]
    priorities = learner.priorities(rollout)
    observations = torch.from_numpy(np.concatenate((rollout.observations, rollout.next_observations[-1:])))
    with torch.no_grad():
        values = torch.cat((torch.from_numpy(rollout.behaviour_params)[..., :-1],
                            learner.policy(observations[-1:])[..., :-1])).numpy()  # fmt: skip
    for t, row in np.argwhere(rollout.valid):
        total, k = 0.0, 0
        while k < 3 and t + k < 20 and rollout.valid[t + k, row]:
            total += 0.99**k * rollout.rewards[t + k, row]
            k += 1
            if rollout.terminated[t + k - 1, row]:
                break
        if not rollout.terminated[t + k - 1, row]:
            total += 0.99**k * values[t + k, row].max()
        error = abs(total - values[t, row, rollout.actions[t, row]])
        assert priorities[t, row] == pytest.approx((error + 1e-6) ** 0.6, rel=1e-4)


def test_gradient_steps_follow_the_steps_of_the_environments(rollouts):
    learner = cartpole_learner()
    steps = done = 0
    for rollout in rollouts:
        metrics = learner.update(rollout, 0.0)
        steps += rollout.env_steps if len(learner.replay) >= 50 else 0
        done += metrics["gradient_steps"]
    assert done == learner.gradient_steps == int(steps * 2.0 / 16)
    assert metrics["replay_bytes"] == learner.replay.nbytes and np.isfinite(metrics["loss"])


@pytest.mark.parametrize("settings", [{}, {"prioritized": False, "double": False, "dueling": False, "n_step": 1}])
def test_resuming_goes_on_bit_for_bit(rollouts, settings):
    config = dataclasses.replace(CARTPOLE, **settings)
    straight = cartpole_learner(config)
    for rollout in rollouts[:6]:
        straight.update(rollout, 0.1)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed = cartpole_learner(config, seed=9)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for rollout in rollouts[6:]:
        assert straight.update(rollout, 0.2) == resumed.update(rollout, 0.2)
    for a, b in zip(straight.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_without_the_replay_fills_it_anew(rollouts):
    config = dataclasses.replace(CARTPOLE, checkpoint_replay=False)
    straight = cartpole_learner(config)
    for rollout in rollouts[:6]:
        straight.update(rollout, 0.1)
    assert "replay" not in straight.state_dict()
    resumed = cartpole_learner(config)
    resumed.load_state_dict(straight.state_dict())
    assert resumed.update(rollouts[6], 0.1)["gradient_steps"] == 0  # 40 steps are too few to learn from
    assert resumed.update(rollouts[7], 0.1)["gradient_steps"] > 0


def test_learning_moves_only_what_it_should(rollouts):
    learner = cartpole_learner()
    before = [p.detach().clone() for p in learner.policy.parameters()]
    learner.update(dataclasses.replace(rollouts[0], valid=np.zeros_like(rollouts[0].valid)), 0.0)
    assert len(learner.replay) == 0  # a rollout without a valid step changes nothing
    for rollout in rollouts:
        learner.update(rollout, 0.0)
    assert all(not torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    assert all(not p.requires_grad for p in learner._target.parameters())


def test_what_cannot_be_is_refused():
    with pytest.raises(PolicyError, match="EpsilonGreedy"):
        DQN(ActorCritic(VECTOR, THREE), DQNConfig(), THREE, 4)
    with pytest.raises(ValueError, match="Discrete"):
        QNetwork(VECTOR, VECTOR)
    for settings, message in (
        ({"learning_rate": -1.0}, "learning_rate=-1.0: allowed: a finite number > 0"),
        ({"batch_size": 2.5}, "batch_size=2.5: allowed: a int"),
        ({"lr_schedule": "cosine"}, "lr_schedule=cosine: allowed: linear, constant"),
        ({"learning_starts": 10_000_000}, "learning_starts=10000000: allowed: at most capacity"),
    ):
        with pytest.raises(ValueError, match=message):
            make(dataclasses.replace(DQNConfig(), **settings))
