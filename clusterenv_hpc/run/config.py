"""From Hydra overrides to one typed, checked :class:`~clusterenv_hpc.run.schema.Config`.

Hydra composes the choices of the groups from ``conf/``; the result is merged into the typed schemas, so that a
misspelt key or a wrong type is found in a file as well as on the command line; then the command line's values are
set one by one.  Every mistake ends as a :class:`ConfigError` of one line.  Imports neither torch nor MPI.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from clusterenv_hpc.jobs.config import TEXT_KEYS
from clusterenv_hpc.jobs.config import check as check_slurm
from clusterenv_hpc.run.schema import VARIANTS, Config, EnvConfig
from clusterenv_hpc.run.tasks import misfits, tasks_of
from clusterenv_hpc.settings import out_of_range

GROUPS = ("env", "algo", "policy", "sync", "slurm")

RANK_LOCAL = ("run_dir", "name", "resume", "device", "threads", "checkpoint", "eval", "stop", "log", "slurm")
"""What only the learner acts on: not part of the hash that all ranks must share."""

KEPT_ON_RESUME = ("env.id", "env.kwargs", "env.wrappers", "env.per_worker", "algo.name", "policy", "seed")
"""What a resumed run cannot change: its weights and its counters would belong to something else."""

VERBATIM = ("run_dir", "name")
"""Texts that may hold what is no part of Hydra's language, such as ~ or an accent."""

IDENTITY = {"env": "id", "algo": "name", "policy": "name", "sync": "rule"}
"""The key of each group that tells one choice from another."""

EXTRAS = {
    "gymnasium.envs.box2d": ("Box2D", "box2d"),
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "ale_py": ("ale_py", "atari"),
    "minigrid": ("minigrid", "minigrid"),
}
"""Where an environment's code lies: the module it needs, and the extra that installs it."""


class ConfigError(ValueError):
    """A key, a value or a choice that cannot be; the message is one line and says what is allowed."""

    exit_code = 2


def conf_dir() -> Path:
    """The folder of the YAML files: inside the installed package, else at the top of the repository."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"no conf/config.yaml in {package} or beside it: the installation is incomplete")


def choices(group: str) -> list[str]:
    """The names that ``group=`` may take."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def compose(overrides: Sequence[str] = (), *, check_env: bool = True) -> Config:
    """The configuration that ``overrides`` (``key=value`` or ``group=choice``, the last of a key wins) ask for.

    Raises ConfigError.  With ``check_env`` the environment's id, package and backend are looked up too.
    """
    return check(_compose(_parse(overrides)), check_env=check_env)


def resume(stored: Path, overrides: Sequence[str]) -> Config:
    """A stored ``config.yaml`` with the command line's values on top; what a run is made of must stay the same.

    Raises ConfigError where ``overrides`` change one of KEPT_ON_RESUME, or the file does not fit the schemas.
    """
    parsed = _parse(overrides)
    before = load(stored)
    tree = OmegaConf.structured(before)
    groups = {override.key_or_group: str(override.value()) for override in parsed if override.key_or_group in GROUPS}
    fresh = OmegaConf.structured(_compose(parsed)) if groups else tree
    for group in groups:
        if group == "slurm" or fresh[group].get(IDENTITY[group]) != tree[group].get(IDENTITY[group]):
            tree[group] = fresh[group]
    for override in parsed:
        if override.key_or_group not in GROUPS:
            _set(tree, override)
    after = check(_to_object(tree))
    old, new = OmegaConf.structured(before), OmegaConf.structured(after)
    for path in KEPT_ON_RESUME:
        if OmegaConf.select(old, path) != OmegaConf.select(new, path):
            was, now = (_flat(OmegaConf.select(tree, path)) for tree in (old, new))
            raise ConfigError(f"{path}={now}: resume=true goes on with {stored.parent}, whose {path} is {was}")
    return after


def load(path: Path) -> Config:
    """A ``config.yaml`` as :func:`to_yaml` wrote it.  Raises ConfigError."""
    try:
        return check(_typed(OmegaConf.load(path), str(path)), check_env=False)
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path}: {_first_line(error)}") from error
    except Exception as error:
        raise ConfigError(f"{path}: not a configuration: {_first_line(error)}") from error


def with_values(config: Config, overrides: Sequence[str]) -> Config:
    """``config`` with single values changed, checked again.  Raises ConfigError."""
    tree = OmegaConf.structured(config)
    for override in _parse(overrides):
        _set(tree, override)
    return check(_to_object(tree))


def to_yaml(config: Config) -> str:
    """The whole configuration, every key, as YAML that :func:`load` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_hash(config: Config) -> str:
    """Sixteen hex digits that are equal on all ranks of a run; what only the learner acts on is left out."""
    tree = dataclasses.asdict(config)
    shared = {name: value for name, value in tree.items() if name not in RANK_LOCAL}
    return hashlib.sha256(json.dumps(shared, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check(config: Config, *, check_env: bool = True) -> Config:
    """``config`` itself, once ranges and everything that concerns two keys at once are found right."""
    for line in out_of_range(config):
        raise ConfigError(line)
    if any(units < 1 for units in config.policy.hidden):
        raise ConfigError(f"policy.hidden={config.policy.hidden}: allowed: a list of integers >= 1")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise ConfigError(f"device={config.device}: allowed: auto, cpu, cuda, cuda:N")
    for name in ("name", "run_dir"):
        value = getattr(config, name)
        if value is not None and (not value.strip() or (name == "name" and ("/" in value or value in {".", ".."}))):
            raise ConfigError(f"{name}={value!r}: allowed: a {'path' if name == 'run_dir' else 'name without /'}")
    check_slurm(config.slurm)
    if config.env.ranks > 1 and config.workers == 0:
        raise ConfigError(f"env.ranks={config.env.ranks}: needs workers on ranks of their own; allowed: workers >= 1")
    if config.eval_workers and config.workers == 0:
        raise ConfigError("eval_workers=1: needs a rank of its own; allowed: workers >= 1")
    if config.eval_workers and not config.eval.episodes:
        raise ConfigError("eval_workers=1: eval.episodes=0 leaves it nothing to do; allowed: eval.episodes >= 1")
    if config.workers is not None and len(config.env.delay.values) not in (0, config.worker_count):
        count = len(config.env.delay.values)
        raise ConfigError(f"env.delay.values: {count} values; allowed: one for each of {config.worker_count} workers")
    if (misfit := config.algo.misfit(config.num_envs, config.envs_per_worker)) is not None:
        raise ConfigError(misfit)
    for line in misfits(config):
        raise ConfigError(line)
    if check_env:
        for task in tasks_of(config.env):
            check_environment(task)
    return config


def check_environment(env: EnvConfig) -> None:
    """Raises ConfigError where no such environment is registered, its package is missing, or its backend is."""
    import gymnasium

    _check_pairs(env)
    module, _, name = env.id.rpartition(":")
    if env.backend == "envpool":
        if importlib.util.find_spec("envpool") is None:
            raise ConfigError("env.backend=envpool: the package is missing; pip install 'clusterenv_hpc[envpool]'")
        if env.id not in (known := importlib.import_module("envpool").list_all_envs()):
            near = difflib.get_close_matches(env.id, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "allowed: those of envpool.list_all_envs()"
            raise ConfigError(f"env.id={env.id}: EnvPool has no such environment; {hint}")
        return
    if module:
        loaded = _import(f"env.id={env.id}", module)
        if name not in gymnasium.registry and callable(getattr(loaded, name, None)):
            return  # it names a class or a function
    elif name.startswith("ALE/") and importlib.util.find_spec("ale_py") is not None:
        gymnasium.register_envs(importlib.import_module("ale_py"))
    spec = gymnasium.registry.get(name)
    if spec is None:
        if name.startswith("ALE/"):
            raise ConfigError(f"env.id={env.id}: needs the package ale_py; pip install 'clusterenv_hpc[atari]'")
        near = difflib.get_close_matches(name, gymnasium.registry, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "allowed: the ids of gymnasium.registry, or module:Id"
        raise ConfigError(f"env.id={env.id}: no such environment; {hint}")
    for prefix, (package, extra) in EXTRAS.items():
        if str(spec.entry_point).startswith(prefix) and importlib.util.find_spec(package) is None:
            raise ConfigError(f"env.id={env.id}: needs the package {package}; pip install 'clusterenv_hpc[{extra}]'")
    if env.backend == "vector" and spec.vector_entry_point is None:
        raise ConfigError(f"env.backend=vector: {env.id} has no vector entry point; allowed: sync")


def _check_pairs(env: EnvConfig) -> None:
    """What concerns two keys of ``env`` at once, and the wrappers."""
    if env.backend != "sync":
        for key, given in (
            ("on_error=restart", env.on_error == "restart"),
            ("wrappers", bool(env.wrappers)),
            (f"ranks={env.ranks}", env.ranks > 1),
        ):
            if given:
                raise ConfigError(f"env.{key}: env.backend={env.backend} has no single environments; allowed: sync")
    if env.on_error == "restart" and env.ranks > 1:
        raise ConfigError(f"env.on_error=restart: not where an environment spans env.ranks={env.ranks}; allowed: abort")
    values = env.delay.values
    if (env.delay.scheme == "list") != bool(values) or any(not 0 <= value < math.inf for value in values):
        raise ConfigError(
            f"env.delay.values={values}: allowed: seconds >= 0 for each worker with env.delay.scheme=list, else []"
        )
    for entry in env.wrappers:
        path, _ = wrapper_path(entry)
        if not callable(named_object(path)):
            raise ConfigError(f"env.wrappers: {path} is no class or function")


def wrapper_path(entry: Any) -> tuple[str, dict[str, Any]]:
    """``(module:Class, keyword arguments)`` of an entry of ``env.wrappers``.  Raises ConfigError."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, dict) and set(entry) <= {"wrapper", "kwargs"} and isinstance(entry.get("wrapper"), str):
        kwargs = entry.get("kwargs") or {}
        if isinstance(kwargs, dict):
            return entry["wrapper"], {str(name): value for name, value in kwargs.items()}
    raise ConfigError(f"env.wrappers: {entry}: allowed: module:Class, or {{wrapper: module:Class, kwargs: {{...}}}}")


def named_object(path: str) -> Any:
    """What ``module:name`` names.  Raises ConfigError."""
    module, _, name = path.rpartition(":")
    loaded = _import(f"env.wrappers: {path}", module) if module else None
    if not hasattr(loaded, name):
        raise ConfigError(f"env.wrappers: {path}: no such thing; allowed: module:Class")
    return getattr(loaded, name)


def _import(key: str, module: str) -> Any:
    """The module; raises ConfigError, with what to install where that is known."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        package, extra = EXTRAS.get(module.partition(".")[0], (None, None))
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{key}: needs the package {package}; pip install 'clusterenv_hpc[{extra}]'") from error
        hint = f"cannot import {module}: {_first_line(error)}"
        if isinstance(error, ModuleNotFoundError):
            hint += "; is it installed, or its folder on PYTHONPATH?"
        elif not isinstance(error, ImportError):
            hint = f"importing {module} ended in {type(error).__name__}: {_first_line(error)}"
        raise ConfigError(f"{key}: {hint}") from error


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's reading of the command line, the last of each key; groups first named by an environment's id."""
    parser = OverridesParser.create()
    last: dict[str, Override] = {}
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            name, _, value = text.partition("=")
            if name in (*VERBATIM, *TEXT_KEYS) and value and value[0] not in "'\"":
                override = parser.parse_override(f"{name}={quoted(value)}")
                last[name] = override
                continue
            hint = "put it in quotes?" if "=" in text else "expected key=value"
            raise ConfigError(f"{text}: cannot be read; {hint} ({_first_line(error)})") from error
        name = override.key_or_group
        if override.type is OverrideType.DEL:
            raise ConfigError(f"{text}: no key can be removed; set it to null where the key allows it")
        if override.is_sweep_override() and name in TEXT_KEYS:
            override = parser.parse_override(f"{name}={quoted(text.partition('=')[2])}")
        if override.is_sweep_override():
            raise ConfigError(f"{text}: one value expected, several came; `clusterenv-hpc submit -m` takes such sweeps")
        if override.package is not None or name.startswith("hydra"):
            raise ConfigError(f"{text}: not a key of this program; allowed: groups {', '.join(GROUPS)}, and their keys")
        if name in GROUPS:
            _check_choice(name, override.value())
        last.pop(name, None)
        last[name] = override
    if "env.id" in last and "env" not in last:
        last = {"env": parser.parse_override("env=custom"), **last}
    return list(last.values())


def quoted(text: str) -> str:
    """``text`` as a value on a Hydra command line."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _check_choice(group: str, value: Any) -> None:
    allowed = choices(group)
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    other = "; any other environment: env.id=ID" if group == "env" else ""
    raise ConfigError(f"{group}={value}: no such choice; {hint}allowed: {', '.join(allowed)}{other}")


def _compose(parsed: Iterable[Override]) -> Config:
    parsed = list(parsed)
    groups = [f"{override.key_or_group}={override.value()}" for override in parsed if override.key_or_group in GROUPS]
    # Hydra keeps its state in a singleton: a caller's own (a notebook, a Hydra application) is put back afterwards.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = hydra_compose("config", overrides=groups)
    except HydraException as error:
        raise ConfigError(f"{conf_dir()}: {_first_line(error)}") from error
    finally:
        GlobalHydra.instance().hydra = outer
    tree = OmegaConf.structured(_typed(composed, "conf/", complete=False))
    for override in parsed:
        if override.key_or_group not in GROUPS:
            _set(tree, override)
    return _to_object(tree)


def _typed(tree: Any, source: str, *, complete: bool = True) -> Any:
    """``tree`` merged into the schemas that its own choices name."""
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{source}: not a configuration")
    typed = OmegaConf.structured(Config)
    for group, (tag, variants) in VARIANTS.items():
        node = tree.get(group)
        name = node.get(tag) if isinstance(node, DictConfig) else None
        if name not in variants:
            raise ConfigError(f"{source}: {group}.{tag}={name}: allowed: {', '.join(variants)}")
        typed[group] = OmegaConf.structured(variants[name])
    try:
        merged = OmegaConf.merge(typed, tree)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {_reason(error)}") from error
    return _to_object(merged) if complete else merged


def _to_object(tree: Any) -> Config:
    try:
        OmegaConf.resolve(tree)
        config = OmegaConf.to_object(tree)
    except MissingMandatoryValue as error:
        raise ConfigError("env.id: a value is needed; expected env.id=ID, a Gymnasium id or module:Id") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"a value with ${{...}} cannot be resolved: {_first_line(error)}") from error
    assert isinstance(config, Config)
    return config


def _set(tree: DictConfig, override: Override) -> None:
    """Sets one key, if there is such a key and the value is of its type."""
    path, value = override.key_or_group, override.value()
    node: Any = tree
    parts = path.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{path}={_flat(value)}: {'.'.join(parts[:depth])} has no keys of its own")
        if OmegaConf.get_type(node) is dict:  # free keys, such as env.kwargs
            break
        if part not in list(node):  # `in node` overlooks a key that still wants its value
            raise ConfigError(f"{path}={_flat(value)}: no such key; {_near(tree, parts[:depth], part)}")
        node = OmegaConf.select(node, part) if not OmegaConf.is_missing(node, part) else None
    if isinstance(node, DictConfig) and OmegaConf.get_type(node) is not dict:
        raise ConfigError(f"{path}={_flat(value)}: a group of keys; allowed: {path}.{{{','.join(map(str, node))}}}")
    try:
        try:
            OmegaConf.update(tree, path, value, force_add=True)
        except OmegaConfBaseException:
            if not (isinstance(value, float) and value.is_integer()):
                raise
            OmegaConf.update(tree, path, int(value), force_add=True)  # total_steps=1e6
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}={_flat(value)}: {_reason(error)}") from error


def _near(tree: DictConfig, parents: list[str], name: str) -> str:
    """What was probably meant: a key of the same node, or one of that name anywhere."""
    prefix = "".join(f"{part}." for part in parents)
    siblings = [str(key) for key in (OmegaConf.select(tree, prefix.rstrip(".")) if parents else tree)]
    near = [f"{prefix}{key}" for key in difflib.get_close_matches(name, siblings, n=1)]
    if not near:
        everywhere = {path.rpartition(".")[2]: path for path in key_paths(tree)}
        near = [everywhere[key] for key in difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8)]
    if near and not parents:
        return f"did you mean {near[0]}?"
    return (f"did you mean {near[0]}? " if near else "") + f"allowed: {', '.join(f'{prefix}{key}' for key in siblings)}"


def key_paths(tree: DictConfig, prefix: str = "") -> list[str]:
    """The dotted path of every key, groups of keys left out."""
    paths: list[str] = []
    for name in map(str, tree):
        node = None if OmegaConf.is_missing(tree, name) else tree[name]
        if isinstance(node, DictConfig):
            paths += key_paths(node, f"{prefix}{name}.")
        else:
            paths.append(f"{prefix}{name}")
    return paths


def _reason(error: Exception) -> str:
    """OmegaConf's complaint, as what is allowed."""
    text, words = _first_line(error), {"Integer": "an integer", "Float": "a number", "Boolean": "true or false"}
    if found := re.search(r"could not be converted to (\w+)", text):
        return f"allowed: {words.get(found[1], found[1])}"
    if re.search(r"is not a valid bool", text):
        return "allowed: true or false"
    if "is not a ListConfig" in text:
        return "allowed: a list, such as [64,64]"
    if text.startswith("Cannot assign"):
        return "allowed: keys and values, such as {key: value}"
    if "not Optional" in text:
        return "allowed: a value, not null"
    if found := re.search(r"Key '([^']*)' not in", text):
        return f"no such key: {getattr(error, 'full_key', None) or found[1]}"
    return text


def _flat(value: Any) -> str:
    """``value`` as one would write it on the command line."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
