"""Rollouts against a slow reference: a ``SyncVectorEnv`` stepped by hand with the actions that a rollout recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import toy_envs as toy
from exact import assert_same, sync_reference
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_policy import Linear

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.collect import Collector, NotFiniteError, Slot
from clusterenv_hpc.comm.channel import WorkerError
from clusterenv_hpc.envs.build import EnvSource, build_vector_env
from clusterenv_hpc.envs.spaces import join, split
from clusterenv_hpc.policies import as_tensors, distribution_for
from clusterenv_hpc.rollout import Rollout

MODES = ["NextStep", "SameStep", "Disabled"]


class ByHand:
    """What a rollout must hold, found out one step and one environment at a time."""

    def __init__(self, reference: SyncVectorEnv, seed: Any) -> None:
        self.envs, self.mode = reference, reference.autoreset_mode
        self.space = reference.single_observation_space
        self.observation, _ = reference.reset(seed=seed)
        self.observation = [leaf.copy() for leaf in split(self.space, self.observation)]
        n = reference.num_envs
        self.resets_next = [False] * n
        self.rewards: list[list[float]] = [[] for _ in range(n)]
        self.episodes: list[tuple[int, float, int]] = []

    def follow(self, rollout: Rollout) -> None:
        """Step with the actions of ``rollout``; everything in it must be as it comes out here."""
        n, self.episodes = self.envs.num_envs, []
        distribution = distribution_for(self.envs.single_action_space)
        now, after = split(self.space, rollout.observations), split(self.space, rollout.next_observations)
        assert rollout.rewards.dtype == np.float64 and rollout.behaviour_params.dtype == np.float32
        for t in range(rollout.num_steps):
            for leaf, mine in zip(now, self.observation, strict=True):
                assert_same(leaf[t], mine, f"observation at {t}")
            actions = distribution.env_actions(rollout.actions[t])
            observation, reward, terminated, truncated, infos = self.envs.step(actions)
            arrays = [leaf.copy() for leaf in split(self.space, observation)]
            assert_same(rollout.rewards[t].copy(), reward, f"rewards at {t}")
            assert_same(rollout.terminated[t].copy(), terminated, f"terminated at {t}")
            assert_same(rollout.truncated[t].copy(), truncated, f"truncated at {t}")
            for i in range(n):
                made_up = self.resets_next[i] and self.mode is AutoresetMode.NEXT_STEP
                assert rollout.valid[t, i] == (not made_up)
                if not made_up:
                    self.rewards[i].append(float(reward[i]))
                    final = arrays
                    if self.mode is AutoresetMode.SAME_STEP and (terminated[i] or truncated[i]):
                        final = [np.asarray(leaf)[None] for leaf in split(self.space, infos["final_obs"][i])]
                    for leaf, mine in zip(after, final, strict=True):
                        row = mine[0] if final is not arrays else mine[i]
                        np.testing.assert_array_equal(leaf[t, i], row, f"successor of {t}, {i}")
                self.resets_next[i] = bool(terminated[i] or truncated[i])
                if self.resets_next[i]:
                    self.episodes.append((i, float(np.sum(self.rewards[i])), len(self.rewards[i])))
                    self.rewards[i] = []
            if self.mode is AutoresetMode.DISABLED and any(self.resets_next):
                mask = np.array(self.resets_next)
                observation, _ = self.envs.reset(options={"reset_mask": mask})
                arrays = [leaf.copy() for leaf in split(self.space, observation)]
            self.observation = arrays
        got = sorted(zip(rollout.episodes.rows, rollout.episodes.returns, rollout.episodes.lengths, strict=True))
        wanted = sorted(self.episodes)
        assert [(row, length) for row, _, length in got] == [(row, length) for row, _, length in wanted]
        np.testing.assert_allclose([g[1] for g in got], [w[1] for w in wanted], rtol=1e-12, atol=1e-12)


def made(env: Any, num_envs: int, workers: int, mode: str = "NextStep", **kwargs: Any) -> ClusterEnv:
    single = env(**kwargs)
    policy = Linear(single.observation_space, single.action_space)
    return ClusterEnv(env, num_envs, policy=policy, num_workers=workers, autoreset_mode=mode, env_kwargs=kwargs)


def check_choices(policy: Linear, rollout: Rollout, envs: ClusterEnv) -> None:
    """The recorded parameters are the policy's, on just these observations; the actions are members of the space."""
    space = envs.single_observation_space
    for t in range(rollout.num_steps):
        tree = join(space, [leaf[t] for leaf in split(space, rollout.observations)])
        with torch.inference_mode():
            params = policy(as_tensors(tree)).numpy()
        np.testing.assert_allclose(rollout.behaviour_params[t], params, rtol=2e-5, atol=2e-6)
        chosen = distribution_for(envs.single_action_space).env_actions(rollout.actions[t])
        assert all(envs.single_action_space.contains(action) for action in chosen)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "env", [toy.Walk, toy.Kinds, toy.FromMinusTwo, toy.BinaryActions, toy.FloatActions, toy.BoxActions, toy.Image]
)
def test_rollouts_are_what_stepping_by_hand_gives(env: Any, mode: str, workers: int) -> None:
    with made(env, 5, workers, mode, mean_length=4) as envs:
        envs.reset(seed=11)
        hand = ByHand(sync_reference(env, 5, {"mean_length": 4}, mode), 11)
        ended = 0
        for steps in (9, 1, 1, 2, 16, 5):  # episodes go on from one rollout to the next
            rollout = envs.rollout(steps)
            hand.follow(rollout)
            check_choices(envs._detached._policy, rollout, envs)  # type: ignore[union-attr, arg-type]
            assert rollout.num_steps == steps and rollout.num_envs == 5
            assert_same(rollout.rows, np.arange(5))
            assert sorted(rollout.ranks) == list(rollout.ranks) and set(rollout.ranks) == set(range(1, workers + 1))
            assert (rollout.versions == 0).all() and rollout.versions.shape == (steps, 5)
            assert rollout.env_steps == rollout.valid.sum()
            assert (rollout.rewards[~rollout.valid] == 0).all()
            ended += len(rollout.episodes)
        assert ended > 15 and (mode == "NextStep") == (
            ended > 0 and hand.resets_next is not None and mode == "NextStep"
        )


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_go_on_where_steps_left_off_and_the_other_way_round(mode: str) -> None:
    reference = sync_reference(toy.Walk, 4, {"mean_length": 3}, mode)
    with made(toy.Walk, 4, 2, mode, mean_length=3) as envs:
        envs.reset(seed=2)
        hand = ByHand(reference, 2)
        source = np.random.default_rng(0)

        def steps(count: int) -> None:
            for _ in range(count):
                if mode == "Disabled" and any(hand.resets_next):
                    mask = np.array(hand.resets_next)
                    for one in (envs, reference):
                        one.reset(options={"reset_mask": mask.copy()})
                    hand.resets_next = [False] * 4
                actions = source.integers(0, 3, 4)
                got, expected = envs.step(actions), reference.step(actions)
                assert_same(got, expected)
                for i in range(4):
                    if not (hand.resets_next[i] and mode == "NextStep"):
                        hand.rewards[i].append(float(expected[1][i]))
                    hand.resets_next[i] = bool(expected[2][i] or expected[3][i])
                    if hand.resets_next[i]:
                        hand.rewards[i] = []
                hand.observation = [expected[0].copy()]

        for count in (3, 1, 5, 2):
            steps(count)
            if mode == "Disabled" and any(hand.resets_next):
                # A rollout begins by resetting what has ended, which nobody else can tell it to.
                observation, _ = reference.reset(options={"reset_mask": np.array(hand.resets_next)})
                hand.observation, hand.resets_next = [observation.copy()], [False] * 4
            hand.follow(envs.rollout(count + 3))
            if mode == "Disabled":
                hand.resets_next = [False] * 4


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_masked_reset_cuts_the_episode_it_interrupts(mode: str) -> None:
    with made(toy.Walk, 4, 2, mode, mean_length=50) as envs:
        envs.reset(seed=0)
        first = envs.rollout(5)
        mask = np.array([False, True, False, True])
        envs.reset(options={"reset_mask": mask}, seed=100)
        lengths: dict[int, int] = {}
        for _ in range(60):
            rollout = envs.rollout(4)
            for row, length in zip(rollout.episodes.rows, rollout.episodes.lengths, strict=True):
                lengths.setdefault(int(row), int(length))
    reference = sync_reference(toy.Walk, 4, {"mean_length": 50}, mode)
    reference.reset(seed=0)
    expected = [env.unwrapped.left for env in reference.envs]
    assert not len(first.episodes) and min(expected) > 5
    reference.reset(seed=100)
    again = [env.unwrapped.left for env in reference.envs]
    assert [lengths[row] for row in range(4)] == [again[row] if mask[row] else expected[row] for row in range(4)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("base", [1, 2, 5])
def test_a_vector_environment_of_its_own(mode: str, base: int) -> None:
    """Lengths, returns and successors of a counting environment are known in closed form."""
    with made_vector(mode, base) as envs:
        envs.reset(seed=0)
        episodes: dict[int, list[tuple[int, float]]] = {row: [] for row in range(4)}
        steps = 0
        for count in (7, 1, 1, 12, 30):
            rollout = envs.rollout(count)
            now, after = rollout.observations, rollout.next_observations
            lengths = now[..., 0]
            valid = rollout.valid
            assert (after[..., 1] == now[..., 1] + 1)[valid].all(), "successors are never the next episode's first"
            assert (after[..., 2] == now[..., 2])[valid].all()
            over = rollout.terminated | rollout.truncated
            assert (over == ((after[..., 1] == lengths) & valid)).all()
            assert (rollout.rewards == np.where(valid, now[..., 1] + 1, 0.0)).all()
            in_worker = np.arange(4) % 2  # rows of each worker count from 0
            assert (rollout.terminated == (over & (in_worker == 0))).all()
            steps += rollout.env_steps
            for row, length, total in zip(
                *(getattr(rollout.episodes, k) for k in ("rows", "lengths", "returns")), strict=True
            ):
                episodes[int(row)].append((int(length), float(total)))
            if mode != "NextStep":
                assert valid.all()
        for row, ended in episodes.items():
            length = base + row % 2
            assert ended == [(length, length * (length + 1) / 2)] * len(ended)
            assert len(ended) == (52 // (length + 1) if mode == "NextStep" else 51 // length)


def made_vector(mode: str, base: int = 3) -> ClusterEnv:
    single = toy.VectorWalk(1)
    policy = Linear(single.single_observation_space, single.single_action_space)
    kwargs = {"mode": mode, "base": base}
    return ClusterEnv(toy.VectorWalk, 4, policy=policy, backend="vector", num_workers=2, env_kwargs=kwargs)


def test_a_same_step_environment_without_final_observations_is_refused() -> None:
    class Forgetful(toy.VectorWalk):
        def step(self, actions: Any) -> Any:
            *rest, infos = super().step(actions)
            infos.pop("final_obs", None)
            return (*rest, infos)

    single = toy.VectorWalk(1)
    policy = Linear(single.single_observation_space, single.single_action_space)
    envs = ClusterEnv(Forgetful, 2, policy=policy, backend="vector", env_kwargs={"mode": "SameStep"})
    with pytest.raises(WorkerError, match="'final_obs'"):
        envs.rollout(20)


# -- the collector by itself ------------------------------------------------------------------------------------------


class Parts:
    """A collector with its slot."""

    def __init__(self, env: Any, policy: Any = None, envs: int = 3, mode: str = "NextStep", **kwargs: Any) -> None:
        source = EnvSource(env, kwargs, "sync", AutoresetMode(mode))
        self.envs = build_vector_env(source, envs)
        space, actions = self.envs.single_observation_space, self.envs.single_action_space
        self.policy = policy or Linear(space, actions)
        self.collector = Collector(self.envs, self.policy, distribution_for(actions), 7)
        self.collector.reset(list(range(envs)), None)

    def collect(self, steps: int, poll: Any = lambda: None, probes: int = 8) -> dict[str, Any]:
        shape = self.collector.rollout_shape(steps, probes)
        slot = Slot(shape, shape.layout(), self.envs.single_observation_space)
        self.collector.collect(slot, steps, poll)
        return slot.arrays


@pytest.mark.parametrize("mode", MODES)
def test_probe_states_are_distinct_valid_steps(mode: str) -> None:
    parts = Parts(toy.Walk, mode=mode, mean_length=2)
    chosen: set[int] = set()
    for _ in range(40):
        arrays = parts.collect(10)
        count = int(arrays["header"]["probes"][0])
        index = arrays["probe_index"][:count]
        assert count == 8 and len(set(index)) == 8 and arrays["valid"].ravel()[index].all()
        chosen |= set(index.tolist())
    assert chosen == set(range(30)), "every step can be one"


def test_fewer_valid_steps_than_probes() -> None:
    parts = Parts(toy.Walk, envs=1, mean_length=1)  # every episode has one step: half of all steps only reset
    arrays = parts.collect(10, probes=64)
    count = int(arrays["header"]["probes"][0])
    assert count == 5 == arrays["valid"].sum()
    assert sorted(arrays["probe_index"][:count]) == list(np.flatnonzero(arrays["valid"]))
    parts.collect(1)
    arrays = parts.collect(1)
    assert arrays["valid"].sum() == arrays["header"]["probes"][0] == 0


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_arrive_during_a_rollout_are_told_step_by_step(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from clusterenv_hpc import collect

    monkeypatch.setattr(collect, "POLL_EVERY_S", -1.0)  # look up after each step
    parts = Parts(toy.Walk, mode=mode)
    parts.collector.version = 0
    calls = iter(range(1, 100))

    def poll() -> None:
        parts.collector.version = next(calls)
        parts.policy.shift(0.25)

    arrays = parts.collect(6, poll)
    assert arrays["versions"].tolist() == [0, 1, 2, 3, 4, 5]
    space = parts.envs.single_observation_space
    plain = Linear(space, parts.envs.single_action_space)
    for t in range(6):
        with torch.inference_mode():
            expected = plain(torch.from_numpy(arrays["observation0"][t])).numpy()
        np.testing.assert_allclose(arrays["behaviour_params"][t], expected, rtol=1e-5, atol=1e-6)
        plain.shift(0.25)


class Reusing(Linear):
    """Writes every output into the same memory."""

    def forward(self, observations: Any) -> torch.Tensor:
        output = super().forward(observations)
        if getattr(self, "memory", None) is None or self.memory.shape != output.shape:
            self.memory = output.clone()
        self.memory.copy_(output)
        return self.memory


class Constant(Linear):
    """Outputs a view of its own parameters."""

    def forward(self, observations: Any) -> torch.Tensor:
        return self.bias.expand(len(observations), -1)


class Double(Linear):
    """Outputs float64."""

    def forward(self, observations: Any) -> torch.Tensor:
        return super().forward(observations).double()


class Half(Linear):
    """Outputs float16."""

    def forward(self, observations: Any) -> torch.Tensor:
        return super().forward(observations).half()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Reusing, Constant, Double, Half])
def test_unusual_policies_are_recorded_truly(kind: Any, mode: str) -> None:
    policy = kind(toy.Walk.observation_space, toy.Walk.action_space)
    parts = Parts(toy.Walk, policy, mode=mode)
    arrays = parts.collect(12)
    for t in range(12):
        with torch.inference_mode():
            expected = policy(torch.from_numpy(arrays["observation0"][t])).float().numpy()
        np.testing.assert_array_equal(arrays["behaviour_params"][t], expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nan", "the environment gave an observation that is not a finite number"),
        ("inf_reward", "a reward that is not"),
    ],
)
def test_numbers_that_are_none_are_found_with_their_row(where: str, message: str, mode: str) -> None:
    parts = Parts(toy.Faulty, mode=mode, where=where, seed=1, after=4)
    with pytest.raises(NotFiniteError, match=message) as caught:
        parts.collect(12)
    assert caught.value.row == 1


def test_a_policy_that_gives_nan_is_found() -> None:
    policy = Linear(toy.Walk.observation_space, toy.Walk.action_space)
    parts = Parts(toy.Walk, policy)
    policy.shift(float("nan"))
    with pytest.raises(NotFiniteError, match="the policy gave an action distribution"):
        parts.collect(5)


class Masked(Linear):
    """A choice that is never allowed: a logit of minus infinity, which is no error."""

    def forward(self, observations: Any) -> torch.Tensor:
        output = super().forward(observations).clone()
        output[:, 1] = -torch.inf
        return output


class Infinite(toy.Walk):
    """Infinite observations are numbers, and allowed."""

    def observe(self) -> Any:
        return np.array([np.inf, -np.inf, 1e30], np.float32)


def test_infinite_logits_and_observations_are_no_errors() -> None:
    policy = Masked(toy.Walk.observation_space, toy.Walk.action_space)
    arrays = Parts(toy.Walk, policy).collect(50)
    assert not (arrays["actions"] == 1).any() and np.isneginf(arrays["behaviour_params"][..., 1]).all()
    arrays = Parts(Infinite).collect(10)
    assert np.isposinf(arrays["observation0"][..., 0]).all()


def test_action_noise_depends_on_the_seed_alone() -> None:
    def actions(seed: int, again: bool = False) -> Iterator[Any]:
        with made(toy.Walk, 4, 2) as envs:
            envs.reset(seed=seed)
            yield envs.rollout(20).actions.copy()
            if again:
                envs.reset(seed=seed)
                yield envs.rollout(20).actions.copy()

    first, second = actions(1, again=True)
    assert_same(first, second)
    (third,) = actions(2)
    assert (first != third).any()
    assert (first[:, :2] != first[:, 2:]).any(), "workers draw from different streams"


def test_infos_are_not_gathered_during_a_rollout_and_are_there_again_afterwards() -> None:
    with made(toy.Kinds, 2, 1) as envs:
        reference = sync_reference(toy.Kinds, 2)
        envs.reset(seed=0)
        reference.reset(seed=0)
        rollout = envs.rollout(5)
        for t in range(5):
            reference.step(rollout.actions[t])
        actions = np.zeros((2, 3), np.int64)
        assert_same(envs.step(actions), reference.step(actions))


def test_seconds_are_measured() -> None:
    with made(toy.Slow, 2, 1, delay_s=0.01, mean_length=1000) as envs:
        envs.rollout(5)
        assert envs.stats.seconds[1]["env"] >= 0.1 and envs.stats.seconds[1]["policy"] > 0
