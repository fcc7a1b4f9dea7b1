"""Building the vector environment that one worker steps.

Backends: ``sync`` steps environments one after another and is bit-equal to Gymnasium's ``SyncVectorEnv``;
``vector`` uses the vectorised implementation registered with the environment (``vector_entry_point``);
``envpool`` uses EnvPool's C++ environments, where that package is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from .delays import Delay
from .group import Group, GroupEnv
from .spaces import leaves, split

AutoresetModeLike = AutoresetMode | str
Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]
BACKENDS = ("sync", "vector", "envpool")
ON_ERROR = ("abort", "restart")


class EnvError(RuntimeError):
    """An environment could not be built or failed; ``row`` is its row in the whole, if it is known."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


@dataclass(frozen=True)
class EnvSource:
    """Where environments come from.

    ``env`` is a Gymnasium id (``"module:Id-v0"`` imports the module first), a callable, or a string ``"module:name"``
    that names one.  A callable is called once per environment with ``kwargs`` and returns a ``gymnasium.Env``; with the
    backend ``vector`` it is called once with ``num_envs`` and ``kwargs`` and returns a ``VectorEnv``.

    ``wrappers``: applied to each environment, the first innermost (backend ``sync`` only).
    ``delay``: makes workers slow, for experiments.
    ``on_error``: what an exception out of ``step`` or ``reset`` does: ``"abort"`` ends the job; ``"restart"`` rebuilds
    that environment in place, up to ``max_restarts`` times (backend ``sync`` only; see ``envs.restart``).
    """

    env: str | Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "sync"
    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
    on_error: str = "abort"
    max_restarts: int = 10
    wrappers: Sequence[Wrapper] = ()
    delay: Delay = field(default_factory=Delay)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {self.backend!r}")
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}; got {self.on_error!r}")
        if self.on_error == "restart" and self.backend != "sync":
            raise ValueError(
                f"on_error='restart' needs environments that can be rebuilt one by one: expected backend='sync', "
                f"got {self.backend!r}"
            )
        if self.wrappers and self.backend != "sync":
            raise ValueError(f"wrappers are for single environments: expected backend='sync', got {self.backend!r}")
        if not all(callable(wrapper) for wrapper in self.wrappers):
            raise TypeError(f"wrappers must be callables that take an environment, got {list(self.wrappers)}")
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ValueError(f"max_restarts must be a whole number, at least 0; got {self.max_restarts!r}")
        if not (isinstance(self.env, str) or callable(self.env)):
            raise TypeError(f"env must be a Gymnasium id or a callable, got {type(self.env).__name__}")

    @property
    def env_id(self) -> str:
        """The id, or the callable's name."""
        if isinstance(self.env, str):
            return self.env
        return getattr(self.env, "__qualname__", None) or type(self.env).__name__


class SyncEnvs(SyncVectorEnv):
    """Gymnasium's ``SyncVectorEnv`` that keeps every environment's own info.

    Infos of several workers must become one dict as if one ``SyncVectorEnv`` had made it.  That depends on the order
    in which single infos are added, so those are recorded here and added on the learner; in a rollout, where nobody
    reads infos, they are skipped.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env[Any, Any]]], autoreset_mode: AutoresetMode) -> None:
        self.recorded: list[tuple[int, dict[str, Any]]] = []
        self.record_infos = True
        super().__init__(env_fns, copy=False, autoreset_mode=autoreset_mode)

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        if self.record_infos:
            if env_info:
                # Here the reset comes before anything is sent: it must not reach into the info of the step before it.
                same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
                self.recorded.append((env_num, _settled(env_info) if same_step else env_info))
        elif "final_obs" in env_info:
            # Copied: the reset that follows may write into the same array.
            vector_infos.setdefault("final_obs", {})[env_num] = deepcopy(env_info["final_obs"])
        return vector_infos

    def begin_rollout(self) -> None:
        """From now on nobody reads infos."""
        self.record_infos = False

    def end_rollout(self) -> None:
        """The contrary."""
        self.record_infos = True

    def failed_steps(self) -> list[tuple[int, int]]:
        """``(step, row here)`` of this rollout's steps that failed and only reset; see ``envs.restart``."""
        return []

    def take_restarts(self) -> list[Any]:
        """The restarts since the last call."""
        return []

    def take_infos(self) -> list[tuple[int, dict[str, Any]]]:
        """The infos recorded since the last call, as ``(row here, info)`` in the order they came."""
        recorded, self.recorded = self.recorded, []
        return recorded


def _settled(info: dict[str, Any]) -> dict[str, Any]:
    """What ``SyncVectorEnv`` takes out of an info at once; the rest it refers to, and so do we."""
    return {
        key: _settled(value) if isinstance(value, dict) and key != "final_obs"
        else value.copy() if isinstance(value, np.ndarray) and key != "final_obs"
        else value
        for key, value in info.items()
    }  # fmt: skip


def named_callable(env: str) -> Callable[..., Any] | None:
    """What ``"module:name"`` names, if it is a callable of that module rather than an id that it registers.

    Raises:
        ImportError: there is no such module; and whatever else importing it raises.
    """
    module, _, name = env.rpartition(":")
    found = getattr(importlib.import_module(module), name, None) if module else None
    return found if callable(found) and name not in gym.registry else None


def make_env(source: EnvSource, row: int, group: Group | None = None) -> gym.Env[Any, Any]:
    """One environment, or this rank's part of one that spans a group of ranks.

    Raises:
        EnvError: it could not be built; the message names its row in the whole.
    """
    kwargs = dict(source.kwargs) if group is None else {**source.kwargs, "comm": group.comm}
    try:
        build = named_callable(source.env) if isinstance(source.env, str) else source.env
        env = gym.make(source.env, **kwargs) if build is None else build(**kwargs)  # type: ignore[arg-type]
        for wrapper in source.wrappers:
            env = wrapper(env)
    except (Exception, SystemExit) as error:  # a simulator may take its own start-up failure for the program's end
        raise EnvError(
            f"environment {row} ({source.env_id}) could not be built: {type(error).__name__}: {error}", row
        ) from error
    if not isinstance(env, gym.Env):
        raise EnvError(f"environment {row}: {source.env_id} made a {type(env).__name__}, expected a gymnasium.Env", row)
    return env


def build_vector_env(
    source: EnvSource, num_envs: int, first_row: int = 0, group: Group | None = None
) -> VectorEnv[Any, Any, Any]:
    """The vector environment of one worker.

    Args:
        source: what to build.
        num_envs: how many environments.
        first_row: the row, in the whole, of the first of them; for messages only.
        group: the ranks that each environment spans; None: this one alone.

    Raises:
        EnvError: it could not be built; the message names the environment's row.
    """
    if source.backend == "sync":
        rows = range(first_row, first_row + num_envs)

        def make(index: int) -> gym.Env[Any, Any]:
            env = make_env(source, first_row + index, group)
            return env if group is None else GroupEnv(env, group, index)

        try:
            make_all = [partial(make, index) for index in range(num_envs)]
            if source.on_error == "restart":
                from .restart import RestartingEnvs

                return RestartingEnvs(make_all, source.autoreset_mode, source.max_restarts, first_row)
            return SyncEnvs(make_all, source.autoreset_mode)
        except RuntimeError as error:
            if isinstance(error, EnvError):
                raise
            raise EnvError(f"environments {rows.start} to {rows.stop - 1} ({source.env_id}) differ: {error}") from error
    try:
        if source.backend == "envpool":
            from .pool import EnvPoolEnvs

            envs: Any = EnvPoolEnvs(source.env_id, num_envs, source.kwargs)
        elif (build := named_callable(source.env) if isinstance(source.env, str) else source.env) is not None:
            envs = build(num_envs=num_envs, **source.kwargs)
        else:
            envs = gym.make_vec(source.env, num_envs, vectorization_mode="vector_entry_point", **source.kwargs)  # type: ignore[arg-type]
    except (Exception, SystemExit) as error:
        raise EnvError(
            f"{source.env_id} could not be built with backend={source.backend}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(envs, VectorEnv):
        raise EnvError(f"{source.env_id} made a {type(envs).__name__}, expected a gymnasium.vector.VectorEnv")
    return envs


def autoreset_mode_of(envs: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """The autoreset mode that ``envs`` declares (Gymnasium's default, ``NEXT_STEP``, where it declares none)."""
    return AutoresetMode(envs.metadata.get("autoreset_mode") or AutoresetMode.NEXT_STEP)


def misfit(envs: VectorEnv[Any, Any, Any]) -> tuple[int, str] | None:
    """Which environment's latest observation does not have the space's form, and how; None if all have."""
    space = envs.single_observation_space
    for row, observation in enumerate(getattr(envs, "_env_obs", None) or ()):
        try:
            parts = split(space, observation)
        except (TypeError, KeyError, IndexError, ValueError):
            return row, f"an observation of another structure than its space {space}: {type(observation).__name__}"
        for part, leaf in zip(parts, leaves(space), strict=True):
            if part.shape != leaf.shape or not np.can_cast(part.dtype, leaf.dtype, "same_kind"):
                return row, (
                    f"an observation{leaf.path} of shape {part.shape} and dtype {part.dtype}, but its space says "
                    f"{leaf.shape} and {leaf.dtype}"
                )
    return None


def failing_row(envs: VectorEnv[Any, Any, Any], traceback: TracebackType | None) -> int | None:
    """Which environment of ``envs`` an exception came from, if it came out of the loop over them."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_locals.get("self") is envs and isinstance(frame.f_locals.get("i"), int):
            return int(frame.f_locals["i"])
        traceback = traceback.tb_next
    return None
