"""From the command line to a typed configuration: what is accepted, what it comes to, and how a mistake is told."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from clusterenv_hpc.learners import PPOConfig
from clusterenv_hpc.run.build import build_learner, build_policy, build_sync
from clusterenv_hpc.run.config import (
    GROUPS,
    ConfigError,
    choices,
    compose,
    conf_dir,
    config_hash,
    load,
    resume,
    to_yaml,
    with_values,
)
from clusterenv_hpc.run.schema import APSSync, Config, PPOAlgo
from clusterenv_hpc.sync import APS, Always, EveryK, Never


def store(config: Config, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config))
    return path


# -- what a command line comes to ----------------------------------------------------------------------------------


def test_every_choice_of_every_group_composes() -> None:
    for group in GROUPS:
        for choice in choices(group):
            words = [f"{group}={choice}"] + (["env.id=CartPole-v1"] if choice == "custom" else [])
            compose(words)


def test_the_defaults_are_a_whole_run() -> None:
    config = compose()
    assert (config.env.id, config.algo.name, config.sync.rule) == ("LunarLander-v3", "ppo", "aps")
    assert isinstance(config.algo, PPOAlgo) and isinstance(config.sync, APSSync)
    assert config.workers is None and config.worker_count == 2


def test_the_environment_brings_what_its_algorithm_wants_and_the_command_line_wins() -> None:
    plain = PPOAlgo()
    tuned = compose(["env=cartpole"])
    assert tuned.algo != plain, "conf/recipe/cartpole_ppo.yaml is not read"
    assert compose(["env=custom", "env.id=CartPole-v1"]).algo == plain
    assert compose(["env=cartpole", "algo.learning_rate=0.5"]).algo.learning_rate == 0.5
    assert compose(["algo.learning_rate=0.5", "env=cartpole"]).algo.learning_rate == 0.5  # in any order
    assert compose(["env=cartpole", "total_steps=77", "envs_per_worker=500"]).total_steps == 77


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["env=cartpole", "env=taxi"], "env.id", "Taxi-v4"),  # make train ARGS=env=taxi comes after its own env=
        (["seed=1", "seed=2"], "seed", 2),
        (["total_steps=1e6"], "total_steps", 1_000_000),
        (["total_steps=2_000"], "total_steps", 2000),
        (["sync.delta=1"], "sync.delta", 1.0),
        (["sync.max_lag=null"], "sync.max_lag", None),
        (["policy.hidden=[8,9]"], "policy.hidden", [8, 9]),
        (["env.kwargs.gravity=-5.0"], "env.kwargs", {"gravity": -5.0}),
        (["+env.kwargs.gravity=-5.0"], "env.kwargs", {"gravity": -5.0}),
        (["env.kwargs={gravity: -5.0, x: [1, a]}"], "env.kwargs", {"gravity": -5.0, "x": [1, "a"]}),
        (["env.id=Pendulum-v1"], "env.id", "Pendulum-v1"),
        (["env.id=Pendulum-v1"], "env.target_return", None),
        (["run_dir='/tmp/a b=c'"], "run_dir", "/tmp/a b=c"),
        (["run_dir=/tmp/x-1.2_3"], "run_dir", "/tmp/x-1.2_3"),
        (["run_dir=~/läuft (1)"], "run_dir", "~/läuft (1)"),
        (["name=läuft"], "name", "läuft"),
        (["resume=true"], "resume", True),
    ],
)
def test_values(words: list[str], path: str, value: object) -> None:
    found: object = compose(words)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_composing_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose(["env=cartpole"])
    assert list(tmp_path.iterdir()) == [] and Path.cwd() == tmp_path


def test_a_hydra_application_of_the_callers_own_is_left_alone() -> None:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(conf_dir() / "sync"), version_base="1.3"):
        compose(["env=cartpole"])
        assert hydra_compose("every_k").k == 10


def test_reading_the_configuration_loads_neither_torch_nor_mpi() -> None:
    code = (
        "import sys; from clusterenv_hpc.run.config import compose; import clusterenv_hpc.run.start; compose();"
        "print(sorted({'torch', 'mpi4py', 'tensorboard', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["worker=3"], ["worker=3", "workers"]),
        (["learning_rate=0.1"], ["learning_rate=0.1", "algo.learning_rate"]),
        (["algo.learning_rat=0.1"], ["algo.learning_rat=0.1", "did you mean algo.learning_rate?"]),
        (["algo.xyz=1"], ["algo.xyz=1", "allowed:", "algo.epochs"]),
        (["+new=1"], ["new=1", "no such key"]),
        (["++sync.k=1"], ["sync.k=1", "no such key", "sync.delta"]),
        (["sync=always", "sync.delta=0.1"], ["sync.delta=0.1", "no such key", "sync.rule"]),
        (["seed.x=1"], ["seed.x=1", "no keys of its own"]),
        (["~seed"], ["~seed", "null"]),
        (["hydra.run.dir=x"], ["hydra.run.dir=x", "not a key"]),
        (["env@other=taxi"], ["env@other", "not a key"]),
        (["env=cartpol"], ["env=cartpol", "did you mean cartpole?", "lunarlander", "env.id="]),
        (["sync=apps"], ["sync=apps", "aps", "always", "every_k", "never"]),
        (["algo=pppo"], ["algo=pppo", "ppo"]),
        (["env={id: x}"], ["env=", "no such choice"]),
        (["checkpoint=3"], ["checkpoint=3", "every_s", "keep"]),
        (["workers=-1"], ["workers=-1", ">= 0"]),
        (["workers=two"], ["workers=two", "an integer"]),
        (["workers=1.5"], ["workers=1.5", "an integer"]),
        (["envs_per_worker=0"], ["envs_per_worker=0", ">= 1"]),
        (["total_steps=0"], ["total_steps=0", ">= 1"]),
        (["total_steps="], ["total_steps=", "an integer"]),
        (["seed=-1"], ["seed=-1", ">= 0"]),
        (["seed=null"], ["seed=null", "not null"]),
        (["seed=1,2"], ["seed=1,2", "one value expected"]),
        (["resume=maybe"], ["resume=maybe", "true or false"]),
        (["sync.delta=-0.1"], ["sync.delta=-0.1", ">= 0"]),
        (["sync.delta=nan"], ["sync.delta=nan", "finite"]),
        (["sync.delta=inf"], ["sync.delta=inf", "finite"]),
        (["sync.max_lag=0"], ["sync.max_lag=0", ">= 1"]),
        (["algo.epochs=0"], ["algo.epochs=0", ">= 1"]),
        (["algo.clip=1"], ["algo.clip=1", "< 1"]),
        (["algo.gamma=1.01"], ["algo.gamma=1.01", "<= 1"]),
        (["algo.learning_rate=0"], ["algo.learning_rate=0", "> 0"]),
        (["algo.objective=both"], ["algo.objective=both", "decoupled", "coupled"]),
        (["algo.minibatch_size=10000000"], ["algo.minibatch_size=10000000", "at most the batch"]),
        (["policy.hidden=64"], ["policy.hidden=64", "a list"]),
        (["policy.hidden=[64,0]"], ["policy.hidden=[64, 0]", ">= 1"]),
        (["policy.hidden=[a]"], ["policy.hidden=", "an integer"]),
        (["policy.activation=tan"], ["policy.activation=tan", "tanh"]),
        (["device=gpu"], ["device=gpu", "cuda"]),
        (["log.progress=yes"], ["log.progress=", "auto"]),
        (["checkpoint.keep=0"], ["checkpoint.keep=0", ">= 1"]),
        (["env.kwargs=3"], ["env.kwargs=3", "keys and values"]),
        (["name=a/b"], ["name=", "without /"]),
        (["seed=${nothing}"], ["nothing"]),
        (["env"], ["env", "key=value"]),
        (["seed=(1"], ["seed=(1"]),
        (["slurm.nodes=0"], ["slurm.nodes=0", ">= 1"]),
        (["slurm.tim=1:00"], ["slurm.tim=", "slurm.time"]),
        (["env.id=CartPole-v7"], ["env.id=CartPole-v7", "no such environment", "CartPole-v1"]),
        (["env.id=Zzz-v0"], ["env.id=Zzz-v0", "no such environment"]),
        (["env.id=no_such_module:E-v0"], ["env.id=no_such_module:E-v0", "No module named"]),
        (["env=custom"], ["env.id", "needed"]),
        (["env=taxi", "env.backend=vector"], ["env.backend=vector", "Taxi-v4", "sync"]),
        (["env.backend=threads"], ["env.backend=threads", "sync", "vector", "envpool"]),
        (["algo=dqn", "algo.batch_size=1000000"], ["algo.batch_size=1000000", "at most algo.capacity="]),
        (["algo=dqn", "algo.n_step=90000"], ["algo.n_step=90000", "at most"]),
        (["env=acrobot", "env.ranks=2", "workers=0"], ["env.ranks=2", "workers >= 1"]),
        (["env=cartpole", "env.ranks=2"], ["env.ranks=2", "env.backend=vector", "sync"]),
        (["env=acrobot", "env.ranks=2", "env.on_error=restart"], ["env.on_error=restart", "abort"]),
        (["env=acrobot", "env.ranks=2", "algo=afedpg"], ["env.ranks=2", "afedpg"]),
    ],
)
def test_a_mistake_is_one_line_that_names_key_value_and_what_is_allowed(words: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000
    assert [part for part in parts if part not in text] == [], text
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("entry_point", "package", "extra"),
    [
        ("gymnasium.envs.box2d.lunar_lander:LunarLander", "Box2D", "box2d"),
        ("gymnasium.envs.mujoco.ant_v5:AntEnv", "mujoco", "mujoco"),
        ("ale_py.env:AtariEnv", "ale_py", "atari"),
    ],
)
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, entry_point: str, package: str, extra: str
) -> None:
    import importlib.util

    import gymnasium

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else real(name, *a))
    monkeypatch.setitem(gymnasium.registry, "Other-v0", gymnasium.envs.registration.EnvSpec("Other-v0", entry_point))
    with pytest.raises(ConfigError, match=rf"Other-v0.*{package}.*clusterenv_hpc\[{extra}\]"):
        compose(["env.id=Other-v0"])


def test_a_module_that_ends_the_program_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="importing leaves_at_once ended in SystemExit: 3"):
        compose(["env.id=leaves_at_once:E-v0"])


def test_a_wrong_key_in_a_file_is_found_too(tmp_path: Path) -> None:
    path = store(compose(["env=cartpole"]), tmp_path)
    path.write_text(path.read_text().replace("gamma:", "gama:"))
    with pytest.raises(ConfigError, match=r"config\.yaml.*algo\.gama"):
        load(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load(path)
    with pytest.raises(ConfigError, match=r"none\.yaml.*No such file"):
        load(tmp_path / "none.yaml")


# -- storing, hashing, resuming ------------------------------------------------------------------------------------


def test_a_stored_configuration_reads_back_equal(tmp_path: Path) -> None:
    words = ["env=cartpole", "sync=every_k", "sync.k=3", "env.kwargs={a: [1, {b: null}]}", "stop.at_return=5"]
    config = compose(words)
    assert load(store(config, tmp_path)) == config


def test_the_hash_is_of_what_all_ranks_share() -> None:
    base = config_hash(compose(["env=cartpole"]))
    for same in ("run_dir=/tmp/x", "checkpoint.keep=9", "log.every_s=1", "eval.episodes=1", "resume=true", "threads=1"):
        assert config_hash(compose(["env=cartpole", same])) == base, same
    different = {
        config_hash(compose(["env=cartpole", word]))
        for word in ("seed=2", "sync.delta=0.9", "algo.num_steps=8", "policy.hidden=[8]", "env.kwargs.a=1", "workers=3")
    }
    assert len(different) == 6 and base not in different
    assert len(base) == 16 and set(base) <= set("0123456789abcdef")


def test_resume_takes_the_stored_configuration_and_what_is_said_now(tmp_path: Path) -> None:
    before = compose(["env=cartpole", "algo.learning_rate=0.5", "sync=every_k", "sync.k=3", "seed=7", "total_steps=99"])
    path = store(before, tmp_path)
    assert resume(path, []) == before
    after = resume(path, ["total_steps=500", "resume=true", "checkpoint.keep=1"])
    assert after == dataclasses.replace(
        before, total_steps=500, resume=True, checkpoint=dataclasses.replace(before.checkpoint, keep=1)
    )
    # The same choices again change nothing, above all not back to the defaults.
    assert resume(path, ["env=cartpole", "algo=ppo", "sync=every_k"]) == before
    assert resume(path, ["sync=aps", "sync.delta=0.7"]).sync == APSSync(delta=0.7)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["env=taxi"], "env.id"),
        (["env.id=Acrobot-v1"], "env.id"),
        (["seed=8"], "seed"),
        (["policy.hidden=[32]"], "policy"),
        (["policy=cnn"], "policy"),
        (["env.kwargs.a=1"], "env.kwargs"),
    ],
)
def test_resume_refuses_what_would_make_it_another_run(tmp_path: Path, words: list[str], key: str) -> None:
    path = store(compose(["env=cartpole", "seed=7"]), tmp_path)
    with pytest.raises(ConfigError, match=rf"^{key}=.*resume=true goes on with .*{tmp_path.name}"):
        resume(path, words)


def test_single_values_of_a_stored_configuration(tmp_path: Path) -> None:
    config = load(store(compose(["env=cartpole"]), tmp_path))
    assert with_values(config, ["eval.episodes=3"]).eval.episodes == 3
    with pytest.raises(ConfigError, match=r"eval\.episode=3.*eval\.episodes"):
        with_values(config, ["eval.episode=3"])
    with pytest.raises(ConfigError, match=r"eval\.episodes=-3.*>= 0"):
        with_values(config, ["eval.episodes=-3"])


# -- the schemas and the objects they describe ---------------------------------------------------------------------


def test_the_algo_schema_is_the_learners_configuration() -> None:
    schema = {spec.name: spec.default for spec in dataclasses.fields(PPOAlgo)}
    learner = {spec.name: spec.default for spec in dataclasses.fields(PPOConfig)}
    assert {name: schema[name] for name in learner} == learner
    assert set(schema) - set(learner) == {"name", "num_steps"}


def test_every_key_says_what_it_means() -> None:
    def walk(schema: type, prefix: str = "") -> list[str]:
        missing = []
        for spec in dataclasses.fields(schema):
            if spec.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(spec.default_factory):
                missing += walk(spec.default_factory, f"{prefix}{spec.name}.")  # type: ignore[arg-type]
            elif not spec.metadata.get("help") and f"{prefix}{spec.name}" not in GROUPS:
                missing.append(f"{prefix}{spec.name}")
        return missing

    assert walk(Config) == []
    config = compose()
    assert walk(type(config.algo)) == walk(type(config.sync)) == []


def test_a_configuration_becomes_objects() -> None:
    import gymnasium
    import torch

    rules = [build_sync(compose([f"sync={name}"]).sync) for name in ("aps", "always", "every_k", "never")]
    assert [type(rule) for rule in rules] == [APS, Always, EveryK, Never]
    assert build_sync(compose(["sync.delta=0.7", "sync.max_lag=3"]).sync) == APS(delta=0.7, max_lag=3)
    box, two = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    config = compose(["env=cartpole", "policy.hidden=[8]", "algo.epochs=9"])
    policy = build_policy(config.policy, box, two, seed=3)
    assert policy.actor[0].out_features == 8
    learner = build_learner(config.algo, policy, two, torch.device("cpu"), seed=1)
    assert learner.config.epochs == 9  # type: ignore[attr-defined]


def test_weights_at_the_start_depend_on_the_seed_alone() -> None:
    import gymnasium
    import torch

    box, two = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    settings = compose().policy
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    try:
        made = []
        for count, seed in ((1, 3), (4, 3), (4, 4)):
            torch.set_num_threads(count)
            policy = build_policy(settings, box, two, seed=seed)
            made.append(torch.cat([tensor.detach().reshape(-1) for tensor in policy.parameters()]))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_squash_needs_bounds() -> None:
    import gymnasium
    import numpy as np

    box = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
    with pytest.raises(ConfigError, match=r"policy\.squash=tanh.*bounds"):
        build_policy(compose(["policy.squash=tanh"]).policy, box, box, seed=0)
