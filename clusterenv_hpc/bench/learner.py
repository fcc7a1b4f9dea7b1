"""What a rollout message costs rank 0, and how many workers that serves.

The workers flood: each sends the same rollout again as soon as the learner takes it.  The learner takes them as it
always does, with counting, probe states and episodes.  How many messages a real worker sends is measured beforehand,
by one that collects alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from clusterenv_hpc.bench.command import Options
from clusterenv_hpc.bench.ranks import barrier, say
from clusterenv_hpc.bench.rollout import WARM_UP, Case
from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.collect import Collector, Slot


class _Repeating:
    """Collects into each slot once, and then leaves it as it is."""

    def __init__(self) -> None:
        self._collect: Callable[..., None] = Collector.collect
        self._filled: set[int] = set()

    def install(self) -> None:
        outer = self

        def collect(self: Collector, slot: Slot, num_steps: int, poll: Callable[[], None]) -> None:
            if id(slot) not in outer._filled:
                outer._collect(self, slot, num_steps, poll)
                outer._filled.add(id(slot))

        Collector.collect = collect  # type: ignore[method-assign]

    def remove(self) -> None:
        Collector.collect = self._collect  # type: ignore[method-assign]


def _flood(comm: Any, case: Case, seed: int) -> dict[str, float]:
    workers = comm.Get_size() - 1
    repeating = _Repeating()
    if comm.Get_rank():
        repeating.install()
    envs = ClusterEnv(
        case.source.env, case.num_envs * workers, policy=case.policy(), env_kwargs=case.source.kwargs,
        backend=case.source.backend, comm=comm, seed=seed, exit_workers=False,
    )  # fmt: skip
    if not envs.is_learner:
        repeating.remove()
        return {}
    rollouts = envs.rollouts(case.options.num_steps)
    for _ in range(WARM_UP * workers):
        next(rollouts)
    count = 0
    before = envs.stats.rollout_bytes
    began, cpu = time.perf_counter(), time.process_time()
    while (seconds := time.perf_counter() - began) < case.options.seconds:
        next(rollouts)
        count += 1
    cpu = time.process_time() - cpu
    size = (envs.stats.rollout_bytes - before) / count
    rollouts.close()
    envs.close()
    return {"us_per_message": seconds / count * 1e6, "cpu_us_per_message": cpu / count * 1e6, "message_bytes": size}


def run(comm: Any, options: Options) -> dict[str, Any]:
    """All environments; ``us_per_message`` is the largest."""
    results: dict[str, Any] = {}
    for name in options.env.split(","):
        case, floods, rates = Case(name, options), [], []
        for repeat in range(options.repeats):
            barrier(comm)
            floods.append(_flood(comm, case, repeat))
            barrier(comm)
            rates.append(comm.bcast(case.bare(repeat) if comm.Get_rank() == 1 else None, root=1))
        if comm.Get_rank():
            continue
        row = {key: statistics.median(flood[key] for flood in floods) for key in floods[0]}
        row["worker_messages_per_s"] = statistics.median(rates) / (options.num_steps * case.num_envs)
        row["workers_served"] = 1e6 / row["us_per_message"] / row["worker_messages_per_s"]
        results[name] = row
        say(
            f"{name}: {row['us_per_message']:.0f} us for a message of {row['message_bytes'] / 1e3:.0f} kB; "
            f"serves {row['workers_served']:.0f} workers that send {row['worker_messages_per_s']:.1f} a second each"
        )
    if comm.Get_rank():
        return {}
    return {"us_per_message": max(row["us_per_message"] for row in results.values()), "results": results}
