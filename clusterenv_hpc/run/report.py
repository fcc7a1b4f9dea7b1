"""What a run says of itself: the opening line, summary.json, and the lines at its end."""

from __future__ import annotations

import dataclasses
import platform
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.run.evaluate import Evaluation
from clusterenv_hpc.run.progress import number
from clusterenv_hpc.run.run_dir import RunDir
from clusterenv_hpc.run.schema import Config
from clusterenv_hpc.run.tally import Tally
from clusterenv_hpc.run.tasks import gradient_method


def beginning(config: Config, run: RunDir, tally: Any, resumed_from: str | None) -> str:
    """What runs, and where it goes on or starts."""
    begins = "has nothing to resume and starts" if config.resume else "starts"
    if resumed_from is not None:
        begins = f"goes on from {resumed_from} at {tally.env_steps:,} steps"
    workers = (
        f"{config.workers} worker rank{'s' * (config.workers != 1)}"
        if config.workers
        else f"{config.worker_count} workers in this process"
    )
    if config.env.ranks > 1:
        workers = f"{config.workers} workers of {config.env.ranks} ranks each"
    return f"{run.path.name} {begins}: {config.env.id}, {config.num_envs} environments on {workers}"


def opening(config: Config, run: RunDir, envs: ClusterEnv, tally: Tally, resumed_from: str | None, device: str) -> str:
    """The same, with what it runs on."""
    threads = torch.get_num_threads()
    return beginning(config, run, tally, resumed_from) + (
        f" ({envs.backend} backend), sync={config.sync.rule}, learner on {device} with {threads} "
        f"thread{'s' * (threads > 1)}, over {envs.transport}"
    )


def common_summary(
    config: Config, tally: Any, resumed_from: str | None, exit_reason: str, result: Evaluation | None
) -> dict[str, Any]:
    """What summary.json holds of any run; numbers that are not known yet are NaN, which becomes null."""
    return {
        "env_id": config.env.id,
        "algo": config.algo.name,
        "sync": None if gradient_method(config) else config.sync.rule,
        "seed": config.seed,
        "workers": config.workers,
        "num_envs": config.num_envs,
        "total_steps": config.total_steps,
        **tally.summary(),
        "resumed_from": resumed_from,
        "exit_reason": exit_reason,
        **(result.as_dict() if result is not None else {}),
        "target_return": config.env.target_return,
        "software": {"python": platform.python_version(), "torch": torch.__version__},
    }


def summary(
    config: Config,
    tally: Tally,
    envs: ClusterEnv,
    resumed_from: str | None,
    exit_reason: str,
    result: Evaluation | None,
) -> dict[str, Any]:
    """The contents of summary.json."""
    return {
        **common_summary(config, tally, resumed_from, exit_reason, result),
        "sync_settings": dataclasses.asdict(config.sync),
        "backend": envs.backend,
        "transport": envs.transport,
        "hosts": envs.hosts,
        "wire_since_start": {name: envs.stats.as_dict()[name] for name in ("sent", "received")},
        "env_steps_by_rank_since_start": envs.stats.as_dict()["env_steps_by_rank"],
        "seconds_by_rank_since_start": envs.stats.as_dict()["seconds_by_rank"],
        "restarts_by_rank_since_start": envs.stats.as_dict()["restarts_by_rank"],
    }


def closing(config: Config, run: RunDir, tally: Tally, exit_reason: str, result: Evaluation | None) -> str:
    """What came out, where it lies, and what can be done with it."""
    particulars = [
        f"  weight messages {tally.wire['weight_messages']} where sync=always sends {tally.asked_for_weights} "
        f"({number(100 * tally.weights_saved)} % saved)",
    ]
    if restarts := tally.wire["env_restarts"]:
        particulars.append(f"  environments that failed were built anew {restarts} times (env.on_error=restart)")
    return ending(config, run, tally, len(tally.returns), particulars, exit_reason, result)


def ending(
    config: Config,
    run: RunDir,
    tally: Any,
    recent: int,
    particulars: Sequence[str],
    exit_reason: str,
    result: Evaluation | None,
) -> str:
    """The same for any run; ``recent``: the episodes of the mean return, ``particulars``: lines of its own."""
    done = {"completed": "has made all its steps", "solved": "is solved"}.get(
        exit_reason, f"was stopped by {exit_reason}"
    )
    rate = tally.env_steps / tally.wall_s if tally.wall_s else 0.0
    lines = [
        f"{run.path.name} {done}: {tally.env_steps:,} steps and {tally.updates} updates in {tally.wall_s:.1f} s "
        f"({number(rate, 0)} steps/s)",
        f"  sampled return {number(tally.return_mean)} +- {number(tally.return_std)} over the last "
        f"{recent} of {tally.episodes:,} episodes",
        *particulars,
    ]
    if result is not None:
        target = config.env.target_return
        verdict = "" if target is None else f"; solved from {target:g} on: {'yes' if result.mean >= target else 'no'}"
        lines.append(f"  {result.describe(config.eval.sampled and exit_reason != 'solved')}{verdict}")
    elif exit_reason == "completed" and config.eval.episodes:
        lines.append(
            f"  the evaluation was broken off; clusterenv-hpc eval {shlex.quote(str(run.path))} plays it again"
        )
    twice = 2 * config.total_steps if tally.env_steps < 2 * config.total_steps else 2 * tally.env_steps
    more = f" total_steps={twice}" if exit_reason == "completed" else ""
    if exit_reason == "solved":  # else it would end again after one update
        more = " stop.at_return=null"
    lines += [
        f"run:     {run.path.resolve()}",
        f"plot:    clusterenv-hpc plot {shlex.quote(str(run.path))}",
        f"resume:  clusterenv-hpc train {shlex.quote(f'run_dir={run.path}')} resume=true{more}",
    ]
    return "\n".join(lines)
