"""What each rank of a run does: the learner drives it, a worker serves until it is sent home."""

from __future__ import annotations

import socket
import sys
import time
import traceback
from typing import Any

import torch

from clusterenv_hpc.comm.channel import Channel, ClusterError
from clusterenv_hpc.run.build import build_policy, spaces_of
from clusterenv_hpc.run.errors import abort_world, describe, exit_code, wants_traceback
from clusterenv_hpc.run.evaluator import Evaluating
from clusterenv_hpc.run.gradient_run import GradientRun, make_cluster
from clusterenv_hpc.run.interrupt import Interrupted, StopSignals, ignore_stop_signals
from clusterenv_hpc.run.learner_run import LearnerRun
from clusterenv_hpc.run.memory import demand_memory
from clusterenv_hpc.run.owner import Ownership
from clusterenv_hpc.run.randomness import seeds_of
from clusterenv_hpc.run.rollout_run import RolloutRun, make_envs
from clusterenv_hpc.run.run_dir import RunDir
from clusterenv_hpc.run.schema import Config
from clusterenv_hpc.run.tasks import gradient_method

SAME_ERROR_S = 1.5
"""How long a worker keeps an error to itself that the learner probably tells as well."""


def work(config: Config, comm: Any) -> int:
    """A worker rank's life; leaves by SystemExit when the learner is done."""
    ignore_stop_signals(config.slurm.signal)
    torch.set_num_threads(1)
    try:
        spaces = spaces_of(config.env)
        demand_memory(config, *spaces)
        policy = build_policy(config.policy, *spaces, seeds_of(config.seed, 0)[0], config.algo)
        if gradient_method(config):
            make_cluster(config, policy, None, comm)
        else:
            make_envs(config, policy, comm=comm, version=0)
    except Exception as error:
        time.sleep(SAME_ERROR_S)
        rank, host = comm.Get_rank(), socket.gethostname()
        print(f"clusterenv-hpc: rank {rank} (worker, {host}) failed: {describe(error)}", file=sys.stderr, flush=True)
        abort_world(comm, exit_code(error))
    return 1


def learn(
    config: Config, run: RunDir, comm: Any = None, aside: Channel | None = None, owner: Ownership | None = None
) -> int:
    """The learner's life.  Returns the exit code; what goes wrong is told in one line, and ends every rank.

    Args:
        config: with ``workers`` as they are: the ranks beside this one, or 0.
        run: where to write.
        comm: an mpi4py communicator where there are worker ranks.
        aside: to the rank that evaluates, where there is one.
        owner: this process's hold on ``run``; given back where this process may not return from here.
    """
    with StopSignals(config.slurm.signal).listening() as stop:
        learner = kind_of_run(config)(config, run, comm, stop)
        learner.owner = owner
        if aside is not None:
            learner.evaluating = Evaluating(aside, config.eval.sampled)
        try:
            return learner.run()
        except (Exception, Interrupted) as error:
            ignore_stop_signals(config.slurm.signal)  # the end has begun
            where = f"rank 0 (learner, {socket.gethostname()}): " if comm is not None else ""
            line = describe(error) if isinstance(error, ClusterError) else where + describe(error)
            learner.fail(line, error)
            print(f"clusterenv-hpc: {line}", file=sys.stderr, flush=True)
            if wants_traceback():
                traceback.print_exception(error)
            code = exit_code(error)
            if owner is not None:
                owner.release()
            if learner.envs is not None:
                learner.envs.abort()
            elif comm is not None:
                abort_world(comm, code)
            return code
        finally:
            if learner.evaluating is not None:
                learner.evaluating.leave()


def kind_of_run(config: Config) -> type[LearnerRun]:
    """What drives the run: rollouts and a learner, or gradients and an optimizer."""
    if gradient_method(config):
        return GradientRun
    return RolloutRun
