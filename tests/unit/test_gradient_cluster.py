"""Gradient workers and their learner in one process; tests/mpi/test_gradients.py has the same over MPI."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gradient_ranks import Walk, make_policy, make_settings, train

from clusterenv_hpc.comm.channel import ClusterError, SilenceError, WorkerError
from clusterenv_hpc.comm.local import LocalHub
from clusterenv_hpc.envs import EnvSource
from clusterenv_hpc.gradients.aggregators import Malenia, MSynchronous, PerArrival, Rennala, Synchronous
from clusterenv_hpc.gradients.gradient_cluster import GradientCluster
from clusterenv_hpc.gradients.methods import METHODS
from clusterenv_hpc.gradients.nigt import NIGT
from clusterenv_hpc.gradients.tree_sum import TreeSum
from clusterenv_hpc.policies import flat_weights

ROUND_METHODS = [name for name in METHODS if name != "afedpg"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 13])
def test_tree_sum_is_the_same_bits_everywhere(ranks):
    hub = LocalHub(ranks)
    sums = [TreeSum(hub.channel(rank), 7) for rank in range(ranks)]
    rng = np.random.default_rng(ranks)
    for _ in range(3):
        vectors = rng.normal(size=(ranks, 7))
        waiting = list(rng.permutation(ranks))
        for rank in waiting:
            sums[rank].begin(vectors[rank])
        for _ in range(10 * ranks):
            waiting = [rank for rank in waiting if not sums[rank].done()]
        assert not waiting
        for one in sums:
            np.testing.assert_array_equal(one.total, sums[0].total)
        np.testing.assert_allclose(sums[0].total, vectors.sum(axis=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ROUND_METHODS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_estimates_are_those_of_the_round_and_transports_agree(name, workers):
    results = [
        train(name, make_settings(transport), 6, num_workers=workers, verify=True, M=12)
        for transport in ("p2p", "allreduce")
    ]
    if name != "m_sync_nigt" or workers == 1:  # which worker is the first is a matter of timing
        np.testing.assert_allclose(results[0]["iterate"], results[1]["iterate"], rtol=1e-5, atol=1e-6)
    assert results[0]["total"]["used"] == results[1]["total"]["used"] >= 6 * 12


@pytest.mark.parametrize("name", ROUND_METHODS)
def test_messages_that_are_slow_arrive_all_and_each_once(name):
    """Of workers at rest too, and while the next gradient is being computed."""
    slow = make_settings(compute_s=(0.004, 0.006), communication_s=(0.01, 0.03), timeout_s=5.0)
    assert train(name, slow, 3, num_workers=2, verify=True, M=12)["total"]["used"] >= 3 * 12


def test_gradients_that_wait_for_a_slow_link_are_given_up_with_their_version():
    """Four are computed in the time in which one is sent: the newest must not stand behind all those of before."""
    slow = make_settings(compute_s=(0.005, 0.005), communication_s=(0.02, 0.02), timeout_s=5.0)
    result = train("rennala_nigt", slow, 8, num_workers=2, verify=True, M=8)
    assert result["cancelled"] > 0 and result["total"]["used"] >= 8 * 8
    assert result["total"]["stale"] < result["total"]["used"]


def test_afedpg_updates_at_every_arrival():
    result = train("afedpg", make_settings(), 9, num_workers=3)
    assert result["total"]["used"] == 18 and result["sent"]["point"] == 3 + 9


@pytest.mark.parametrize("ending", ["absorb", "reset"])
def test_it_learns(ending):
    settings = make_settings(envs_per_worker=8, baseline="leave_one_out", horizon=8, ending=ending)
    result = train("rennala_nigt", settings, 40, num_workers=2, M=32)
    assert np.mean(result["returns"][-5:]) > np.mean(result["returns"][:5]) + 2.0


def test_a_resumed_run_is_bit_equal():
    def cluster(optimizer):
        return GradientCluster(make_settings(), make_policy(), Rennala(8), optimizer, num_workers=2)

    def fresh():
        return NIGT(flat_weights(make_policy()), alpha=0.05)

    whole = fresh()
    with cluster(whole) as running:
        for _ in range(8):
            running.update()
    first, second = fresh(), fresh()
    with cluster(first) as running:
        for _ in range(5):
            running.update()
    second.load_state_dict(first.state_dict())
    with cluster(second) as running:
        for _ in range(3):
            running.update()
    np.testing.assert_array_equal(whole.iterate, second.iterate)
    assert second.updates == 8


def test_the_first_round_has_its_own_M():
    optimizer = NIGT(flat_weights(make_policy()), alpha=0.05)
    with GradientCluster(
        make_settings(), make_policy(), Rennala(4), optimizer, num_workers=1, first_target=10
    ) as cluster:
        used = [cluster.update().aggregate.tally.used for _ in range(3)]
    assert used == [10, 4, 4]


@pytest.mark.parametrize("transport", ["p2p", "allreduce"])
def test_a_wait_that_was_given_up_goes_on(transport):
    results = []
    for patience in (math.inf, 0.0):
        optimizer, asked = NIGT(flat_weights(make_policy()), alpha=0.05), []
        settings = make_settings(transport, compute_s=(0.03, 0.03))
        with GradientCluster(settings, make_policy(), Synchronous(8), optimizer, num_workers=2) as cluster:
            for _ in range(3):
                while not cluster.wait(lambda: asked.append(1) or len(asked) > patience):  # noqa: B023
                    assert optimizer.updates < 3
                update = cluster.update()
                assert update.units.episodes == 8
        results.append(optimizer.iterate)
        assert asked
    np.testing.assert_array_equal(*results)


def test_workers_of_their_own_tasks():
    sources = (EnvSource(Walk, {"goal": 2.0}), EnvSource(Walk, {"goal": -2.0}))
    train("malenia_nigt", make_settings(sources=sources), 4, num_workers=2, verify=True)
    with pytest.raises(ValueError, match="sources must have 1 or 3"):
        train("malenia_nigt", make_settings(sources=sources), 4, num_workers=3)


@pytest.mark.parametrize("transport", ["p2p", "allreduce"])
def test_a_worker_that_only_gives_nan(transport, caplog):
    sources = (EnvSource(Walk), EnvSource(Walk, {"bad": True}))
    settings = make_settings(transport, sources=sources)
    result = train("rennala_nigt", settings, 5, num_workers=2, verify=True)
    assert result["counts"][1] == 0 and set(result["not_finite"]) == {1}
    assert result["total"]["rejected"] >= 10 and np.isfinite(result["iterate"]).all()
    assert "rank 2 (worker, " in caplog.text
    for name in ("malenia_nigt", "sync_nigt"):
        with pytest.raises(WorkerError, match=r"rank 2 .*its last 100 gradients were not finite") as caught:
            train(name, settings, 5, num_workers=2)
        assert caught.value.rank == 2


@pytest.mark.parametrize("name", ["rennala_nigt", "m_sync_nigt", "afedpg"])
def test_a_worker_that_only_gives_nan_stops_nobody_who_can_do_without_it(name):
    sources = (EnvSource(Walk), EnvSource(Walk, {"bad": True}))
    result = train(name, make_settings(sources=sources, horizon=2), 150, num_workers=2, M=4)
    assert result["not_finite"][1] > 200 and result["total"]["used"] >= 150 * 2
    settings = make_settings(sources=sources[1:], horizon=2)
    with pytest.raises(WorkerError, match=r"rank [12] .*its last 100 gradients were not finite"):
        train(name, settings, 5, num_workers=2)


def test_a_gradient_that_is_nan_once_is_asked_for_again():
    calls = []

    class Once(Walk):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            calls.append(1)
            return observation, math.nan if len(calls) == 3 else reward, *rest

    for name in ("sync_nigt", "malenia_nigt", "afedpg"):
        calls.clear()
        result = train(name, make_settings(sources=(EnvSource(Once),)), 5, num_workers=2)
        assert sum(result["not_finite"].values()) == 2 and result["total"]["used"] >= 10


def test_a_broken_environment_is_named():
    sources = (EnvSource(Walk), EnvSource(Walk, {"broken": True}))
    with pytest.raises(WorkerError, match=r"rank 2 \(worker, .*the floor is gone"):
        train("sync_nigt", make_settings(sources=sources), 5, num_workers=2)
    with pytest.raises(WorkerError, match=r"rank 1 .*could not be built"):
        train("sync_nigt", make_settings(sources=(EnvSource(Walk, {"size": 3}),)), 5, num_workers=2)


def test_spaces_that_differ_are_named():
    class Other(Walk):
        observation_space = gym.spaces.Box(-5.0, 10.0, (2,), np.float32)

    with pytest.raises(ClusterError, match=r"the observation_space is .* on rank 2"):
        train("sync_nigt", make_settings(sources=(EnvSource(Walk), EnvSource(Other))), 5, num_workers=2)

    class Continuous(Walk):
        action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    with pytest.raises(WorkerError, match=r"rank 2 .*must have the same spaces, .* worker 1: .*action space"):
        train("sync_nigt", make_settings(sources=(EnvSource(Walk), EnvSource(Continuous))), 5, num_workers=2)


def test_silence_of_a_needed_worker_is_an_error_that_names_it():
    optimizer = NIGT(flat_weights(make_policy()), alpha=0.05)
    settings = make_settings(timeout_s=0.3)
    cluster = GradientCluster(settings, make_policy(), Malenia(4), optimizer, num_workers=2)
    cluster.update()
    del cluster.channel._hub._workers[2]  # it is gone, and says nothing
    with pytest.raises(SilenceError, match=r"rank 2 \(worker, .*no sign of life for 0.3 s"):
        cluster.update()
        cluster.update()
    with pytest.raises(ClusterError, match="after close"):
        cluster.update()
    optimizer = NIGT(flat_weights(make_policy()), alpha=0.05)
    cluster = GradientCluster(settings, make_policy(), Rennala(4), optimizer, num_workers=2)
    del cluster.channel._hub._workers[2]
    for _ in range(20):
        assert cluster.update().aggregate.counts[1] <= 2


def test_a_worker_whose_part_of_the_sum_is_missing_is_named():
    optimizer = NIGT(flat_weights(make_policy()), alpha=0.05)
    settings = make_settings(timeout_s=0.3, transport="allreduce")
    cluster = GradientCluster(settings, make_policy(), Rennala(4), optimizer, num_workers=2)
    cluster.update()
    del cluster.channel._hub._workers[2]
    with pytest.raises(SilenceError, match=r"rank 2 \(worker, .*no sign of life .*contributing to the sum"):
        for _ in range(20):
            cluster.update()


def test_bad_input_is_named():
    policy = make_policy()

    def optimizer(size=None, **more):
        return NIGT(flat_weights(policy)[:size], alpha=0.1, **more)

    cases = [
        (lambda: make_settings(horizon=0), "horizon"),
        (lambda: make_settings(horizon=-1), "horizon"),
        (lambda: make_settings(gamma=0.0), "gamma"),
        (lambda: make_settings(envs_per_worker=0), "envs_per_worker"),
        (lambda: make_settings("tcp"), "transport"),
        (lambda: make_settings(ending="stop"), "ending"),
        (lambda: make_settings(baseline="value"), "baseline"),
        (lambda: make_settings(baseline="leave_one_out", envs_per_worker=1), "at least 2"),
        (lambda: make_settings(compute_s=(-1.0,)), "compute_s"),
        (lambda: make_settings(communication_s=(math.nan,)), "communication_s"),
        (lambda: make_settings(timeout_s=0.0), "timeout_s"),
        (lambda: make_settings(seed=-1), "seed"),
        (lambda: make_settings(sources=()), "sources"),
        (lambda: GradientCluster(make_settings(), policy, Rennala(2), optimizer(5)), "policy's"),
        (lambda: GradientCluster(make_settings(), policy, Rennala(2), optimizer(dtype=np.float64)), "float32"),
        (lambda: GradientCluster(make_settings("allreduce"), policy, PerArrival(), optimizer()), "all-reduce"),
        (lambda: GradientCluster(make_settings(), policy, Rennala(2), optimizer(), num_workers=0), "num_workers"),
        (lambda: GradientCluster(make_settings(), policy, MSynchronous(2, 2), optimizer()), "m must be at most"),
        (lambda: train("sync_nigt", make_settings(compute_s=(0.1, 0.2)), 1, num_workers=1), "compute_s must"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(WorkerError, match="PolicyError"):
        wrong = torch.nn.Linear(2, 7)
        GradientCluster(make_settings(), wrong, Rennala(2), NIGT(flat_weights(wrong), alpha=0.1))
