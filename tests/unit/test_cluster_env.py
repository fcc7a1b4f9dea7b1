"""``ClusterEnv`` as a Gymnasium vector environment: equal to ``SyncVectorEnv`` to the last bit, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import toy_envs as toy
from exact import assert_same, assert_same_spaces, drive, sync_reference
from gymnasium.vector import AutoresetMode
from toy_policy import Linear

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.comm.channel import ClusterError, HandshakeError, WorkerError
from clusterenv_hpc.sync import APS, Always

MODES = ["NextStep", "SameStep", "Disabled"]
REAL = ["CartPole-v1", "LunarLander-v3", "Taxi-v4", "FrozenLake-v1"]
TOYS = [
    toy.Walk, toy.Kinds, toy.NoInfo, toy.RareInfo, toy.Aliasing, toy.BoxActions, toy.FloatActions, toy.FromMinusTwo,
    toy.BinaryActions, toy.NestedActions, toy.Image, toy.wrapped,
]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("env", REAL)
def test_real_environments_equal_sync_vector_env(env: str, workers: int) -> None:
    mode = MODES[workers % 3]
    reference = sync_reference(env, 4, mode=mode)
    with ClusterEnv(env, 4, num_workers=workers, autoreset_mode=mode) as envs:
        assert drive(envs, reference, 2000) > 10
        assert envs.num_workers == workers and envs.transport == "local" and len(envs.hosts) == workers + 1
    reference.close()


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", TOYS)
def test_toy_environments_equal_sync_vector_env(env: Any, mode: str, workers: int) -> None:
    with ClusterEnv(env, 5, num_workers=workers, autoreset_mode=mode) as envs:
        assert drive(envs, sync_reference(env, 5, mode=mode), 100, options={"shift": 2.0}) > 25


def test_a_wide_observation() -> None:
    with ClusterEnv(toy.Wide, 3, num_workers=2) as envs:
        drive(envs, sync_reference(toy.Wide, 3), 8)


def test_env_kwargs_and_render() -> None:
    kwargs = {"mean_length": 3, "render_mode": "ansi"}
    reference = sync_reference(toy.Walk, 3, kwargs)
    with ClusterEnv(toy.Walk, 3, env_kwargs=kwargs, num_workers=2) as envs:
        assert_same_spaces(envs, reference)
        envs.reset(seed=0)
        reference.reset(seed=0)
        assert_same(envs.render(), reference.render())


def test_an_id_that_names_its_module() -> None:
    gym.register("Walk-v0", entry_point="toy_envs:Walk", max_episode_steps=4)
    try:
        reference = sync_reference("toy_envs:Walk-v0", 3)
        with ClusterEnv("toy_envs:Walk-v0", 3, num_workers=2) as envs:
            drive(envs, reference, 60)
    finally:
        del gym.registry["Walk-v0"]


ACTIONS: dict[str, tuple[Any, Callable[[np.ndarray], Any]]] = {
    "list": (toy.Walk, lambda a: a.tolist()),
    "tuple": (toy.Walk, lambda a: tuple(a.tolist())),
    "tuple of arrays": (toy.BinaryActions, tuple),
    "list of arrays": (toy.BoxActions, list),
    "nested lists": (toy.BoxActions, lambda a: a.tolist()),
    "int32": (toy.Walk, lambda a: a.astype(np.int32)),
    "uint8": (toy.Walk, lambda a: a.astype(np.uint8)),
    "float64 for float32": (toy.FloatActions, lambda a: a.astype(np.float64)),
    "float32 for float64": (toy.BoxActions, lambda a: a.astype(np.float32)),
    "another shape": (toy.Walk, lambda a: a[:, None]),
    "a view of every other": (toy.Walk, lambda a: np.repeat(a, 2)[::2]),
    "read-only": (toy.Walk, lambda a: np.frombuffer(a.tobytes(), a.dtype)),
    "foreign byte order": (toy.Walk, lambda a: a.astype(">i8")),
    "objects": (toy.Walk, lambda a: np.array([int(x) for x in a], dtype=object)),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_reach_the_environment_as_they_were_given(name: str) -> None:
    env, give = ACTIONS[name]
    reference = sync_reference(env, 5)
    with ClusterEnv(env, 5, num_workers=2) as envs:
        envs.reset(seed=1)
        reference.reset(seed=1)
        for t in range(12):
            actions = reference.action_space.sample()
            given = actions if t % 3 == 0 else give(actions)  # typed and other ones, one after the other
            assert_same(envs.step(given), reference.step(given), f"step {t}")


def test_nested_actions_in_lists() -> None:
    reference = sync_reference(toy.NestedActions, 4)
    with ClusterEnv(toy.NestedActions, 4, num_workers=3) as envs:
        envs.reset(seed=1)
        reference.reset(seed=1)
        actions = reference.action_space.sample()
        given = actions | {"gear": actions["gear"].tolist(), "pair": (actions["pair"][0].tolist(), actions["pair"][1])}
        assert_same(envs.step(given), reference.step(given))


def test_torch_actions_arrive_as_numpy() -> None:
    import torch

    with ClusterEnv(toy.FloatActions, 3, num_workers=2) as envs:
        envs.reset(seed=0)
        tensor = torch.arange(6, dtype=torch.float64).reshape(3, 2) / 10
        _, reward, _, _, infos = envs.step(tensor)
        np.testing.assert_allclose(reward, tensor.numpy().sum(1))
        assert infos["took"][0] == "ndarray:float64:(2,)"


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_call_get_attr_and_set_attr(workers: int) -> None:
    reference = sync_reference(toy.wrapped, 5)
    with ClusterEnv(toy.wrapped, 5, num_workers=workers) as envs:
        envs.reset(seed=3)
        reference.reset(seed=3)
        for both in (
            lambda e: e.get_attr("label"),  # the outermost wrapper that has it
            lambda e: e.get_attr("gain"),
            lambda e: e.get_attr("halves"),
            lambda e: e.call("scaled", 3.0, times=2),
            lambda e: e.call("halves"),
            lambda e: e.set_attr("gain", 2.5),
            lambda e: e.set_attr("label", ["a", "b", "c", "d", "e"]),
            lambda e: e.set_attr("outer", tuple(np.arange(5))),
            lambda e: e.set_attr("new", [(1, 2)] * 5),
            lambda e: e.set_attr("gain", [1.0, 2.0, 3.0, 4.0, 5.0]),
            lambda e: e.get_attr("gain"),
            lambda e: e.get_attr("label"),
            lambda e: e.get_attr("outer"),
            lambda e: e.get_attr("new"),
            lambda e: e.get_attr("np_random_seed"),
            lambda e: e.np_random_seed,
            lambda e: e.get_attr("metadata"),
            lambda e: e.step(np.ones(5, np.int64)),
        ):
            assert_same(both(envs), both(reference))
        for values in (["a"], ("a",) * 6):
            with pytest.raises(ValueError, match=f"Got `{len(values)}` values for 5 environments"):
                envs.set_attr("label", values)


def test_gymnasium_wrappers_can_be_put_around_it() -> None:
    def wrap(envs: Any) -> Any:
        return gym.wrappers.vector.RecordEpisodeStatistics(gym.wrappers.vector.ClipReward(envs, -0.1, 0.1))

    reference = wrap(sync_reference(toy.Walk, 3))
    envs = wrap(ClusterEnv(toy.Walk, 3, num_workers=2))
    assert_same(envs.reset(seed=1), reference.reset(seed=1))
    for _ in range(40):
        actions = reference.action_space.sample()
        got, expected = envs.step(actions), reference.step(actions)
        for infos in (got[-1], expected[-1]):
            infos.get("episode", {}).pop("t", None)  # wall time
        assert_same(got, expected)
    envs.close()


def test_what_is_returned_is_the_callers_own() -> None:
    with ClusterEnv(toy.Kinds, 3, num_workers=2) as envs:
        kept = [envs.reset(seed=0), *(envs.step(np.zeros((3, 3), np.int64)) for _ in range(20))]
    with ClusterEnv(toy.Kinds, 3, num_workers=2) as envs:
        assert_same(kept[0], envs.reset(seed=0))
        for t in range(20):
            assert_same(kept[t + 1], envs.step(np.zeros((3, 3), np.int64)), f"step {t}")


def test_a_vector_entry_point() -> None:
    reference = gym.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
    with ClusterEnv("CartPole-v1", 4, backend="vector") as envs:
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP and envs.backend == "vector"
        assert_same(envs.reset(seed=5), reference.reset(seed=5))
        for _ in range(200):
            actions = reference.action_space.sample()
            got, expected = envs.step(actions), reference.step(actions)
            assert_same(got[0], expected[0])
            for one, other in zip(got[1:4], expected[1:4], strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_infos_of_vector_environments_are_put_side_by_side(mode: str) -> None:
    parts = [toy.VectorWalk(n, mode) for n in (2, 2, 1)]  # as 5 are dealt out to 3 workers
    with ClusterEnv(toy.VectorWalk, 5, backend="vector", num_workers=3, env_kwargs={"mode": mode}) as envs:
        envs.reset(seed=0)
        for part in parts:
            part.reset(seed=0)
        finals = 0
        for _ in range(30):
            observation, *_, infos = envs.step(np.zeros(5, np.int64))
            apart = [part.step(np.zeros(part.num_envs, np.int64)) for part in parts]
            assert_same(observation, np.concatenate([a[0] for a in apart]))
            each = [a[4] for a in apart]
            assert_same(infos["count"], np.concatenate([i["count"] for i in each]))
            assert_same(infos["_count"], np.concatenate([i["_count"] for i in each]))
            assert list(infos["version"]) == ["one"] * 5
            if any("final_obs" in i for i in each):
                finals += 1
                for first, n, one in ((0, 2, each[0]), (2, 2, each[1]), (4, 1, each[2])):
                    for row in range(n):
                        has = "final_obs" in one and bool(one["_final_obs"][row])
                        assert infos["_final_obs"][first + row] == has
                        assert_same(infos["final_obs"][first + row], one["final_obs"][row] if has else None)
            else:
                assert "final_obs" not in infos
        assert (finals > 5) == (mode == "SameStep")
        with pytest.raises(WorkerError, match="backend=vector has none: use backend='sync'"):
            envs.get_attr("count")


def test_the_first_reset_without_a_seed_uses_the_constructors() -> None:
    reference = sync_reference(toy.Walk, 3)
    with ClusterEnv(toy.Walk, 3, seed=9, num_workers=2) as envs:
        assert_same(envs.reset(), reference.reset(seed=9))
        assert_same(envs.reset(), reference.reset())
        assert_same(envs.reset(seed=4), reference.reset(seed=4))


def test_a_masked_reset_needs_a_whole_one_before() -> None:
    with ClusterEnv(toy.Walk, 3, num_workers=2) as envs:
        with pytest.raises(ValueError, match="needs a reset of all environments before"):
            envs.reset(options={"reset_mask": np.array([True, False, False])})
        envs.reset(seed=0)


def test_vector_backends_take_one_seed() -> None:
    with ClusterEnv("CartPole-v1", 2, backend="vector") as envs:
        with pytest.raises(ValueError, match="backend=vector takes one seed for all environments"):
            envs.reset(seed=[1, 2])
        envs.reset(seed=1)


def test_numpy_seeds() -> None:
    reference = sync_reference(toy.Walk, 3)
    with ClusterEnv(toy.Walk, 3, num_workers=2) as envs:
        assert_same(envs.reset(seed=np.int64(4)), reference.reset(seed=4))
        assert_same(envs.reset(seed=np.array([3, 1, 2])), reference.reset(seed=[3, 1, 2]))
        assert_same(envs.reset(seed=2**40), reference.reset(seed=2**40))


# -- refusals --


def test_mistakes_are_refused_and_do_no_harm() -> None:
    reference = sync_reference(toy.Walk, 3)
    with ClusterEnv(toy.Walk, 3, num_workers=2) as envs:
        assert_same(envs.reset(seed=1), reference.reset(seed=1))
        for mistake, error, message in (
            (lambda: envs.step(np.zeros(2, np.int64)), ValueError, "num_envs=3 environments.*got 2"),
            (lambda: envs.step([0, 0, 0, 0]), ValueError, "num_envs=3 environments.*got 4"),
            (lambda: envs.step(1), ValueError, "num_envs=3 environments.*got int 1"),
            (lambda: envs.step([object()] * 3), TypeError, r"actions\[0\] is a builtins.object"),
            (lambda: envs.step(np.array([0, 3, 1])), ValueError, r"actions\[1\], of environment 1, is np.int64\(3\)"),
            (lambda: envs.step([0, 1, -1]), ValueError, r"of environment 2, is -1; expected a member of Disc"),
            (lambda: envs.step([0, np.nan, 1]), ValueError, r"actions\[1\], of environment 1, is nan"),
            (lambda: envs.step(np.zeros((3, 2), int)), ValueError, r"shape \(\) for each environment.*; got \(2,\)"),
            (lambda: envs.step([[0], [1, 1], [2]]), ValueError, r"shape \(\) for each environment.*got list"),
            (lambda: envs.reset(seed=[1, 2]), ValueError, "must match num_envs=3 but got length=2"),
            (lambda: envs.reset(options={"x": object()}), TypeError, r"options\['x'\] is a builtins.object"),
            (lambda: envs.reset(options={"reset_mask": [True] * 3}), TypeError, "must be a numpy array"),
            (lambda: envs.reset(options={"reset_mask": np.ones(2, bool)}), ValueError, r"must have shape `\(3,\)`"),
            (lambda: envs.reset(options={"reset_mask": np.ones(3)}), TypeError, "dtype=np.bool_"),
            (lambda: envs.reset(options={"reset_mask": np.zeros(3, bool)}), ValueError, "at least one True"),
            (lambda: envs.call("scaled", object()), TypeError, r"the arguments of scaled\[1\]\[0\] is a"),
            (lambda: envs.set_attr("gain", object()), TypeError, r"gain of environment 0 is a builtins.object, which"),
            (lambda: envs.set_attr("gain", [1.0, 2.0, {3}]), TypeError, "gain of environment 2 is a builtins.set"),
            (lambda: envs.rollout(5), ValueError, r"rollout needs a policy.*policy=\.\.\."),
            (lambda: envs.rollouts(5), ValueError, "rollouts needs a policy"),
            (lambda: envs.publish(), ValueError, "publish needs a policy"),
            (lambda: envs.version, ValueError, "version needs a policy"),
        ):
            with pytest.raises(error, match=message):
                mistake()
            assert_same(envs.step(np.ones(3, np.int64)), reference.step(np.ones(3, np.int64)))


@pytest.mark.parametrize(
    ("env", "wrong"),
    [
        (toy.BoxActions, lambda a: np.where(a > a.min(), a, np.nan)),
        (toy.BoxActions, lambda a: a[:, :1]),
        (toy.Kinds, lambda a: a + np.array([0, 2, 0])),
        (toy.BinaryActions, lambda a: a * 2 + 2),
        (toy.FromMinusTwo, lambda a: a + 4),
        (toy.NestedActions, lambda a: a | {"gear": a["gear"] + 5}),
        (toy.NestedActions, lambda a: a | {"pair": (a["pair"][0], a["pair"][1] - 3)}),
        (toy.NestedActions, lambda a: a | {"steer": a["steer"] * np.nan}),
    ],
)
def test_actions_that_are_none_are_refused_and_do_no_harm(env: Any, wrong: Callable[[Any], Any]) -> None:
    with ClusterEnv(env, 3, num_workers=2) as envs:
        with pytest.raises(gym.error.ResetNeeded, match="reset"):
            envs.step(envs.action_space.sample())
        envs.reset(seed=1)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"expected a member of|must have shape"):
                envs.step(wrong(envs.action_space.sample()))
            envs.step(envs.action_space.sample())


def test_an_action_that_nobody_reads_may_be_anything() -> None:
    """Of an environment that only resets, as in ``SyncVectorEnv``."""
    reference = sync_reference(toy.Walk, 4, {"mean_length": 2})
    with ClusterEnv(toy.Walk, 4, num_workers=2, env_kwargs={"mean_length": 2}) as envs:
        ended = np.zeros(4, dtype=bool)
        assert_same(envs.reset(seed=1), reference.reset(seed=1))
        for _ in range(20):
            actions = np.where(ended, -1, 1)
            assert_same(stepped := envs.step(actions), reference.step(actions))
            ended = stepped[2] | stepped[3]


def build(**changes: Any) -> ClusterEnv:
    return ClusterEnv(**{"env": toy.Walk, "num_envs": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_envs": 0}, ValueError, "num_envs must be a whole number, at least 1; got 0"),
        ({"num_envs": True}, ValueError, "num_envs must be a whole number, at least 1; got True"),
        ({"num_envs": 2.0}, ValueError, "num_envs must be"),
        ({"num_workers": 0}, ValueError, "num_workers must be a whole number, at least 1; got 0"),
        ({"num_probes": 0}, ValueError, "num_probes must be a whole number, at least 1; got 0"),
        ({"seed": -1}, ValueError, "seed must be"),
        ({"seed": 1.5}, ValueError, "seed must be"),
        ({"timeout": 0}, ValueError, "timeout must be"),
        ({"timeout": float("nan")}, ValueError, "timeout must be"),
        ({"learner_timeout": -1.0}, ValueError, "learner_timeout must be"),
        ({"sync": Always()}, ValueError, "a sync rule needs a policy"),
        ({"sync": APS, "policy": Linear(toy.Walk.observation_space, toy.Walk.action_space)}, TypeError, "sync must be"),
        ({"backend": "fast"}, ValueError, "backend must be one of sync, vector, envpool; got 'fast'"),
        ({"env": 3}, TypeError, "env must be a Gymnasium id or a callable, got int"),
        ({"autoreset_mode": "Sometimes"}, ValueError, "must be one of NextStep, SameStep, Disabled; got 'Sometimes'"),
        ({"env": lambda: None}, WorkerError, "environment 0: .*made a NoneType, expected a gymnasium.Env"),
        ({"env": "NoSuchEnv-v0"}, WorkerError, r"environment 0 \(NoSuchEnv-v0\) could not be built"),
        ({"env": "no_such_module:X-v0"}, WorkerError, "No module named 'no_such_module'"),
        ({"env": toy.Faulty, "env_kwargs": {"where": "constructor"}}, WorkerError, "ValueError: no such level"),
        ({"env": toy.Walk, "env_kwargs": {"size": 3}}, WorkerError, "unexpected keyword argument 'size'"),
        ({"env": toy.Walk, "backend": "vector"}, WorkerError, "could not be built with backend=vector"),
        ({"env": "Taxi-v4", "backend": "vector"}, WorkerError, "could not be built with backend=vector"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        build(**changes)


class Text(toy.Walk):
    observation_space = gym.spaces.Dict({"say": gym.spaces.Text(5)})


def differing() -> Callable[[], gym.Env]:
    sizes = iter((2, 2, 3, 3))

    def make() -> gym.Env:
        env = toy.Walk()
        env.action_space = gym.spaces.Discrete(next(sizes))
        return env

    return make


def test_spaces_that_cannot_be_sent_or_differ() -> None:
    with pytest.raises(WorkerError, match=r"Text spaces have no fixed shape .* at \['say'\]"):
        build(env=Text)
    with pytest.raises(WorkerError, match=r"environments 0 to 3 .* differ: .*Discrete"):
        build(env=differing(), num_envs=4)
    with pytest.raises(
        HandshakeError, match=r"the action space is Discrete\(2\) on rank 1 .* but Discrete\(3\) on rank 2"
    ):
        build(env=differing(), num_envs=4, num_workers=2)


@pytest.mark.parametrize(
    ("where", "cause"),
    [("step", "ZeroDivisionError: the simulator broke"), ("info", r"info\['outer'\]\['inner'\] is a builtins.object"),
     ("exit", "SystemExit: 3")],
)  # fmt: skip
@pytest.mark.parametrize("workers", [1, 3])
def test_an_environment_that_fails_in_step_is_named(where: str, cause: str, workers: int) -> None:
    envs = build(env=toy.Faulty, num_envs=5, num_workers=workers, env_kwargs={"where": where, "seed": 13})
    envs.reset(seed=10)
    actions = np.zeros(5, np.int64)
    envs.step(actions)
    envs.step(actions)
    with pytest.raises(
        WorkerError, match=rf"^rank {1 if workers == 1 else 2} \(worker, [^)]+\) failed.*{cause}"
    ) as caught:
        envs.step(actions)
    assert "environment 3" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.rank == (1 if workers == 1 else 2) and caught.value.host == envs.hosts[0]
    assert "toy_envs.py" in caught.value.remote_traceback or where == "info"
    for call in (lambda: envs.step(actions), lambda: envs.reset(), lambda: envs.get_attr("gain")):
        with pytest.raises(ClusterError, match=r"after close.* or after a failure"):
            call()
    envs.close()
    envs.close()


def test_an_environment_that_fails_in_reset_is_named() -> None:
    envs = build(env=toy.Faulty, num_envs=4, num_workers=2, env_kwargs={"where": "reset", "seed": 13})
    with pytest.raises(WorkerError, match=r"rank 2 .* in environment 3: ValueError: cannot reset"):
        envs.reset(seed=10)


def test_a_failing_close_is_told_and_does_not_repeat() -> None:
    envs = build(env=toy.Faulty, env_kwargs={"where": "close"})
    envs.reset(seed=0)
    with pytest.raises(WorkerError, match="OSError: cannot close"):
        envs.close()
    envs.close()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda envs: envs.call("fail"), "environment 0: RuntimeError: asked to fail"),
        (lambda envs: envs.get_attr("no_such"), "environment 0: AttributeError: .*no_such"),
        (lambda envs: envs.call("unsendable"), r"environment 0: unsendable\['inner'\]\[0\] is a builtins.object"),
        (lambda envs: envs.get_attr("np_random"), "environment 0: np_random is a numpy.*Generator"),
        (lambda envs: envs.set_attr("halves", 3), "environment 0: AttributeError"),
    ],
)
def test_a_call_that_fails_is_told_and_the_environments_go_on(ask: Callable[[Any], Any], message: str) -> None:
    reference = sync_reference(toy.Walk, 3)
    with ClusterEnv(toy.Walk, 3, num_workers=2) as envs:
        envs.reset(seed=1)
        reference.reset(seed=1)
        for _ in range(2):
            with pytest.raises(WorkerError, match=message):
                ask(envs)
            assert_same(envs.step(np.ones(3, np.int64)), reference.step(np.ones(3, np.int64)))


def test_after_close() -> None:
    envs = build(policy=Linear(toy.Walk.observation_space, toy.Walk.action_space))
    envs.reset(seed=0)
    envs.close()
    assert envs.closed
    for call in (
        lambda: envs.reset(),
        lambda: envs.step(np.zeros(2, np.int64)),
        lambda: envs.rollout(3),
        lambda: next(envs.rollouts(3)),
        lambda: envs.publish(),
        lambda: envs.call("scaled", 1.0),
        lambda: envs.set_attr("gain", 1.0),
    ):
        with pytest.raises(ClusterError, match="after close"):
            call()
    envs.close()


def test_environments_are_closed_however_the_body_ends() -> None:
    closed: list[int] = []

    class Noted(toy.Walk):
        def close(self) -> None:
            closed.append(1)

    with build(env=Noted):
        pass
    assert closed == [1, 1]
    with pytest.raises(KeyError), build(env=Noted):
        raise KeyError("the learner's own")
    assert closed == [1, 1] * 2


class Interrupting(toy.Walk):
    """As if Ctrl-C came while the learner waits."""

    def step(self, action: Any) -> Any:
        raise KeyboardInterrupt


def test_after_an_interruption_nothing_can_be_mistaken_for_an_answer() -> None:
    envs = build(env=Interrupting)
    envs.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(ClusterError, match="after a failure"):
        envs.step(np.zeros(2, np.int64))
    envs.close()
