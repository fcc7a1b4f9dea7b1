"""Environments that fail and are rebuilt in place: what steps and rollouts then hold, and what is counted."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_envs as toy
from exact import assert_same
from flaky_env import Flaky, Maker, Plan
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_policy import Linear

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.comm.channel import WorkerError
from clusterenv_hpc.envs.build import EnvError, EnvSource, SyncEnvs, build_vector_env
from clusterenv_hpc.envs.restart import RestartingEnvs
from clusterenv_hpc.learners import gae
from clusterenv_hpc.rollout import Rollout

MODES = ["NextStep", "SameStep", "Disabled"]


def restarting(plan: Plan, num_envs: int = 2, mode: str = "NextStep", max_restarts: int = 10, **kwargs: Any) -> Any:
    """``(maker, envs)``."""
    maker = Maker(plan, **kwargs)
    source = EnvSource(maker, {}, "sync", AutoresetMode(mode), "restart", max_restarts)
    return maker, build_vector_env(source, num_envs, first_row=4)


def clustered(
    plan: Plan | Maker, num_envs: int = 2, mode: str = "NextStep", workers: int = 1, **kwargs: Any
) -> ClusterEnv:
    maker = plan if isinstance(plan, Maker) else Maker(plan)
    policy = Linear(Flaky.observation_space, Flaky.action_space)
    return ClusterEnv(
        maker, num_envs, policy=policy, num_workers=workers, autoreset_mode=mode, on_error="restart", **kwargs
    )


# -- nothing fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", [toy.Walk, toy.Kinds, toy.NestedActions])
def test_equal_to_sync_vector_env_as_long_as_nothing_fails(env: Any, mode: str) -> None:
    reference = SyncVectorEnv([lambda: env(mean_length=3)] * 3, autoreset_mode=mode)
    source = EnvSource(env, {"mean_length": 3}, "sync", AutoresetMode(mode), "restart")
    mine = build_vector_env(source, 3)
    assert isinstance(mine, RestartingEnvs)
    reference.action_space.seed(3)

    def same(a: Any, b: Any, *, step: bool) -> None:
        for i, (x, y) in enumerate(zip(a[: 4 if step else 1], b, strict=False)):
            assert_same(copy.deepcopy(x), y, str(i))
        infos: dict[str, Any] = {}
        for row, info in mine.take_infos():
            infos = reference._add_info(infos, info, row)
        assert_same(infos, a[-1], "infos")

    for seed in (7, [1, None, 3], None):
        options = {"shift": 1.0}
        same(reference.reset(seed=seed, options=options), mine.reset(seed=seed, options=options), step=False)
        ended = 0
        for _ in range(60):
            actions = reference.action_space.sample()
            a = reference.step(actions)
            same(a, mine.step(actions), step=True)
            done = np.logical_or(a[2], a[3])
            ended += int(done.sum())
            if mode == "Disabled" and done.any():
                masks = [{"reset_mask": done.copy()} for _ in range(2)]
                same(reference.reset(options=masks[0]), mine.reset(options=masks[1]), step=False)
        assert ended > 10
    assert mine.counts == [0, 0, 0] and mine.take_restarts() == []


def test_aborting_has_no_part_in_it() -> None:
    envs = build_vector_env(EnvSource(Maker()), 2)
    assert type(envs) is SyncEnvs, "no cost where nothing is to be restarted"


# -- plain steps -----------------------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_the_episode_as_truncated() -> None:
    maker, envs = restarting({1: ("step", 3)}, num_envs=3)
    envs.reset(seed=5)
    actions = np.zeros(3, np.int64)
    for _ in range(2):
        envs.step(actions)
    envs.take_infos()
    observation, rewards, terminated, truncated, _ = envs.step(actions)
    assert_same(np.array(observation), np.array([[0, 0, 3], [1, 0, 2], [2, 0, 3]], np.float32))  # its last true one
    assert list(rewards) == [3.0, 0.0, 3.0] and not terminated.any() and list(truncated) == [False, True, False]
    assert dict(envs.take_infos())[1] == {"env_error": "RuntimeError: planned for step 3 of instance 1"}
    assert maker.made[1].closed and maker.made[3].seeds == []
    observation, rewards, terminated, truncated, _ = envs.step(actions)  # the reset, as after any end
    assert_same(np.array(observation), np.array([[0, 0, 4], [3, 0, 0], [2, 0, 4]], np.float32))
    assert rewards[1] == 0 and not (terminated[1] or truncated[1])
    observation, *_ = envs.step(actions)
    assert_same(np.array(observation), np.array([[0, 0, 5], [3, 0, 1], [2, 0, 5]], np.float32))
    assert [(r.row, r.count, r.cause[:20]) for r in envs.take_restarts()] == [(1, 1, "RuntimeError: planne")]
    assert envs.counts == [0, 1, 0] and envs.take_restarts() == []


def test_in_same_step_mode_the_final_observation_is_the_last_true_one() -> None:
    _, envs = restarting({0: ("step", 3)}, mode="SameStep")
    envs.reset(seed=5)
    for _ in range(2):
        envs.step(np.zeros(2, np.int64))
    envs.take_infos()
    observation, _, _, truncated, _ = envs.step(np.zeros(2, np.int64))
    assert_same(np.array(observation), np.array([[2, 0, 0], [1, 0, 3]], np.float32))
    assert list(truncated) == [True, False]
    final = dict(envs.take_infos()[:1])[0]
    assert_same(final["final_obs"], np.array([0, 0, 2], np.float32))
    assert final["final_info"]["env_error"].startswith("RuntimeError")


def test_in_disabled_mode_the_caller_resets() -> None:
    maker, envs = restarting({0: ("step", 1)}, mode="Disabled")
    envs.reset(seed=5)
    *_, truncated, _ = envs.step(np.zeros(2, np.int64))
    assert list(truncated) == [True, False]
    with pytest.raises(AssertionError, match="environment 4 wants a reset"):
        envs.step(np.zeros(2, np.int64))
    observation, _ = envs.reset(options={"reset_mask": np.array([True, False])})
    assert_same(np.array(observation), np.array([[2, 0, 0], [1, 0, 1]], np.float32))
    assert maker.made[2].seeds != [None]


def test_a_nested_observation_is_kept_as_it_was() -> None:
    class Breaks(toy.Kinds):
        def step(self, action: Any) -> Any:
            if self.time == 2 and not hasattr(Breaks, "broken"):
                Breaks.broken = True  # type: ignore[attr-defined]
                raise ValueError("once")
            return super().step(action)

    envs = build_vector_env(EnvSource(Breaks, {"mean_length": 40}, on_error="restart"), 2)
    envs.reset(seed=1)
    envs.action_space.seed(1)
    for _ in range(2):
        before = copy.deepcopy(envs.step(envs.action_space.sample())[0])
    after, _, _, truncated, _ = envs.step(envs.action_space.sample())
    assert list(truncated) == [True, False]
    rows = [toy_row(tree, 0) for tree in (before, after)]
    assert_same(rows[0], rows[1])


def toy_row(tree: Any, row: int) -> Any:
    if isinstance(tree, dict):
        return {key: toy_row(item, row) for key, item in tree.items()}
    if isinstance(tree, tuple):
        return tuple(toy_row(item, row) for item in tree)
    return tree[row].copy()


@pytest.mark.parametrize("raises", [ValueError, SystemExit, MemoryError])
def test_what_counts_as_a_failure(raises: type[BaseException]) -> None:
    _, envs = restarting({0: ("step", 1)}, raises=raises)
    envs.reset(seed=0)
    envs.step(np.zeros(2, np.int64))
    assert envs.counts == [1, 0]


def test_an_interrupt_does_not() -> None:
    _, envs = restarting({0: ("step", 1)}, raises=KeyboardInterrupt)
    envs.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        envs.step(np.zeros(2, np.int64))


# -- seeds, limits ---------------------------------------------------------------------------------------------------


def test_seeds_of_rebuilt_environments_are_fresh_and_repeat() -> None:
    def seeds(base: int) -> list[list[int | None]]:
        maker, envs = restarting({0: ("step", 2), 2: ("step", 2)}, num_envs=2)
        envs.reset(seed=base)
        for _ in range(8):
            envs.step(np.zeros(2, np.int64))
        return [env.seeds for env in maker.made]

    first = seeds(40)
    assert first[0][0] == 40 and first[1] == [41, None]
    drawn = [first[2][0], first[3][0]]
    assert None not in drawn and len({40, 41, *drawn}) == 4
    assert seeds(40) == first and seeds(42)[2] != first[2]


def test_a_failing_reset_is_done_again_with_its_own_seed() -> None:
    maker, envs = restarting({0: ("reset", 1), 2: ("make", 0)})
    observation, _ = envs.reset(seed=9)
    assert_same(np.array(observation), np.array([[3, 0, 0], [1, 0, 0]], np.float32))
    assert maker.made[3].seeds == [9] and envs.counts == [2, 0]
    assert [r.cause.split(": ")[-1] for r in envs.take_restarts()] == [
        "planned for reset 1 of instance 0",
        "no licence for instance 2",
    ]


def test_a_seed_whose_reset_always_fails_is_replaced() -> None:
    class NoMesh(gym.Env):  # type: ignore[type-arg]
        observation_space, action_space = gym.spaces.Discrete(2**40), gym.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed == 9:
                raise RuntimeError("no mesh for this seed")
            return seed, {}

    envs: Any = build_vector_env(EnvSource(NoMesh, on_error="restart"), 2)
    seeds, _ = envs.reset(seed=9)
    assert envs.counts == [2, 0] and seeds[0] not in (9, 10) and seeds[1] == 10


def test_a_failing_reset_between_two_episodes_shows_only_in_the_counts() -> None:
    _, envs = restarting({0: ("reset", 2)}, num_envs=1, length=2)
    envs.reset(seed=0)
    told = [envs.step(np.zeros(1, np.int64))[1:4] for _ in range(4)]
    assert [[float(x[0]) for x in row] for row in told] == [[1, 0, 0], [2, 1, 0], [0, 0, 0], [1, 0, 0]]
    assert envs.counts == [1]


def test_more_failures_than_allowed_end_it() -> None:
    plan = {instance: ("step", 2) for instance in range(10)}
    _, envs = restarting(plan, num_envs=1, max_restarts=2)
    envs.reset(seed=0)
    with pytest.raises(EnvError, match=r"environment 4 failed once more than max_restarts=2 allows: Run"):
        for _ in range(20):
            envs.step(np.zeros(1, np.int64))
    assert envs.counts == [2]


def test_no_restart_allowed() -> None:
    _, envs = restarting({0: ("step", 1)}, max_restarts=0)
    envs.reset(seed=0)
    with pytest.raises(EnvError, match=r"environment 4 failed once more than max_restarts=0 allows"):
        envs.step(np.zeros(2, np.int64))


def test_the_limit_is_each_environments_own() -> None:
    _, envs = restarting({0: ("step", 1), 1: ("step", 2)}, max_restarts=1)
    envs.reset(seed=0)
    for _ in range(5):
        envs.step(np.zeros(2, np.int64))
    assert envs.counts == [1, 1]


def test_a_failing_close_does_not_matter() -> None:
    maker, envs = restarting({0: ("step", 1)})
    maker.made[0].what = "step"
    envs.reset(seed=0)
    maker.made[0].close = None  # type: ignore[method-assign]  # even calling it fails
    envs.step(np.zeros(2, np.int64))
    assert envs.counts == [1, 0]


def test_other_spaces_after_a_restart_are_refused() -> None:
    maker, envs = restarting({0: ("step", 1)})
    envs.reset(seed=0)
    maker.__class__ = type("Other", (Maker,), {"__call__": lambda self: toy.BoxActions()})
    with pytest.raises(EnvError, match="environment 4 has other spaces since it was restarted after RuntimeError"):
        envs.step(np.zeros(2, np.int64))


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"on_error must be one of abort, restart; got 'retry'"):
        EnvSource("CartPole-v1", on_error="retry")
    with pytest.raises(ValueError, match=r"on_error='restart' needs environments .*backend='sync', got 'vector'"):
        ClusterEnv("CartPole-v1", 2, backend="vector", on_error="restart")
    for limit in (-1, 1.5, True):
        with pytest.raises(ValueError, match="max_restarts must be a whole number, at least 0"):
            ClusterEnv("CartPole-v1", 2, on_error="restart", max_restarts=limit)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one rank each, got env_ranks=2"):
        ClusterEnv("CartPole-v1", 2, on_error="restart", env_ranks=2)


# -- rollouts --------------------------------------------------------------------------------------------------------


def check_rollout(rollout: Rollout) -> None:
    """What must hold in any rollout of ``Flaky``, read off the observations alone."""
    now, after, valid = rollout.observations, rollout.next_observations, rollout.valid
    ended = rollout.terminated | rollout.truncated
    for t, i in np.ndindex(*valid.shape):
        instance, episode, step = now[t, i]
        if valid[t, i]:  # a true transition: the same instance and episode, one step on
            assert tuple(after[t, i]) == (instance, episode, step + 1), (t, i)
            assert rollout.rewards[t, i] == step + 1
            if not ended[t, i] and t + 1 < len(valid):
                assert valid[t + 1, i], "an episode goes on, or has ended"
                assert tuple(now[t + 1, i]) == (instance, episode, step + 1)
        else:
            assert rollout.rewards[t, i] == 0 and not ended[t, i]
            if t + 1 < len(valid):
                assert now[t + 1, i][2] == 0, "what follows is an episode's first observation"


FAILING: list[Plan] = [
    {0: ("step", 1)},  # the very first step
    {0: ("step", 4), 2: ("step", 1), 3: ("step", 1)},  # again at once
    {0: ("step", 7), 1: ("step", 7)},  # what would have been the last step of an episode, in both
    {0: ("step", 8), 1: ("reset", 2)},  # the first step after a reset; a reset
    {0: ("step", 10), 1: ("step", 11)},  # the last step of a rollout, the first of the next
    {0: ("step", 9), 2: ("make", 0), 3: ("reset", 1)},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", FAILING)
def test_no_transition_is_made_up(plan: Plan, mode: str) -> None:
    maker = Maker(plan)
    with clustered(maker, 2, mode) as envs:
        envs.reset(seed=3)
        steps, lengths, returns = 0, [], []
        last: Rollout | None = None
        for count in (10, 1, 3, 12, 1, 6):
            rollout = envs.rollout(count)
            check_rollout(rollout)
            if last is not None:  # what the rollout before is bootstrapped from is what this one begins with
                goes_on = last_goes_on(last)
                assert_same(last.next_observations[-1][goes_on], rollout.observations[0][goes_on])
            last = copy.deepcopy(rollout)
            steps += rollout.env_steps
            lengths += rollout.episodes.lengths.tolist()
            returns += rollout.episodes.returns.tolist()
        assert returns == [length * (length + 1) / 2 for length in lengths]
        assert envs.stats.env_restarts == len(plan) == len(maker.made) - 2
        # Every step that an environment took is in a rollout, and none that failed; and in one episode or under way.
        made = [env for env in maker.made if env is not None]
        assert steps == sum(env.calls["step"] - (env.what == "step" and env.calls["step"] >= env.when) for env in made)
        under_way = [env.time for env in made if not env.closed and env.time < env.length]
        assert steps == sum(lengths) + sum(under_way)


def last_goes_on(rollout: Rollout) -> Any:
    return rollout.valid[-1] & ~(rollout.terminated[-1] | rollout.truncated[-1])


@pytest.mark.parametrize("mode", MODES)
def test_a_failing_step_in_detail(mode: str) -> None:
    with clustered({0: ("step", 4)}, 1, mode) as envs:
        envs.reset(seed=3)
        rollout = envs.rollout(7)
        assert rollout.valid[:, 0].tolist() == [True, True, True, False, True, True, True]
        assert rollout.truncated[:, 0].tolist() == [False, False, True, False, False, False, False]
        assert not rollout.terminated.any()
        assert rollout.rewards[:, 0].tolist() == [1, 2, 3, 0, 1, 2, 3]
        assert rollout.observations[:, 0].tolist() == [
            [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3], [1, 0, 0], [1, 0, 1], [1, 0, 2]
        ]  # fmt: skip
        assert rollout.next_observations[2, 0].tolist() == [0, 0, 3], "bootstrapped from the last true observation"
        assert rollout.episodes.lengths.tolist() == [3] and rollout.episodes.returns.tolist() == [6.0]


def test_a_failing_first_step_ends_the_episode_of_the_rollout_before() -> None:
    with clustered({0: ("step", 4)}, 2) as envs:
        envs.reset(seed=3)
        before = copy.deepcopy(envs.rollout(3))
        after = envs.rollout(2)
        assert not before.truncated.any() and len(before.episodes) == 0
        assert before.next_observations[-1, 0].tolist() == after.observations[0, 0].tolist() == [0, 0, 3]
        assert after.valid.tolist() == [[False, True], [True, True]]
        assert after.observations[1, 0].tolist() == [2, 0, 0]
        episodes = after.episodes
        assert (episodes.rows.tolist(), episodes.lengths.tolist(), episodes.returns.tolist()) == ([0], [3], [6.0])


def test_advantages_end_where_an_environment_failed() -> None:
    """As if the environment had been truncated after the step before: nothing flows over the failure."""
    with clustered({0: ("step", 4)}, 1) as envs:
        envs.reset(seed=3)
        rollout = envs.rollout(7)
    rewards, valid = torch.from_numpy(rollout.rewards.copy()), torch.from_numpy(rollout.valid.copy())
    ends = [torch.from_numpy(array.copy()) for array in (rollout.terminated, rollout.truncated)]
    generator = torch.Generator().manual_seed(0)
    values, following = (torch.randn(7, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages, _ = gae(rewards, values, following, *ends, valid, 0.9, 0.8)
    wanted = [0.0] * 7
    for t in (6, 5, 4, 2, 1, 0):
        delta = float(rewards[t, 0] + 0.9 * following[t, 0] - values[t, 0])
        linked = t not in (6, 2)
        wanted[t] = delta + (0.72 * wanted[t + 1] if linked else 0.0)
    np.testing.assert_allclose(advantages[:, 0].numpy(), wanted, atol=1e-12)


def test_steps_and_rollouts_alternate_around_failures() -> None:
    with clustered({0: ("step", 2), 2: ("step", 3)}, 2) as envs:
        envs.reset(seed=3)
        zeros = np.zeros(2, np.int64)
        envs.step(zeros)
        *_, truncated, infos = envs.step(zeros)
        assert list(truncated) == [True, False] and list(infos["_env_error"]) == [True, False]
        assert infos["env_error"][0].startswith("RuntimeError: planned")
        rollout = envs.rollout(6)  # begins with the reset
        check_rollout(rollout)
        assert rollout.valid[:, 0].tolist() == [False, True, True, False, True, True]
        assert envs.stats.restarts == {1: {0: 2}}


def test_other_rows_are_not_touched() -> None:
    def rows(plan: Plan) -> Rollout:
        with clustered(plan, 3) as envs:
            envs.reset(seed=3)
            return copy.deepcopy(envs.rollout(20))

    calm, troubled = rows({}), rows({1: ("step", 5)})
    assert not np.array_equal(calm.valid, troubled.valid)
    for field in ("observations", "actions", "rewards", "terminated", "truncated", "valid"):
        assert_same(getattr(calm, field)[:, ::2].copy(), getattr(troubled, field)[:, ::2].copy(), field)


def test_equal_runs_stay_equal() -> None:
    class Unlucky(toy.Walk):
        """Fails by chance, from its own generator."""

        def step(self, action: Any) -> Any:
            if self.np_random.random() < 0.1:
                raise OSError("the file server is away")
            return super().step(action)

    def run(workers: int) -> list[Rollout]:
        policy = Linear(toy.Walk.observation_space, toy.Walk.action_space)
        with ClusterEnv(Unlucky, 4, policy=policy, num_workers=workers, on_error="restart", max_restarts=1000) as envs:
            envs.reset(seed=8)
            rollouts = [copy.deepcopy(envs.rollout(15)) for _ in range(4)]
            assert envs.stats.env_restarts > 10
            told = envs.stats.as_dict()
            assert told["env_restarts"] == sum(sum(rows.values()) for rows in told["restarts_by_rank"].values())
            assert set(told["restarts_by_rank"]) == set(range(1, workers + 1))
            return rollouts

    for workers in (1, 2):
        for a, b in zip(run(workers), run(workers), strict=True):
            for field in ("observations", "actions", "rewards", "terminated", "truncated", "valid"):
                assert_same(getattr(a, field).copy(), getattr(b, field).copy(), field)


def test_counted_by_rank_and_environment_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    plan = {0: ("step", 2), 3: ("step", 2), 4: ("step", 1)}
    with clustered(plan, 4, workers=2) as envs:
        envs.reset(seed=3)
        for rollout, _ in zip(envs.rollouts(5), range(6), strict=False):
            check_rollout(rollout)
        assert envs.stats.env_restarts == 3
        assert set(envs.stats.restarts) == {1, 2} and envs.stats.restarts[2] == {3: 1}
        assert envs.stats.restarts[1] == {0: 2} or envs.stats.restarts == {1: {0: 1}, 2: {3: 2}}
    said = capsys.readouterr().err
    assert "(worker, " in said and "environment 3 was built anew (restart 1): RuntimeError: planned" in said


def test_the_limit_in_a_rollout_names_rank_and_environment() -> None:
    plan = {instance: ("step", 1) for instance in range(1, 20)}
    with clustered(plan, 2, max_restarts=3) as envs:
        envs.reset(seed=3)
        with pytest.raises(WorkerError, match=r"rank 1 .worker, .*environment 1 failed once more than max_res"):
            envs.rollout(20)


def test_aborting_is_the_default() -> None:
    policy = Linear(Flaky.observation_space, Flaky.action_space)
    with ClusterEnv(Maker({1: ("step", 2)}), 2, policy=policy) as envs:
        envs.reset(seed=3)
        with pytest.raises(WorkerError, match=r"failed in environment 1: RuntimeError: planned for step 2"):
            envs.rollout(5)
