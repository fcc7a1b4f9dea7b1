"""Every algorithm of conf/algo, and every recipe, is run as a user would: trained, evaluated, resumed, repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clusterenv_hpc import cli
from clusterenv_hpc.run.build import build_policy, spaces_of
from clusterenv_hpc.run.checkpoint import CheckpointStore, read
from clusterenv_hpc.run.config import ConfigError, choices, compose, conf_dir
from clusterenv_hpc.run.schema import VARIANTS

CLOCK = {"wall_s", "steps_per_s", "collect_s", "learn_s", "idle_share"}
CONTINUOUS = {"sac", "td3"}
REPLAYING = {"dqn", "sac", "td3"}
SMALL = [
    "workers=0", "logical_workers=2", "envs_per_worker=3", "total_steps=240", "algo.num_steps=8", "policy.hidden=[8]",
    "eval.episodes=2", "eval.max_steps=20", "log.progress=none", "log.tensorboard=false", "seed=4",
]  # fmt: skip
REPLAY = ["algo.batch_size=8", "algo.learning_starts=50", "algo.samples_per_step=0.5"]
OWN = {
    "ppo": ["algo.minibatch_size=16", "algo.epochs=1"],
    "appo": ["algo.minibatch_size=16", "algo.epochs=1"],
    "vtrace": ["algo.minibatch_size=16"],
    "dqn": REPLAY,
    "sac": [*REPLAY, "algo.critic_hidden=8"],
    "td3": [*REPLAY, "algo.critic_hidden=8"],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)


def words_for(algo: str, *more: str) -> list[str]:
    return [f"algo={algo}", f"env={'pendulum' if algo in CONTINUOUS else 'cartpole'}", *SMALL, *OWN[algo], *more]


def metrics(run: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in one.items() if name not in CLOCK} for one in records]


def weights(run: str) -> torch.Tensor:
    state = read(CheckpointStore(Path(run, "checkpoints"), 1).paths()[-1])
    return torch.cat([tensor.reshape(-1) for tensor in state["learner"]["policy"].values()])


@pytest.mark.parametrize("algo", OWN)
def test_it_trains_the_same_twice_and_is_evaluated(algo: str) -> None:
    for run in ("one", "two"):
        assert cli.main(["train", *words_for(algo), f"run_dir={run}"]) == 0
    told = json.loads(Path("one/summary.json").read_text())
    assert (told["algo"], told["env_steps"], told["exit_reason"]) == (algo, 240, "completed")
    assert told["eval_episodes"] == 2 and 0 <= told["idle_share"] <= 1
    by_rank = told["env_steps_by_rank_since_start"]
    assert set(by_rank) == {"1", "2"} and sum(by_rank.values()) >= 240 and min(by_rank.values()) > 0
    lines = metrics("one")
    assert lines == metrics("two")
    assert torch.equal(weights("one"), weights("two"))
    assert all(0 <= line["waiting"] <= 4 for line in lines)  # two receives for each of two workers bound what waits
    learned = [line for line in lines if line.get("gradient_steps", 1)]
    assert learned and all(
        np.isfinite(value) for line in learned for value in line.values() if isinstance(value, float)
    )
    assert cli.main(["eval", "one", "episodes=1", "max_steps=5"]) == 0, "from the stored configuration alone"


@pytest.mark.parametrize("algo", OWN)
def test_it_goes_on_from_a_checkpoint(algo: str) -> None:
    assert cli.main(["train", *words_for(algo), "run_dir=run"]) == 0
    before = metrics("run")
    assert cli.main(["train", "run_dir=run", "resume=true", "total_steps=360", "log.progress=none"]) == 0
    told, after = json.loads(Path("run/summary.json").read_text()), metrics("run")
    assert told["env_steps"] == 360 and told["resumed_from"] is not None
    assert after[: len(before)] == before and len(after) > len(before)
    assert after[len(before)]["version"] > before[-1]["version"]
    if algo in REPLAYING:
        assert after[len(before)]["replay_size"] > before[-1]["replay_size"]


@pytest.mark.parametrize("changed", ["logical_workers=3", "algo.capacity=5000"])
def test_a_replay_of_another_shape_is_filled_anew(changed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *words_for("dqn"), "run_dir=run"]) == 0
    before = metrics("run")
    assert cli.main(["train", "run_dir=run", "resume=true", "total_steps=360", "log.progress=none", changed]) == 0
    told = capsys.readouterr()
    assert "the saved replay is of" in told.out + told.err and "filled anew" in told.out + told.err
    after = metrics("run")
    assert after[-1]["env_steps"] == 360 and after[len(before)]["replay_size"] < before[-1]["replay_size"]


def test_an_update_larger_than_the_run_is_not_waited_for() -> None:
    """It would hold more and more rollouts in memory, and hear no signal."""
    assert cli.main(["train", *words_for("vtrace", "algo.rollouts_per_update=1000000"), "run_dir=run"]) == 0
    (only,) = metrics("run")
    assert only["env_steps"] == 240


def test_a_run_that_ends_before_learning_begins_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *words_for("dqn", "algo.learning_starts=1000"), "run_dir=run"]) == 0
    assert "algo.learning_starts=1000 is above total_steps=240: no learning" in capsys.readouterr().err


RECIPES = sorted(path.stem for path in (conf_dir() / "recipe").glob("*.yaml") if path.stem.rpartition("_")[2] in OWN)
MUJOCO = ("halfcheetah", "hopper", "walker2d", "humanoid", "reacher")


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.needs("mujoco")] * name.startswith(MUJOCO)) for name in RECIPES]
)
def test_every_recipe_starts(recipe: str) -> None:
    env, algo = recipe.rsplit("_", 1)
    few = ["total_steps=1500", "workers=0", "eval.episodes=1", "eval.max_steps=10", "log.progress=none"]
    replay = ["algo.learning_starts=500", "algo.batch_size=32", "algo.samples_per_step=0.2"]
    words = [f"env={env}", f"algo={algo}", *few, *(replay if algo in REPLAYING else []), "log.tensorboard=false"]
    assert compose([f"env={env}", f"algo={algo}"]) != compose([f"env={env}", f"algo={algo}", "seed=2"])
    assert cli.main(["train", *words, "run_dir=run"]) == 0
    assert metrics("run")[-1]["env_steps"] == 1500


def test_each_algorithm_has_a_configuration_of_its_own_kind() -> None:
    for name in OWN:
        assert name in choices("algo")
        assert VARIANTS["algo"][1][name]().name == name == compose([f"algo={name}"]).algo.name


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("algo=dqn env=pendulum", "algo=dqn: action values need a Discrete action space"),
        ("algo=sac env=cartpole", "algo=sac: continuous actions need a Box with finite bounds"),
        ("algo=td3 env=cartpole", "algo=td3: continuous actions need a Box"),
    ],
)
def test_actions_that_an_algorithm_cannot_take_are_named(words: str, part: str) -> None:
    config = compose(words.split())
    with pytest.raises(ConfigError, match=part):
        build_policy(config.policy, *spaces_of(config.env), 1, config.algo)
    assert cli.main(["train", *words.split(), "workers=0", "run_dir=run"]) == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            "algo=dqn envs_per_worker=16 algo.num_steps=16 algo.learning_starts=100 algo.capacity=500",
            "algo.capacity=500: allowed: at least 1088, for 32 environments",
        ),
        ("algo=dqn algo.learning_starts=200000", "algo.learning_starts=200000: allowed: at most algo.capacity=100000"),
        (
            "algo=appo envs_per_worker=16 algo.num_steps=64 algo.rollouts_per_update=1 algo.minibatch_size=3000",
            "at most the batch, 1024 = 1 x 16 environments x algo.num_steps=64",
        ),
        ("algo=vtrace algo.rollouts_per_update=0", "algo.rollouts_per_update=0: allowed: an integer >= 1"),
        ("algo=vtrace algo.clip=0.2", "algo.clip=0.2: no such key"),
        ("algo=dqn algo.samples_per_step=1e9", "algo.samples_per_step=1000000000.0: allowed: a finite number > 0"),
        ("algo=sac algo.tau=0", "algo.tau=0.0: allowed: a finite number > 0"),
        ("algo=vtrac", "algo=vtrac: no such choice; did you mean vtrace?"),
    ],
)
def test_a_mistake_names_what_is_allowed(words: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["env=cartpole" if "sac" not in words else "env=pendulum", *words.split()])
    assert part in str(caught.value)
