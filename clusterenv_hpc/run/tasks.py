"""Environments that differ from worker to worker, and what the gradient methods can be asked.

Imports neither torch nor MPI: a configuration is checked with this before anything starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from clusterenv_hpc.algorithms import GradientMethod
from clusterenv_hpc.run.schema import Config, EnvConfig, GradientsConfig

OWN = ("id", "kwargs", "wrappers")
"""What an entry of ``env.per_worker`` may hold."""


def gradient_method(config: Config) -> bool:
    """Whether the workers of this run return gradients, and not steps."""
    return isinstance(config.algo, GradientMethod)


def task_of(env: EnvConfig, worker: int) -> EnvConfig:
    """``env`` as ``worker`` (0 .. n - 1) has it: its own id and wrappers, and its own kwargs over the common ones."""
    if not env.per_worker:
        return env
    own = env.per_worker[worker] or {}
    return dataclasses.replace(
        env,
        id=own.get("id", env.id),
        kwargs={**env.kwargs, **(own.get("kwargs") or {})},
        wrappers=own.get("wrappers", env.wrappers),
        per_worker=[],
    )


def tasks_of(env: EnvConfig) -> list[EnvConfig]:
    """The environments that differ, each once, in the order of the workers; ``[env]`` where all are alike."""
    tasks = [task_of(env, worker) for worker in range(len(env.per_worker))]
    return [task for i, task in enumerate(tasks) if task not in tasks[:i]] or [env]


def _entries(env: EnvConfig) -> Iterator[str]:
    """One line for each entry of ``env.per_worker`` that cannot be."""
    kinds: dict[str, type] = {"id": str, "kwargs": dict, "wrappers": list}
    for entry in env.per_worker:
        if not isinstance(entry, dict | None) or any(
            name not in OWN or not isinstance(value, kinds[name]) for name, value in (entry or {}).items()
        ):
            yield f"env.per_worker: {entry}: allowed: some of {{id: ID, kwargs: {{...}}, wrappers: [...]}}, or {{}}"


def misfits(config: Config) -> Iterator[str]:
    """One line for each setting that does not go with the algorithm, or with the number of workers."""
    env, gradients, name = config.env, config.gradients, config.algo.name
    yield from _entries(env)
    if not gradient_method(config):
        if env.per_worker:
            yield f"env.per_worker: algo={name} has the same environment on every worker; allowed: []"
        if gradients != GradientsConfig():
            yield f"gradients: algo={name} sends no gradients; allowed: leave gradients.* out"
        return
    listed: tuple[tuple[str, list[Any]], ...] = (
        ("env.per_worker", env.per_worker),
        ("gradients.communication.values", gradients.communication.values),
    )
    for path, values in listed:
        if config.workers is not None and len(values) not in (0, config.worker_count):
            yield f"{path}: {len(values)} entries; allowed: one for each of {config.worker_count} workers"
    delay = gradients.communication
    if (delay.scheme == "list") != bool(delay.values) or any(not 0 <= value < math.inf for value in delay.values):
        yield (
            f"gradients.communication.values={delay.values}: allowed: seconds >= 0 for each worker with "
            "gradients.communication.scheme=list, else []"
        )
    if name == "afedpg" and gradients.transport == "allreduce":
        yield "gradients.transport=allreduce: algo=afedpg makes an update of every single gradient; allowed: p2p"
    if env.ranks > 1:
        yield f"env.ranks={env.ranks}: algo={name} has environments of one rank each; allowed: 1"
    if env.on_error == "restart":
        yield f"env.on_error=restart: algo={name} needs trajectories that are whole; allowed: abort"
