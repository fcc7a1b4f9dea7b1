"""Every environment of conf/env is started: a few steps, an update, an evaluation."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from clusterenv_hpc import cli
from clusterenv_hpc.run.config import ConfigError, choices, compose

WANTS = {
    **dict.fromkeys(["halfcheetah", "hopper", "walker2d", "humanoid", "reacher"], "mujoco"),
    "atari": "atari",
    "atari_envpool": "envpool",
    "minigrid": "minigrid",
}
"""The package that a configuration needs beyond a bare installation."""

NAMED = {"custom": ["env.id=toy_envs:Walk"]}
"""What a configuration wants to be told."""

SMALL = (
    "algo=ppo workers=0 logical_workers=2 envs_per_worker=2 algo.num_steps=16 algo.minibatch_size=16 threads=1 seed=4 "
    "algo.epochs=1 policy.hidden=[8] eval.episodes=2 eval.max_steps=9 log.progress=none log.tensorboard=false"
)


def configs() -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.needs(WANTS[name])] if name in WANTS else []) for name in choices("env")
    ]


@pytest.mark.parametrize("name", configs())
def test_it_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    steps = 60 if name.startswith("atari") else 200  # large images are slow to learn from
    words = [f"env={name}", *NAMED.get(name, []), *SMALL.split(), f"total_steps={steps}", "run_dir=run"]
    assert cli.main(["train", *words]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["env_steps"] == steps and summary["exit_reason"] == "completed"
    assert summary["eval_episodes"] == 2
    assert cli.main(["eval", "run", "episodes=1", "max_steps=5"]) == 0, "from the stored configuration alone"


@pytest.mark.parametrize("word", [f"{group}={name}" for group in ("sync", "policy") for name in choices(group)])
def test_every_rule_and_every_policy_trains(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["env=catch", *SMALL.replace("policy.hidden=[8] ", "").split(), word, "total_steps=200", "run_dir=run"]
    assert cli.main(["train", *words]) == 0
    assert json.loads(Path("run/summary.json").read_text())["env_steps"] == 200


def test_the_list_is_not_empty() -> None:
    assert {"cartpole", "lunarlander", "atari", "humanoid", "catch", "custom"} <= set(choices("env"))


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("env.on_error=restart env=cartpole", "env.on_error=restart: env.backend=vector has no single environments"),
        ("env=catch env.wrappers=[gymnasium.wrappers:FlattenObservation]", "env.wrappers: env.backend=vector"),
        ("env.wrappers=[nonsense]", "env.wrappers: nonsense: no such thing; allowed: module:Class"),
        ("env.wrappers=[gymnasium.wrappers:Nonsense]", "env.wrappers: gymnasium.wrappers:Nonsense: no such thing"),
        ("env.wrappers=[no_such_module:Wrap]", "env.wrappers: no_such_module:Wrap: cannot import no_such_module"),
        ("env.wrappers=[gymnasium:__version__]", "gymnasium:__version__ is no class or function"),
        ("env.wrappers=[{wrap:x}]", "allowed: module:Class, or {wrapper: module:Class, kwargs: {...}}"),
        ("env.wrappers=[3]", "allowed: module:Class"),
        ("env.delay.scheme=slow", "env.delay.scheme=slow: allowed: none, equal, sqrt, linear, straggler, list"),
        ("env.delay.seconds=-1", "env.delay.seconds=-1"),
        ("env.delay.scheme=list", "env.delay.values=[]: allowed"),
        ("env.delay.values=[1,2]", "env.delay.values=[1.0, 2.0]: allowed"),
        ("env.delay.scheme=list env.delay.values=[1,-2] workers=2", "allowed: seconds >= 0 for each worker"),
        ("env.delay.scheme=list env.delay.values=[1,2] workers=3", "2 values; allowed: one for each of 3 workers"),
        ("env.max_restarts=-1", "env.max_restarts=-1: allowed: an integer >= 0"),
        ("env.id=no_such_module:Env-v0", "cannot import no_such_module: No module named 'no_such_module'; is it inst"),
        ("env.id=toy_envs:Nothing", "env.id=toy_envs:Nothing: no such environment"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words.split())
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env", "extra"),
    [("minigrid", "minigrid"), ("atari", "atari"), ("hopper", "mujoco"), ("atari_envpool", "envpool")],
)
def test_a_missing_package_names_its_extra(env: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find, load = importlib.util.find_spec, importlib.import_module
    missing = ("minigrid", "ale_py", "mujoco", "envpool")

    def import_module(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return load(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in missing else find(name, *a))
    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ConfigError, match=rf"pip install 'clusterenv_hpc\[{extra}\]'"):
        compose([f"env={env}"])
