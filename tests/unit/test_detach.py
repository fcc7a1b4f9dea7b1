"""DETACH in one process: versions, weights on request, the sync rules end to end, streams, and whose memory it is."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import toy_envs as toy
from exact import assert_same
from toy_policy import Linear

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.collect import ProbeStates
from clusterenv_hpc.comm.channel import ClusterError, WorkerError
from clusterenv_hpc.policies import ActorCritic, PolicyError, num_weights
from clusterenv_hpc.rollout import Rollout
from clusterenv_hpc.sync import APS, Always, EveryK, Never, SyncRule


def build(
    rule: SyncRule | None = None,
    workers: int = 2,
    num_envs: int = 4,
    env: Any = toy.Walk,
    scale: float = 1.0,
    **changes: Any,
) -> tuple[ClusterEnv, Linear]:
    policy = Linear(env.observation_space, env.action_space, scale)
    return ClusterEnv(env, num_envs, policy=policy, sync=rule, num_workers=workers, **changes), policy


def train(envs: ClusterEnv, policy: Linear, updates: int, shift: float = 0.5) -> list[Rollout]:
    """Rollout, update, publish, again and again; ends with a rollout."""
    taken = [envs.rollout(8)]
    for _ in range(updates):
        policy.shift(shift)
        envs.publish()
        taken.append(envs.rollout(8))
    return taken


def lags(taken: list[Rollout]) -> list[int]:
    """The lag of each rollout, which is the same throughout in lockstep."""
    found = [np.unique(rollout.lag) for rollout in taken]
    assert all(len(lag) == 1 for lag in found)
    return [int(lag[0]) for lag in found]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (None, [0] * 13),  # the default is Always
        (Always(), [0] * 13),
        (Never(), list(range(13))),
        (EveryK(3), [0, 1, 2] * 4 + [0]),
        (EveryK(1), [0] * 13),
        (APS(0.0), [0] * 13),
        (APS(1e9, max_lag=None), list(range(13))),
        (APS(1e9, max_lag=4), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]),
        (APS(1e9, max_lag=1), [0, 1] * 6 + [0]),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_which_weights_act(rule: SyncRule | None, expected: list[int], workers: int) -> None:
    envs, policy = build(rule, workers)
    with envs:
        taken = train(envs, policy, 12)
        assert lags(taken) == expected
        stats = envs.stats
        loads = 1 + sum(1 for before, now in pairwise(expected) if now <= before)
        assert stats.weight_messages == stats.weight_requests == loads * workers
        assert dict(stats.requests) == dict.fromkeys(range(1, workers + 1), loads)
        assert stats.weight_bytes == stats.weight_messages * (64 + -(-4 * policy_size(policy) // 64) * 64)
        assert stats.lag_max == max(expected) and stats.lag_mean == pytest.approx(np.mean(expected))
        assert stats.sent["probe"].messages == 12 * workers
        assert envs.version == 12 and [rollout.version for rollout in taken] == list(range(13))
        assert stats.received["rollout"].messages == 13 * workers


def policy_size(policy: Linear) -> int:
    return sum(tensor.numel() for tensor in policy.parameters())


def test_the_acting_policy_is_the_one_of_its_version() -> None:
    envs, policy = build(EveryK(2), 2)
    plain = Linear(toy.Walk.observation_space, toy.Walk.action_space)
    with envs:
        for rollout in train(envs, policy, 7, 0.25):
            version = int(rollout.versions[0, 0])
            with torch.inference_mode():
                wanted = plain(torch.from_numpy(rollout.observations.reshape(-1, 3))).reshape(8, 4, 3)
                wanted[..., 0] += 0.25 * version
            np.testing.assert_allclose(rollout.behaviour_params, wanted.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("env", [toy.Walk, toy.FloatActions, toy.BinaryActions, toy.Kinds])
def test_divergence_is_the_mean_of_kl_from_the_local_to_the_new_policy(env: Any) -> None:
    """Every valid state is a probe here, so the reading can be computed from the rollout itself."""
    envs, policy = build(APS(1e9, max_lag=None), 2, env=env, num_probes=10_000)
    with envs:
        envs.reset(seed=1)
        readings: list[float] = []
        for _ in range(5):
            rollout = envs.rollout(8)
            policy.shift(0.4)
            envs.publish()
            for rows in (slice(0, 2), slice(2, 4)):
                valid = rollout.valid[:, rows]
                old = torch.from_numpy(rollout.behaviour_params[:, rows][valid].copy()).double()
                first = old.clone()  # the local policy is version 0 for ever
                first[:, 0] += 0.4 * (envs.version - 0)
                readings.append(float(envs._detached._distribution.kl(old, first).mean()))  # type: ignore[union-attr]
        envs.rollout(1)  # carries the last readings
        assert envs.stats.kl_count == len(readings) == 10
        assert envs.stats.kl_sum == pytest.approx(sum(readings), rel=1e-4)
        assert envs.stats.kl_last == pytest.approx(readings[-1], rel=1e-4)
        assert readings[-1] > readings[0] > 0
        assert envs.stats.weight_messages == 2


def test_aps_asks_just_when_the_divergence_passes_delta() -> None:
    readings = []
    for delta in (1e9, 0.1):
        envs, policy = build(APS(delta, max_lag=None), 1, scale=0.0)  # blind: the same divergence in every state
        with envs:
            taken = train(envs, policy, 10, 0.2)
            readings.append((lags(taken), envs.stats.weight_requests))
    probabilities = np.exp([0, 0, 0]) / 3

    def kl(steps: int) -> float:
        logits = np.array([0.2 * steps, 0, 0])
        new = np.exp(logits) / np.exp(logits).sum()
        return float((probabilities * np.log(probabilities / new)).sum())

    passes = next(steps for steps in range(1, 100) if kl(steps) > 0.1)
    assert kl(passes - 1) <= 0.1 < kl(passes) and passes > 2
    assert readings[0] == (list(range(11)), 1)
    assert readings[1][0][: passes + 1] == [*range(passes), 0]
    assert readings[1][1] == 1 + readings[1][0].count(0) - 1


def test_aps_with_delta_zero_does_not_ask_for_the_same_weights_again() -> None:
    envs, policy = build(APS(0.0, max_lag=None), 2)
    with envs:
        train(envs, policy, 5, shift=0.0)
        assert envs.stats.weight_messages == 2 and envs.stats.kl_count == 10 and envs.stats.kl_sum == 0.0


def test_aps_needs_no_weights_and_few_bytes_while_nothing_drifts() -> None:
    envs, policy = build(APS(1e9, max_lag=None), 2, num_probes=8)
    with envs:
        train(envs, policy, 10)
        assert envs.stats.probe_bytes <= 20 * (1 + 32 + 8 * 3 * 4)


def test_versions_count_from_where_they_were_told_to() -> None:
    envs, policy = build(Always(), 2, first_version=41)
    with envs:
        assert envs.version == 41
        assert [int(r.versions[0, 0]) for r in train(envs, policy, 2)] == [41, 42, 43]


def test_publish_before_the_first_rollout_and_twice_in_a_row() -> None:
    envs, policy = build(Always(), 2)
    with envs:
        policy.shift(1.0)
        assert envs.publish() == 1
        policy.shift(1.0)
        assert envs.publish() == 2
        rollout = envs.rollout(4)
        assert (rollout.versions == 2).all() and (rollout.lag == 0).all()
        assert envs.stats.weight_messages == 2  # one for each worker, of the newest
        for _ in range(3):
            policy.shift(1.0)
            envs.publish()
        assert (envs.rollout(4).versions == 5).all() and envs.stats.weight_messages == 4


def test_the_snapshot_is_taken_when_it_is_published() -> None:
    """What the learner does to its policy after ``publish`` reaches nobody before the next one."""
    envs, policy = build(Always(), 1, scale=0.0)
    with envs:
        policy.shift(2.0)
        envs.publish()
        policy.shift(100.0)
        assert (envs.rollout(4).behaviour_params[..., 0] == 2.0).all()
        assert (envs.rollout(4).behaviour_params[..., 0] == 2.0).all()


def test_training_mode_is_left_as_it_was() -> None:
    class Dropping(Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.dropout, self.frozen = torch.nn.Dropout(0.9), torch.nn.Dropout(0.9)

        def forward(self, observations: Any) -> torch.Tensor:
            return self.dropout(self.frozen(super().forward(observations)))

    policy = Dropping(toy.Walk.observation_space, toy.Walk.action_space)
    policy.train()
    policy.frozen.eval()
    with ClusterEnv(toy.Walk, 2, policy=policy, sync=APS(0.0)) as envs:
        for _ in range(3):
            envs.rollout(8)
            envs.publish()
        envs.rollout(8)
        assert envs.stats.kl_sum == 0.0, "neither side drops anything out when it acts"
        assert policy.training and policy.dropout.training and not policy.frozen.training


# -- streams --


def test_a_stream_gives_single_workers_rollouts_in_their_own_order() -> None:
    """Each worker's rollouts follow one another without a gap: the successor of the last step is the next first."""
    envs, policy = build(Always(), 3, num_envs=7)
    with envs:
        envs.reset(seed=0)
        last: dict[int, Any] = {}
        count = dict.fromkeys((1, 2, 3), 0)
        for i, rollout in enumerate(envs.rollouts(5)):
            (rank,) = set(rollout.ranks)
            assert list(rollout.rows) == {1: [0, 1, 2], 2: [3, 4], 3: [5, 6]}[rank]
            assert set(rollout.episodes.rows) <= set(rollout.rows)
            if rank in last:
                observation, ended = last[rank]
                assert_same(rollout.observations[0].copy(), observation)
                assert (rollout.valid[0] == ~ended).all()
            last[rank] = rollout.next_observations[-1].copy(), (rollout.terminated | rollout.truncated)[-1]
            count[int(rank)] += 1
            if i % 3 == 2:
                policy.shift(0.1)
                envs.publish()
            if i == 59:
                break
        assert min(count.values()) >= 15, "none is preferred"
        assert envs.stats.lag_max >= 1


def test_leaving_a_stream_and_going_on_in_every_way() -> None:
    envs, _policy = build(Always(), 2)
    with envs:
        envs.reset(seed=0)
        for turn in range(4):
            for i, rollout in enumerate(envs.rollouts(6)):
                assert rollout.num_steps == 6 and rollout.num_envs == 2
                if i == turn:
                    break
            if turn == 1:
                assert envs.rollout(3).num_envs == 4
            if turn == 2:
                observation, *_ = envs.step(np.zeros(4, np.int64))
                assert_same(envs.rollout(1).observations[0].copy(), observation)
            if turn == 3:
                envs.reset(seed=3)
                assert envs.rollout(2).valid[0].all()
        assert envs.stats.rollouts_dropped > 0
        taken, dropped = 1 + 2 + 3 + 4, envs.stats.rollouts_dropped
        sent = sum(worker_rollouts(envs))
        assert sent == taken + dropped + 2 * 3, "every rollout sent was taken or counted as dropped"


def worker_rollouts(envs: ClusterEnv) -> list[int]:
    """How many rollouts each worker of this process has sent."""
    workers = envs._crew.channel._hub._workers.values()  # type: ignore[attr-defined]
    return [worker.gi_frame.f_locals["self"]._acting._sequence for worker in workers]


def test_a_stream_stops_when_something_else_is_asked_for() -> None:
    envs, _policy = build(Always(), 2)
    with envs:
        stream = envs.rollouts(4)
        next(stream)
        envs.rollout(2)
        with pytest.raises(StopIteration):
            next(stream)
        stream = envs.rollouts(4)
        next(stream)
        envs.close()
        with pytest.raises(StopIteration):
            next(stream)
    with pytest.raises(ClusterError, match="after close"):
        envs.rollouts(4)


def test_an_older_stream_does_not_disturb_a_newer_one() -> None:
    envs, _policy = build(Always(), 2)
    with envs:
        old = envs.rollouts(4)
        next(old)
        new = envs.rollouts(7)
        assert next(new).num_steps == 7
        with pytest.raises(StopIteration):
            next(old)
        assert next(new).num_steps == 7
        old = envs.rollouts(4)  # not begun: nothing happens yet
        del old
        gc.collect()
        older, newer = envs.rollouts(5), envs.rollouts(6)
        next(older)
        next(newer)
        del older
        gc.collect()
        assert [next(newer).num_steps for _ in range(4)] == [6] * 4


def test_a_stream_that_begins_after_close_is_refused() -> None:
    envs, _policy = build(Always(), 2)
    envs.reset(seed=0)
    stream = envs.rollouts(4)
    envs.close()
    with pytest.raises(ClusterError, match="after close"):
        next(stream)


def test_divergence_is_measured_however_far_the_workers_are_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow learner takes several rollouts between two versions; its probes speak of rollouts long gone by."""
    measured: list[float | None] = []

    def divergence(self: ProbeStates, *arguments: Any) -> float | None:
        measured.append(original(self, *arguments))
        return measured[-1]

    original = ProbeStates.divergence
    monkeypatch.setattr(ProbeStates, "divergence", divergence)
    for workers, per_update in ((1, 1), (2, 2), (2, 6), (3, 9)):
        envs, policy = build(APS(1e-9, max_lag=None), workers, num_envs=6)
        measured.clear()
        with envs:
            updates = 0
            for i, _ in enumerate(envs.rollouts(4)):
                for _ in range(10):  # the workers fill all that there is
                    envs._crew.channel.progress()
                if i % per_update == per_update - 1:
                    policy.shift(0.5)
                    envs.publish()
                    updates += 1
                if updates == 12:
                    break
        assert len(measured) >= 10 * workers and None not in measured, (workers, per_update, measured)


def test_always_catches_up_with_versions_published_while_weights_were_under_way() -> None:
    envs, policy = build(Always(), 2)
    with envs:
        for i, rollout in enumerate(envs.rollouts(3)):
            if i < 12:
                policy.shift(0.1)
                envs.publish()
            if i > 24:
                assert (rollout.lag == 0).all()
            if i == 32:
                break


# -- whose memory it is --


def copied(rollout: Rollout) -> dict[str, Any]:
    return {key: np.array(value) for key, value in vars(rollout).items() if isinstance(value, np.ndarray)}


def bits(part: Any) -> bytes:
    return (part.numpy() if isinstance(part, torch.Tensor) else np.array(part)).tobytes()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["rollout", "rollouts"])
def test_rollouts_that_are_kept_never_change(kind: str, workers: int) -> None:
    envs, _ = build(Always(), workers)
    with envs:
        stream = iter(lambda: envs.rollout(5), None) if kind == "rollout" else envs.rollouts(5)
        kept = []
        for _ in range(50):
            rollout = next(stream)
            kept.append((rollout, copied(rollout)))
        for rollout, before in kept:
            for key, value in before.items():
                assert_same(np.array(getattr(rollout, key)), value, key)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["rollout", "rollouts"])
@pytest.mark.parametrize(
    "part",
    [
        lambda r: r.observations,
        lambda r: r.next_observations[2],
        lambda r: r.rewards[1:3, :1],
        lambda r: r.rewards.T.reshape(-1)[:0:-1] if r.num_envs == 1 else r.rewards.T,
        lambda r: torch.from_numpy(r.behaviour_params),
        lambda r: torch.from_numpy(r.observations)[1],
        lambda r: memoryview(r.actions),
        lambda r: r.lag,
        lambda r: r.versions,
        lambda r: r.episodes,
    ],
)
def test_parts_that_are_kept_never_change(part: Any, kind: str, workers: int) -> None:
    envs, _ = build(Always(), workers)
    with envs:
        stream = iter(lambda: envs.rollout(5), None) if kind == "rollout" else envs.rollouts(5)
        kept = []
        for _ in range(12):
            mine = part(next(stream))
            whole = list(vars(mine).values()) if hasattr(mine, "rows") else [mine]
            kept.append((whole, [bits(one) for one in whole]))
        for whole, before in kept:
            assert [bits(one) for one in whole] == before


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["rollout", "rollouts"])
def test_buffers_are_used_again_when_nobody_holds_them(kind: str, workers: int) -> None:
    envs, _ = build(Always(), workers)
    with envs:
        stream = iter(lambda: envs.rollout(5), None) if kind == "rollout" else envs.rollouts(5)
        places = set()
        for _ in range(60):
            rollout = next(stream)
            places.add(rollout.rewards.__array_interface__["data"][0])
        assert len(places) <= 4 * workers


def test_rollouts_of_different_lengths_one_after_the_other() -> None:
    envs, _ = build(Always(), 2)
    with envs:
        kept = []
        for steps in (1, 7, 3, 7, 64, 1, 7, 3):
            rollout = envs.rollout(steps)
            assert rollout.observations.shape == (steps, 4, 3) and rollout.behaviour_params.shape == (steps, 4, 3)
            kept.append((rollout, copied(rollout)))
            for i, streamed in enumerate(envs.rollouts(steps + 1)):
                assert streamed.rewards.shape == (steps + 1, 2)
                kept.append((streamed, copied(streamed)))
                if i == 2:
                    break
        for rollout, before in kept:
            for key, value in before.items():
                assert_same(np.array(getattr(rollout, key)), value, key)


def test_same_seeds_give_bit_equal_rollouts() -> None:
    def run() -> list[dict[str, Any]]:
        envs, policy = build(APS(0.02), 2, env=toy.Image)
        with envs:
            envs.reset(seed=5)
            return [copied(rollout) for rollout in train(envs, policy, 6, 0.2)]

    assert_same(run(), run())


# -- refusals --


class TooFew(Linear):
    def forward(self, observations: Any) -> torch.Tensor:
        return super().forward(observations)[:, :2]


@pytest.mark.parametrize("ask", [ClusterEnv.publish, lambda envs: envs.rollout(3)], ids=["publish", "rollout"])
def test_layers_that_are_added_later_are_refused_and_do_no_harm(ask: Any) -> None:
    policy = ActorCritic(toy.Walk.observation_space, toy.Walk.action_space, [4])
    count = num_weights(policy)
    with ClusterEnv(toy.Walk, 4, policy=policy, num_workers=2) as envs:
        envs.rollout(3)
        policy.actor.append(torch.nn.Linear(2, 3))
        with pytest.raises(PolicyError, match=rf"of {count + 9} numbers, but were \d+ of {count} when ClusterEnv was"):
            ask(envs)
        del policy.actor[-1]
        envs.publish()
        envs.rollout(3)


def test_a_policy_that_does_not_fit_is_refused() -> None:
    space, actions = toy.Walk.observation_space, toy.Walk.action_space
    with pytest.raises(WorkerError, match=r"PolicyError.*TooFew.*a fitting last layer is"):
        ClusterEnv(toy.Walk, 2, policy=TooFew(space, actions))
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        ClusterEnv(toy.Walk, 2, policy=Linear)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="Linear failed on a batch of 3 observations"):
        ClusterEnv(toy.Image, 2, policy=Linear(space, actions))
    with pytest.raises(WorkerError, match="Dict"):
        ClusterEnv(toy.NestedActions, 2, policy=Linear(toy.NestedActions.observation_space, actions))


@pytest.mark.parametrize("steps", [0, -3, 2.5, "8", True, None])
def test_bad_numbers_of_steps_are_refused(steps: Any) -> None:
    envs, _ = build(Always(), 1)
    with envs:
        for method in (envs.rollout, envs.rollouts):
            with pytest.raises(ValueError, match="num_steps must be a whole number, at least 1; got"):
                method(steps)
        assert envs.rollout(np.int64(3)).num_steps == 3


@pytest.mark.parametrize("kind", ["rollout", "rollouts"])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("step", "ZeroDivisionError: the simulator broke"),
        ("nan", "the environment gave an observation that is not a finite number"),
        ("inf_reward", "the environment gave a reward that is not a finite number"),
    ],
)
def test_failures_in_a_rollout_are_named(where: str, message: str, kind: str) -> None:
    kwargs = {"where": where, "seed": 13, "after": 20}
    envs, _ = build(Always(), 2, env=toy.Faulty, env_kwargs=kwargs)
    envs.reset(seed=10)
    with pytest.raises(WorkerError, match=rf"rank 2 \(worker, .*in environment 3: {message}"):
        stream = iter(lambda: envs.rollout(8), None) if kind == "rollout" else envs.rollouts(8)
        for _ in range(40):
            next(stream)
    with pytest.raises(ClusterError, match="after a failure"):
        envs.rollout(3)
    envs.close()


def test_a_learner_whose_policy_becomes_nan_is_told_by_its_workers() -> None:
    envs, policy = build(Always(), 2)
    with pytest.raises(WorkerError, match=r"the policy gave an action distribution \(policy version 1\)"), envs:
        envs.rollout(4)
        policy.shift(float("nan"))
        envs.publish()
        envs.rollout(4)
