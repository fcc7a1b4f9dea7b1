"""The replay against a plain list of everything that happened, and prioritized drawing against its exact chances."""

from __future__ import annotations

import dataclasses
import io
import math
import time

import numpy as np
import pytest
import torch

from clusterenv_hpc.learners.replay import Replay, _apart
from clusterenv_hpc.learners.sum_tree import SumTree
from clusterenv_hpc.rollout import Episodes, Rollout

CPU = torch.device("cpu")
NO_EPISODES = Episodes(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class World:
    """Environments whose every observation is a number of its own; remembers each step it was asked for."""

    def __init__(self, num_envs, autoreset="next step", seed=0, end=0.2):
        self.rng, self.end, self.autoreset = np.random.default_rng(seed), end, autoreset
        self.num_envs, self.fresh = num_envs, 0
        self.now = np.array([self.observation() for _ in range(num_envs)])
        self.done = np.zeros(num_envs, bool)
        self.steps: dict[float, dict] = {}  # by observation

    def observation(self):
        self.fresh += 1
        return float(self.fresh)

    def rollout(self, steps, rows=None, forget=False):
        """A rollout of some environments; with ``forget`` it is collected and dropped, as when a stream stops."""
        rows = np.arange(self.num_envs) if rows is None else np.asarray(rows)
        n = len(rows)
        shape = (steps, n)
        obs, after, rewards = np.zeros((*shape, 1), np.float32), np.zeros((*shape, 1), np.float32), np.zeros(shape)
        terminated, truncated, valid = (np.zeros(shape, bool) for _ in range(3))
        actions = np.zeros(shape, np.int64)
        for t in range(steps):
            for i, row in enumerate(rows):
                obs[t, i] = before = self.now[row]
                if self.done[row]:  # this step only resets
                    self.now[row], self.done[row] = self.observation(), False
                    after[t, i] = self.now[row]
                    continue
                valid[t, i], actions[t, i], rewards[t, i] = True, self.rng.integers(5), self.rng.standard_normal()
                after[t, i] = self.now[row] = self.observation()
                terminated[t, i], truncated[t, i] = self.rng.random(2) < self.end / 2
                ended = terminated[t, i] or truncated[t, i]
                if not forget:
                    self.steps[before] = {
                        "row": row, "action": actions[t, i], "reward": rewards[t, i], "next": after[t, i, 0],
                        "terminated": terminated[t, i], "ended": ended,
                    }  # fmt: skip
                if ended and self.autoreset == "next step":
                    self.done[row] = True
                elif ended:
                    self.now[row] = self.observation()
        return Rollout(
            observations=obs, next_observations=after, actions=actions,
            behaviour_params=np.zeros((*shape, 2), np.float32), rewards=rewards, terminated=terminated,
            truncated=truncated, valid=valid, versions=np.zeros(shape, np.int64), rows=rows,
            ranks=np.ones(n, np.int64), episodes=NO_EPISODES, version=0,
        )  # fmt: skip

    def transition(self, observation, n, gamma):
        """What n steps from ``observation`` amount to: sum of rewards, discount, next observation, action."""
        step = self.steps[observation]
        action, total = step["action"], 0.0
        for k in range(n):
            total += gamma**k * step["reward"]
            last = step
            if step["ended"] or step["next"] not in self.steps:
                break
            step = self.steps[step["next"]]
        return total, 0.0 if last["terminated"] else gamma ** (k + 1), last["next"], action


def check(sample, world, n, gamma):
    assert sample.observations.shape == (len(sample.index), 1) == sample.next_observations.shape
    for i, observation in enumerate(sample.observations[:, 0].tolist()):
        total, discount, following, action = world.transition(observation, n, gamma)
        assert sample.rewards[i].item() == pytest.approx(total, abs=1e-5)
        assert sample.discounts[i].item() == pytest.approx(discount, abs=1e-6)
        assert sample.next_observations[i, 0].item() == following
        assert sample.actions[i].item() == action


@pytest.mark.parametrize("autoreset", ["next step", "same step"])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n", [1, 3, 10])
def test_every_draw_is_what_happened(autoreset, prioritized, n):
    world = World(6, autoreset, seed=n)
    replay = Replay(300, 6, n, 0.9, prioritized)
    rng, noise = np.random.default_rng(0), generator()
    for turn in range(60):
        rows = [[0, 1], [2, 3, 4], [5]][rng.integers(3)]  # three workers of uneven size and speed
        replay.add(world.rollout(int(rng.integers(1, 9)), rows, forget=False))
        if turn % 7 == 0:
            world.rollout(4, rows, forget=True)  # a gap: what was under way was dropped
        check(replay.sample(32, noise, CPU), world, n, 0.9)


@pytest.mark.parametrize("autoreset", ["next step", "same step"])
def test_it_holds_the_newest_steps_and_nothing_else(autoreset):
    world = World(4, autoreset, seed=5)
    replay, added = Replay(200, 4), []
    for _ in range(40):
        rollout = world.rollout(7)
        replay.add(rollout)
        added += [(int(row), float(rollout.observations[t, row, 0])) for t, row in np.argwhere(rollout.valid)]
    drawn = set(replay.sample(20_000, generator(), CPU).observations[:, 0].tolist())
    assert len(drawn) == len(replay)  # everything that it counts can be drawn
    for row in range(4):
        mine = [o for r, o in added if r == row]
        kept = [o for o in mine if o in drawn]
        assert kept == mine[-len(kept) :]  # the newest, without a hole
        assert 50 * 0.6 < len(kept) <= 50  # what is missing to capacity are ends of episodes


def test_uniform_draws_are_uniform():
    world = World(3, seed=2, end=0.5)
    replay = Replay(90, 3)
    for rows in ([0], [0], [0], [1, 2]):  # one environment has three times the steps of the others
        replay.add(world.rollout(9, rows))
    draws = 60_000
    sample = replay.sample(draws, generator(), CPU)
    _, counts = np.unique(sample.observations[:, 0].numpy(), return_counts=True)
    expected = draws / len(replay)
    assert len(counts) == len(replay)
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < len(counts) + 5 * math.sqrt(2 * len(counts))
    assert (sample.weights == 1).all()


def test_prioritized_draws_have_their_exact_chances_and_weights():
    world = World(4, seed=3)
    replay = Replay(400, 4, prioritized=True)
    rng = np.random.default_rng(0)
    chances = {}
    for _ in range(5):
        rollout = world.rollout(12)
        priorities = rng.exponential(size=rollout.rewards.shape)
        replay.add(rollout, priorities)
        for t, row in np.argwhere(rollout.valid):
            chances[float(rollout.observations[t, row, 0])] = priorities[t, row]
    # Change some of them, the way a learner does after a draw.
    sample = replay.sample(40, generator(1), CPU)
    renewed = rng.exponential(size=40)
    replay.set_priorities(sample.index, renewed)
    for observation, value in zip(sample.observations[:, 0].tolist(), renewed, strict=True):
        chances[observation] = value
    assert len(replay) == len(chances)
    total = sum(chances.values())
    batch, batches, noise = 64, 1500, generator(2)
    counts = dict.fromkeys(chances, 0)
    for _ in range(batches):
        sample = replay.sample(batch, noise, CPU, importance_exponent=0.7)
        seen = sample.observations[:, 0].tolist()
        for observation in seen:
            counts[observation] += 1
    want = np.array([(len(chances) * chances[o] / total) ** -0.7 for o in seen])
    np.testing.assert_allclose(sample.weights, want / want.max(), rtol=1e-5)
    expected = {o: batch * batches * value / total for o, value in chances.items()}
    # Stratified draws vary less than independent ones, so chi-square's bound is a generous one.
    chi2 = sum((counts[o] - e) ** 2 / e for o, e in expected.items() if e > 5)
    assert chi2 < len(chances) + 5 * math.sqrt(2 * len(chances))
    for o, e in expected.items():
        assert abs(counts[o] - e) < 6 * math.sqrt(e) + 2


def test_new_steps_without_priorities_count_like_the_largest_so_far():
    world = World(1, end=0.0)
    replay = Replay(50, 1, prioritized=True)
    replay.add(world.rollout(4), np.array([[1.0], [8.0], [2.0], [1.0]]))
    replay.add(world.rollout(1))
    assert replay._tree.leaves[4] == 8.0
    replay.set_priorities(np.array([0]), np.array([30.0]))
    replay.add(world.rollout(1))
    assert replay._tree.leaves[5] == 30.0


def test_several_rollouts_of_one_environment_in_one_batch():
    world = World(2, seed=4)
    first, second = world.rollout(5, [0]), world.rollout(5, [0])
    other = world.rollout(5, [1])
    joined = {
        spec.name: np.concatenate([getattr(part, spec.name) for part in (first, other, second)], axis=-1)
        for spec in dataclasses.fields(Rollout)
        if spec.name in ("rewards", "terminated", "truncated", "valid", "versions", "rows", "ranks", "actions")
    }
    for name in ("observations", "next_observations", "behaviour_params"):
        joined[name] = np.concatenate([getattr(part, name) for part in (first, other, second)], axis=1)
    replay = Replay(60, 2, 3, 0.9)
    replay.add(Rollout(**joined, episodes=NO_EPISODES, version=0))
    check(replay.sample(200, generator(), CPU), world, 3, 0.9)
    assert [list(part) for part in _apart(np.array([4, 5, 4, 4]))] == [[0, 1], [2], [3]]


def test_nested_observations_and_images_keep_their_types_and_are_stored_once():
    rng = np.random.default_rng(0)
    steps, n = 6, 2
    frames = rng.integers(0, 255, (steps + 1, n, 8, 8, 3), dtype=np.uint8)
    speed = rng.standard_normal((steps + 1, n))
    base = World(n, end=0.0).rollout(steps)
    rollout = dataclasses.replace(
        base,
        observations={"camera": frames[:-1], "more": (speed[:-1],)},
        next_observations={"camera": frames[1:], "more": (speed[1:],)},
    )
    replay = Replay(1000, n)
    replay.add(rollout)
    sample = replay.sample(50, generator(), CPU)
    assert sample.observations["camera"].dtype == torch.uint8
    assert sample.observations["more"][0].dtype == torch.float64
    for i, index in enumerate(sample.index):
        row, t = divmod(index, replay.length)
        np.testing.assert_array_equal(sample.observations["camera"][i], frames[t, row])
        np.testing.assert_array_equal(sample.next_observations["camera"][i], frames[t + 1, row])
        assert sample.next_observations["more"][0][i] == speed[t + 1, row]
    slots = 1000 + n
    assert replay.nbytes == slots * (8 * 8 * 3 + 8 + 8 + 4 + 1)  # frame, speed, action, reward, kind


def test_masked_steps_are_never_drawn():
    world = World(2, seed=6)
    rollout = world.rollout(10)
    masked = rollout.valid.copy()
    masked[6:] = False  # what a run does with the steps beyond its last
    for t, row in np.argwhere(rollout.valid[6:]):
        world.steps.pop(float(rollout.observations[6 + t, row, 0]))
    for prioritized in (False, True):
        replay = Replay(100, 2, 4, 0.9, prioritized)
        replay.add(dataclasses.replace(rollout, valid=masked))
        check(replay.sample(300, generator(), CPU), world, 4, 0.9)
        assert len(replay) == masked.sum()


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("turns", [0, 2, 30])
def test_a_saved_replay_goes_on_bit_for_bit(prioritized, turns):
    def new():
        return Replay(120, 4, 3, 0.9, prioritized)

    world, replay = World(4, seed=7), new()
    for _ in range(turns):
        replay.add(world.rollout(6), np.random.default_rng(1).random((6, 4)) + 0.1)
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    file.seek(0)
    again = new()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert len(again) == len(replay)
    following = [world.rollout(6) for _ in range(3)]
    results = []
    for one in (replay, again):
        noise = generator(3)
        told = []
        for rollout in following:
            one.add(rollout)
            told.append(one.sample(64, noise, CPU))
        results.append(told)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a.index, b.index)
        for name in ("observations", "next_observations", "actions", "rewards", "discounts", "weights"):
            assert torch.equal(getattr(a, name), getattr(b, name))
    with pytest.raises(ValueError, match="4 environments and capacity 120"):
        Replay(80, 4, 3, 0.9, prioritized).load_state_dict(replay.state_dict())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="capacity=7"):
        Replay(7, 4)
    replay = Replay(40, 4)
    with pytest.raises(ValueError, match="nothing can be drawn"):
        replay.sample(1, generator(), CPU)
    with pytest.raises(ValueError, match="capacity=40: allowed: more than"):
        replay.add(World(4).rollout(11))


def test_sum_tree_against_the_running_sums():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 7, 64, 1000):
        tree, plain = SumTree(size), np.zeros(size)
        for _ in range(20):
            index = rng.integers(0, size, 30)
            values = rng.exponential(size=30) * (rng.random(30) < 0.7)
            tree.set(index, values)
            for i, value in zip(index, values, strict=True):
                plain[i] = value
            np.testing.assert_array_equal(tree.leaves, plain)
            assert tree.total == pytest.approx(plain.sum())
            if not plain.any():
                continue
            points = np.concatenate((rng.random(200) * tree.total, [0.0, np.nextafter(tree.total, 0), tree.total]))
            found = tree.find(points)
            assert (plain[found] > 0).all()
            ends = np.cumsum(plain)
            inner = points[:200]
            clear = (np.abs(ends[:, None] - inner) > 1e-9).all(0)  # away from where rounding decides
            np.testing.assert_array_equal(found[:200][clear], np.searchsorted(ends, inner, side="right")[clear])
    with pytest.raises(ValueError, match="every priority is 0"):
        SumTree(4).sample(np.zeros(1))


def test_a_million_transitions_are_drawn_from_in_logarithmic_time():
    """Draws from 2**20 cost a few times those from 2**10, not a thousand times: no pass over all of them."""

    def seconds(capacity):
        replay, world = Replay(capacity, 64, 3, 0.99, prioritized=True), World(64)
        rollout = world.rollout(8)
        big = {
            name: np.repeat(getattr(rollout, name), max(1, capacity // 64 // 16), axis=0)
            for name in ("observations", "next_observations", "actions", "behaviour_params", "rewards", "terminated",
                         "truncated", "valid", "versions")
        }  # fmt: skip
        replay.add(dataclasses.replace(rollout, **big))
        noise, best = generator(), math.inf
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(5):
                sample = replay.sample(256, noise, CPU)
                replay.set_priorities(sample.index, np.ones(256))
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(1 << 20) < 30 * seconds(1 << 10)
