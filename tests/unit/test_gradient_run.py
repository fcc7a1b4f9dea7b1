"""The gradient methods as a user runs them: configuration, counters, resume, unlike tasks, workers that give NaN."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gradient_ranks import Walk

from clusterenv_hpc import cli
from clusterenv_hpc.gradients.aggregators import Malenia, MSynchronous, PerArrival, Rennala, Synchronous
from clusterenv_hpc.gradients.methods import METHODS
from clusterenv_hpc.gradients.nigt import NIGT, Ascent
from clusterenv_hpc.gradients.simulation_settings import parse
from clusterenv_hpc.policies import flat_weights
from clusterenv_hpc.run import start
from clusterenv_hpc.run.build import build_policy
from clusterenv_hpc.run.checkpoint import CheckpointStore, read
from clusterenv_hpc.run.config import ConfigError, compose, config_hash
from clusterenv_hpc.run.gradient_run import GradientRun, build_method, gradient_settings, make_cluster
from clusterenv_hpc.run.run_dir import run_name
from clusterenv_hpc.run.tasks import task_of, tasks_of

SMALL = [
    "env.id=gradient_ranks:Walk", "workers=0", "logical_workers=2", "envs_per_worker=2", "algo.horizon=5",
    "policy.hidden=[8]", "eval.episodes=0", "log.progress=none", "log.tensorboard=false", "run_dir=a",
]  # fmt: skip
DRAWN = ("return", "lag", "steps_per_s", "direction", "gradients", "dropped")
CLOCK = {"wall_s", "steps_per_s", "idle_share", "last_rank"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)


def train(algo: str, *words: str) -> int:
    rule = [] if algo == "afedpg" else ["algo.M=8"]
    return cli.main(["train", f"algo={algo}", *SMALL, *rule, *words])


def summary(run: str = "a") -> dict[str, Any]:
    return json.loads(Path(run, "summary.json").read_text())


def metrics(run: str = "a") -> list[dict[str, Any]]:
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in one.items() if name not in CLOCK} for one in records]


def checkpoint(run: str = "a") -> dict[str, Any]:
    return read(CheckpointStore(Path(run, "checkpoints"), 1).paths()[-1])["learner"]


# -- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", METHODS)
def test_every_method_leaves_what_a_run_promises(algo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(algo, "total_steps=300", "eval.episodes=2", "eval.max_steps=5") == 0
    told, lines = summary(), metrics()
    assert (told["env_id"], told["algo"], told["sync"]) == ("gradient_ranks:Walk", algo, None)
    assert told["exit_reason"] == "completed" and told["eval_episodes"] == 2
    assert told["env_steps"] == lines[-1]["env_steps"] >= 300 and told["updates"] == len(lines)
    assert told["gradients_used"] == sum(line["used"] for line in lines) == sum(sum(line["counts"]) for line in lines)
    assert told["gradients_dropped"] == told["gradients_stale"] + told["gradients_rejected"]
    assert sum(told["shares"]) == pytest.approx(1.0) and len(told["shares"]) == 2
    per_update = 2 if algo == "afedpg" else 8
    assert all(per_update <= line["used"] < per_update + 2 for line in lines)
    assert all(line["direction_norm"] > 0 and line["moved"] for line in lines)
    assert told["gradient_messages"] > 0 and told["weight_messages"] >= len(lines)
    # A checkpoint holds the iterate twice: as the policy, for evaluations, and in the optimizer.
    config = compose([f"algo={algo}", *SMALL])
    policy = build_policy(config.policy, Walk.observation_space, Walk.action_space, 0, config.algo)
    policy.load_state_dict(checkpoint()["policy"])
    np.testing.assert_array_equal(flat_weights(policy), checkpoint()["optimizer"]["theta"].numpy().astype(np.float32))
    assert cli.main(["eval", "a", "episodes=1", "max_steps=3"]) == 0
    assert "gradients used" in capsys.readouterr().out
    if algo == "rennala_nigt":
        assert cli.main(["plot", "a"]) == 0
        names = {path.name for path in Path("a").glob("*.png")}
        assert names == {f"{name}.png" for name in DRAWN}


def test_a_resumed_run_knows_its_own_algorithms_keys() -> None:
    assert train("rennala_nigt", "total_steps=200") == 0
    config: Any = start.asked(["run_dir=a", "resume=true", "algo.M=3"])
    assert (config.algo.name, config.algo.M) == ("rennala_nigt", 3)


@pytest.mark.parametrize("transport", ["p2p", "allreduce"])
def test_a_resumed_run_is_bit_equal_where_counts_do_not_depend_on_timing(transport: str) -> None:
    words = ["algo.M_init=16", "algo.alpha_schedule=power", f"gradients.transport={transport}"]
    assert train("sync_nigt", *words, "total_steps=400", "run_dir=whole") == 0
    assert train("sync_nigt", *words, "total_steps=200") == 0
    first = len(metrics())
    assert cli.main(["train", "run_dir=a", "resume=true", "total_steps=400"]) == 0
    assert 1 < first < len(metrics()) == len(metrics("whole"))
    wire = {"weight_messages", "weight_bytes", "gradient_messages", "gradient_bytes", "control_bytes"}
    for one, other in zip(metrics(), metrics("whole"), strict=True):
        assert {k: v for k, v in one.items() if k not in wire} == {k: v for k, v in other.items() if k not in wire}
    one, other = (checkpoint(run)["optimizer"] for run in ("a", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert metrics()[0]["used"] == 16 and summary()["resumed_from"] == f"update-{first:09d}.pt"


@pytest.mark.parametrize(
    ("algo", "transport"),
    [(algo, by) for algo in METHODS for by in ("p2p", "allreduce") if (algo, by) != ("afedpg", "allreduce")],
)
def test_with_one_worker_every_resumed_run_is_bit_equal(algo: str, transport: str) -> None:
    words = [f"gradients.transport={transport}", "logical_workers=1", "checkpoint.every_s=1000"]
    assert train(algo, *words, "total_steps=400", "run_dir=whole") == 0
    assert train(algo, *words, "total_steps=150") == 0
    assert cli.main(["train", "run_dir=a", "resume=true", "total_steps=400"]) == 0
    assert summary()["resumed_from"] and summary()["updates"] == summary("whole")["updates"]
    one, other = (checkpoint(run)["optimizer"] for run in ("a", "whole"))
    assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in other)


def test_both_transports_give_the_same_run() -> None:
    for transport in ("p2p", "allreduce"):
        assert train("sync_nigt", f"gradients.transport={transport}", "total_steps=300", f"run_dir={transport}") == 0
    one, other = (checkpoint(transport)["optimizer"]["theta"] for transport in ("p2p", "allreduce"))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_worker_that_gives_nan_is_named_dropped_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env.per_worker=[{},{kwargs:{bad:true}}]", "total_steps=300"]
    assert train("rennala_nigt", *words) == 0
    told, seen = summary(), capsys.readouterr()
    assert told["not_finite"][0] == 0 and told["not_finite"][1] > 0
    assert told["shares"] == [1.0, 0.0] and told["gradients_rejected"] >= told["not_finite"][1]
    assert "warning: rank 2 (worker, " in seen.err and "not finite" in seen.err
    assert f"rank 2 gave {told['not_finite'][1]} gradients that were not finite" in seen.out
    assert "not finite" in Path("a/log.txt").read_text()
    assert train("malenia_nigt", *words, "run_dir=b") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("clusterenv-hpc: rank 2 (worker, ") and "gradients were not finite" in line
    assert summary("b")["exit_reason"].startswith("failed: rank 2")


def test_unlike_tasks_are_each_workers_own_and_all_are_judged() -> None:
    words = ["env.per_worker=[{kwargs:{goal:2.0}},{kwargs:{goal:-2.0}}]", "total_steps=300"]
    assert train("malenia_nigt", *words, "eval.episodes=3", "eval.max_steps=4") == 0
    told = summary()
    assert told["eval_episodes"] == 6 and len(told["eval_return_by_task"]) == 2
    assert told["eval_return_mean"] == pytest.approx(np.mean(told["eval_return_by_task"]))
    assert all(len(line["returns_by_worker"]) == 2 for line in metrics())


def test_a_worker_that_fails_ends_the_run_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("sync_nigt", "env.per_worker=[{},{kwargs:{broken:true}}]", "total_steps=300") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "rank 2 (worker, " in line and "the floor is gone" in line


@pytest.mark.parametrize("transport", ["p2p", "allreduce"])
@pytest.mark.parametrize(("algo", "word"), [("rennala_pg", "algo.alpha=1e300"), ("malenia_nigt", "algo.eta=1e-300")])
def test_weights_that_diverge_are_not_blamed_on_the_workers(
    algo: str, word: str, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(algo, word, f"gradients.transport={transport}", "total_steps=3000") == 1
    told = capsys.readouterr().err
    assert "does not fit into float32" in told and "choose a smaller alpha" in told
    assert "not finite" not in told and "Error" not in told.splitlines()[-1]
    states = [read(path)["learner"]["policy"] for path in CheckpointStore(Path("a", "checkpoints"), 1).paths()]
    assert all(tensor.isfinite().all() for state in states for tensor in state.values())


class Rich(Walk):
    def step(self, action: Any) -> Any:
        return self._seen(), 1e200, False, False, {}


@pytest.mark.filterwarnings("error")
def test_returns_whose_squares_overflow_end_nothing() -> None:
    """All alike, so that the baseline leaves a gradient of zero, which moves nothing."""
    assert train("rennala_nigt", f"env.id={__name__}:Rich", "total_steps=100") == 0
    assert summary()["return_mean"] == pytest.approx(5e200) and not any(one["moved"] for one in metrics())


def test_the_clock_starts_with_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranks of their own the workers are at it before the first line is written."""
    monkeypatch.setattr(GradientRun, "opening", lambda self, device: time.sleep(0.3) or "")
    assert train("sync_nigt", "total_steps=100") == 0
    walls = [json.loads(line)["wall_s"] for line in Path("a", "metrics.jsonl").read_text().splitlines()]
    assert walls[0] >= 0.3 and walls == sorted(walls)


@pytest.mark.parametrize("transport", ["p2p", "allreduce"])
def test_a_signal_does_not_wait_for_the_end_of_a_round(transport: str) -> None:
    """A round of a million trajectories is given up, and the run saved as it was before."""
    words = [f"gradients.transport={transport}"]
    assert train("rennala_nigt", *words, "total_steps=200") == 0
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        began, first = time.monotonic(), summary()["updates"]
        more = ["algo=rennala_nigt", "algo.M=1000000", "total_steps=100000000"]
        assert cli.main(["train", "run_dir=a", "resume=true", *more]) == 143 and time.monotonic() < began + 10
    finally:
        timer.cancel()
    told = summary()
    assert told["exit_reason"] == "SIGTERM" and told["updates"] == first


# -- the death of a worker -------------------------------------------------------------------------------------------


def cluster_without(algo: str, *words: str) -> Any:
    """Two workers, of which the second has died after the first update, over a transport that survives that."""
    config = compose([f"algo={algo}", *SMALL, *([] if algo == "afedpg" else ["algo.M=8"]), *words])
    config = dataclasses.replace(config, on_worker_loss="continue", timeout=60.0)
    policy = build_policy(config.policy, Walk.observation_space, Walk.action_space, 0, config.algo)
    cluster = make_cluster(config, policy, None, None)
    cluster.update()
    del cluster.channel._hub._workers[2]
    cluster.channel.lost = frozenset({2})
    return cluster


@pytest.mark.parametrize("algo", ["rennala_nigt", "rennala_pg", "m_sync_nigt", "afedpg"])
def test_first_come_rules_go_on_without_a_worker_that_died(algo: str) -> None:
    cluster = cluster_without(algo)
    updates = [cluster.update() for _ in range(6)]
    assert cluster.lost == [1] and all(update.aggregate.counts[1] == 0 for update in updates[2:])
    cluster.close()


@pytest.mark.parametrize("algo", ["malenia_nigt", "sync_nigt"])
def test_rules_that_need_everyone_say_who_died(algo: str) -> None:
    cluster = cluster_without(algo)
    with pytest.raises(Exception, match=r"rank 2 \(worker, .*is dead while computing gradients.* are needed"):
        for _ in range(3):
            cluster.update()


def test_a_sum_over_all_ranks_cannot_lose_one() -> None:
    cluster = cluster_without("rennala_nigt", "gradients.transport=allreduce")
    with pytest.raises(Exception, match=r"rank 2 .* is dead .*transport=allreduce"):
        for _ in range(3):
            cluster.update()


# -- configuration ---------------------------------------------------------------------------------------------------

BAD = [
    ("algo=rennala_nigt algo.M=0", "algo.M=0: allowed: an integer >= 1"),
    ("algo=malenia_nigt algo.M=-3", "algo.M=-3: allowed: an integer >= 1"),
    ("algo=rennala_nigt algo.M=2.5", "algo.M=2.5: allowed: an integer"),
    (
        "algo=sync_nigt algo.M=1e30",
        "algo.M=1000000000000000019884624838656: allowed: an integer >= 1 and <= 2147483647",
    ),
    ("algo=rennala_nigt algo.M_init=0", "algo.M_init=0: allowed: an integer >= 1"),
    ("algo=rennala_nigt algo.eta=0", "algo.eta=0.0: allowed: a finite number > 0 and <= 1"),
    ("algo=sync_nigt algo.eta=1.01", "algo.eta=1.01: allowed: a finite number > 0 and <= 1"),
    ("algo=afedpg algo.eta=nan", "algo.eta=nan: allowed"),
    ("algo=rennala_nigt algo.alpha=0", "algo.alpha=0.0: allowed: a finite number > 0"),
    ("algo=rennala_pg algo.alpha=-1", "algo.alpha=-1.0: allowed: a finite number > 0"),
    ("algo=rennala_nigt algo.horizon=0", "algo.horizon=0: allowed: an integer >= 1"),
    ("algo=rennala_nigt algo.gamma=0", "algo.gamma=0.0: allowed: a finite number > 0 and <= 1"),
    ("algo=rennala_nigt algo.ending=stop", "algo.ending=stop: allowed: absorb, reset"),
    ("algo=rennala_nigt algo.baseline=value", "algo.baseline=value: allowed: leave_one_out, none"),
    ("algo=rennala_nigt envs_per_worker=1", "algo.baseline=leave_one_out: allowed: none, or envs_per_worker"),
    ("algo=m_sync_nigt algo.m=0", "algo.m=0: allowed: an integer >= 1"),
    ("algo=m_sync_nigt algo.m=4 workers=3", "algo.m=4: allowed: at most the number of workers, 3"),
    ("algo=rennala_pg algo.eta=0.1", "algo.eta=0.1: no such key"),
    ("algo=afedpg algo.M=3", "algo.M=3: no such key"),
    ("algo=rennala_nigt gradients.transport=tcp", "gradients.transport=tcp: allowed: p2p, allreduce"),
    ("algo=afedpg gradients.transport=allreduce", "gradients.transport=allreduce: algo=afedpg"),
    ("algo=ppo gradients.transport=allreduce", "gradients: algo=ppo sends no gradients"),
    ("algo=ppo env.per_worker=[{},{}]", "env.per_worker: algo=ppo has the same environment on every worker"),
    ("algo=malenia_nigt workers=3 env.per_worker=[{},{}]", "env.per_worker: 2 entries; allowed: one for each of 3"),
    ("algo=malenia_nigt env.per_worker=[{goal:1},{}]", "env.per_worker: {'goal': 1}: allowed: some of"),
    ("algo=malenia_nigt env.per_worker=[{kwargs:3},{}]", "env.per_worker: {'kwargs': 3}: allowed"),
    ("algo=malenia_nigt env.per_worker=[3,{}]", "env.per_worker: 3: allowed"),
    ("algo=malenia_nigt env.per_worker=[{id:Nope-v0},{}]", "env.id=Nope-v0: no such environment"),
    ("algo=rennala_nigt gradients.communication.scheme=list", "gradients.communication.values=[]: allowed"),
    ("algo=rennala_nigt gradients.communication.seconds=-1", "gradients.communication.seconds=-1.0"),
    ("algo=rennala_nigt env.backend=sync env.on_error=restart", "env.on_error=restart: algo=rennala_nigt"),
]


@pytest.mark.parametrize(("words", "part"), BAD)
def test_what_cannot_be_is_one_line(words: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["env=cartpole", *words.split()])
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_configuration_becomes_a_rule_and_an_optimizer() -> None:
    kinds = {
        "rennala_nigt": (Rennala, NIGT), "malenia_nigt": (Malenia, NIGT), "sync_nigt": (Synchronous, NIGT),
        "m_sync_nigt": (MSynchronous, NIGT), "rennala_pg": (Rennala, Ascent), "afedpg": (PerArrival, NIGT),
    }  # fmt: skip
    for algo, (rule, optimizer) in kinds.items():
        method = build_method(compose(["env=cartpole", f"algo={algo}", "algo.alpha=0.25"]))
        assert type(method.aggregator(2)) is rule and type(made := method.optimizer(np.zeros(3))) is optimizer
        assert made.alpha == 0.25
    method = build_method(compose(["env=cartpole", "algo=m_sync_nigt", "algo.m=2", "algo.M=9", "algo.eta=0.5"]))
    assert (method.aggregator(2).m, method.M, method.eta) == (2, 9, 0.5)  # type: ignore[attr-defined]


def test_steps_follow_their_schedule() -> None:
    words = ["env=cartpole", "algo=rennala_nigt", "algo.alpha=0.4", "algo.M=10", "algo.horizon=100", "total_steps=1e4"]
    falling = build_method(compose([*words, "algo.alpha_schedule=linear"])).alpha
    assert callable(falling)
    assert [falling(t) for t in (0, 5, 10, 50)] == pytest.approx([0.4, 0.202, 0.004, 0.004])
    power = build_method(compose([*words, "algo.alpha_schedule=power", "algo.alpha_power=1"])).alpha
    assert callable(power) and [power(t) for t in (0, 1, 3)] == pytest.approx([0.4, 0.2, 0.1])


def test_delays_are_by_worker() -> None:
    words = "env=cartpole algo=rennala_nigt algo.horizon=100 workers=4 env.delay.scheme=sqrt env.delay.seconds=0.01"
    more = "gradients.communication.scheme=list gradients.communication.values=[1,2,3,4]"
    settings = gradient_settings(compose([*words.split(), *more.split()]))
    assert settings.compute_s == pytest.approx([1.0, 2**0.5, 3**0.5, 2.0])
    assert settings.communication_s == (1.0, 2.0, 3.0, 4.0)
    assert all(source.delay.scheme == "none" for source in settings.sources)
    assert gradient_settings(compose(["env=cartpole", "algo=rennala_nigt"])).compute_s == ()


def test_tasks() -> None:
    words = ["env=cartpole", "env.kwargs={a:1}", "algo=malenia_nigt", "workers=3"]
    config = compose([*words, "env.per_worker=[{kwargs:{b:2}},{},{kwargs:{b:2}}]"])
    assert [task_of(config.env, worker).kwargs for worker in range(3)] == [{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}]
    assert [task.kwargs for task in tasks_of(config.env)] == [{"a": 1, "b": 2}, {"a": 1}]
    assert tasks_of(compose(words).env) == [compose(words).env]


def test_names_and_hashes_tell_transports_apart() -> None:
    one = compose(["env=cartpole", "algo=rennala_nigt"])
    other = compose(["env=cartpole", "algo=rennala_nigt", "gradients.transport=allreduce"])
    assert run_name(one) == "cartpole-rennala_nigt-p2p-s1" and run_name(other) == "cartpole-rennala_nigt-allreduce-s1"
    assert config_hash(one) != config_hash(other)


def test_actions_are_squashed_unless_told_otherwise() -> None:
    box, wide = (gymnasium.spaces.Box(-limit, limit, (2,)) for limit in (1.0, np.inf))
    for words, space, squash in (
        (["algo=rennala_nigt"], box, "tanh"),
        (["algo=rennala_nigt"], wide, "clip"),
        (["algo=rennala_nigt", "policy.squash=clip"], box, "clip"),
        (["algo=ppo"], box, "clip"),
        (["algo=ppo", "policy.squash=tanh"], box, "tanh"),
    ):
        config = compose(["env=pendulum", *words])
        policy = build_policy(config.policy, box, space, 0, config.algo)
        assert policy.distribution.squash == squash, words  # type: ignore[union-attr]


def test_the_methods_of_the_simulator_are_those_of_train() -> None:
    assert set(parse([]).methods) <= set(METHODS)
    assert cli.COMMANDS["simulate"].target == "clusterenv_hpc.gradients.simulate:main"
