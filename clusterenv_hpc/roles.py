"""What part of the job this rank is (learner, worker, or follower in a worker's group), and what the others do."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from .comm.channel import Backoff, Channel, HandshakeError
from .comm.local import LocalHub
from .comm.world import (
    Ending,
    claim_world,
    default_backoff,
    ignore_interrupts,
    open_groups,
    open_mpi_channel,
    release_world,
    world_size,
)
from .envs.build import make_env
from .envs.group import Group, follow
from .handshake import deal
from .jobs.environment import in_mpi_world, world_problem
from .sync import SyncRule
from .worker import Worker, WorkerSettings, run_worker


def open_channel(
    comm: Any, num_workers: int | None, env_ranks: int, survive: bool
) -> tuple[Channel | None, Group | None]:
    """This rank's channel to the learner and its group, over MPI.  ``(None, None)``: there is one rank only."""
    if comm is None and not in_mpi_world():
        if env_ranks > 1:
            raise HandshakeError(
                f"env_ranks={env_ranks} needs ranks: start 1 + W * {env_ranks} of them with mpiexec or srun "
                "(one learner, W workers)"
            )
        return None, None
    channel, group = None, None
    size = world_size(comm)
    problem = world_problem(size, os.environ) if comm is None else None
    if problem is not None:
        raise HandshakeError(problem)
    if size > 1:
        claim_world(comm)
    if env_ranks > 1:
        channel, inner = open_groups(comm, env_ranks, survive)
        if inner is not None:
            group = Group(*inner, worker=(inner[1].world_rank(0) - 1) // env_ranks, workers=(size - 1) // env_ranks)
    elif size > 1:
        channel = open_mpi_channel(comm, survive)
    workers = (size - 1) // env_ranks
    if workers and num_workers is not None and num_workers != workers:
        raise HandshakeError(
            f"num_workers={num_workers}, but the job has {size} ranks: one learner and {workers} workers of "
            f"{env_ranks}; start {num_workers * env_ranks + 1} ranks, or leave num_workers out"
        )
    return channel, group


def local_channel(
    num_workers: int, settings: WorkerSettings, policy: torch.nn.Module | None, rule: SyncRule | None
) -> Channel:
    """A channel within this process, with its workers."""
    hub = LocalHub(1 + num_workers)
    for rank in range(1, hub.size):
        # A copy, as on a rank of its own: the local policy must be able to lag behind.
        local = None if policy is None else copy.deepcopy(policy).to("cpu")
        hub.add_worker(rank, Worker(hub.channel(rank), settings, local, rule).serve())
    return hub.channel(0)


def serve(
    channel: Channel | None,
    group: Group | None,
    comm: Any,
    settings: WorkerSettings,
    policy: torch.nn.Module | None,
    rule: SyncRule | None,
    backoff: Backoff | None,
    timeout: float,
) -> None:
    """A worker rank's life, or a follower's.  Ends the process, unless the workers are to go on with the script."""
    torch.set_num_threads(1)
    own = channel if channel is not None else group.channel if group is not None else None
    assert own is not None
    ending = Ending(own, "worker", lambda clean: clean)
    heed_interrupts = ignore_interrupts()
    if channel is not None:
        worker = Worker(channel, settings, None if policy is None else policy.to("cpu"), rule, group)
        run_worker(worker, channel, backoff or default_backoff(channel), timeout)
    elif group is not None:
        first, end = deal(settings.num_envs, group.workers)[group.worker]
        follow(group, lambda index: make_env(settings.source, first + index, group), end - first, timeout)
    ending.withdraw()
    if not settings.leave_on_close:
        raise SystemExit(0)
    release_world(comm)
    heed_interrupts()
