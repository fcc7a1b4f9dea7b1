"""``GradientCluster``: workers that return gradients of fixed-length trajectories, and the learner that averages them.

Every rank runs the same script.  On rank 0 the constructor returns; on the others it serves, and leaves the process by
``SystemExit`` when the learner is done.  With one rank the workers live in this process.

    optimizer = NIGT(flat_weights(policy), alpha=0.05, eta=0.1)
    settings = GradientSettings((EnvSource("CartPole-v1"),), horizon=200)
    with GradientCluster(settings, policy, Rennala(20), optimizer) as cluster:
        while optimizer.updates < 1000:
            update = cluster.update()
    load_flat_weights(policy, optimizer.iterate)

The next point is sent out before ``update`` returns, so that no worker waits for what the learner does in between.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clusterenv_hpc.comm.channel import Backoff, Channel, ClusterError, HandshakeError, WorkerError
from clusterenv_hpc.comm.local import LocalHub
from clusterenv_hpc.comm.world import Ending, default_backoff, open_mpi_channel
from clusterenv_hpc.gradients.aggregators import Aggregator, PerArrival, Verdict
from clusterenv_hpc.gradients.checks import one_of, positive_int
from clusterenv_hpc.gradients.gradient_crew import GradientCrew
from clusterenv_hpc.gradients.gradient_settings import GradientSettings
from clusterenv_hpc.gradients.gradient_worker import GradientWorker
from clusterenv_hpc.gradients.links import AllReduce, GradientStats, Link, PointToPoint
from clusterenv_hpc.gradients.nigt import Optimizer
from clusterenv_hpc.gradients.updates import SUMMED, Update, units_of
from clusterenv_hpc.jobs.environment import in_mpi_world, world_problem
from clusterenv_hpc.policies import num_weights, weights_layout
from clusterenv_hpc.worker import GRACE_S, run_worker

log = logging.getLogger(__name__)

WARN_AFTER_S = 10.0
LOOK_EVERY_S = 0.05
REFUSALS_ALLOWED = 100
"""Gradients of a worker that is needed, in a row, that are not finite, before the learner gives up."""


class GradientCluster:
    """The learner's side; see the module.

    Args:
        settings: the same on every rank.
        policy: built alike on every rank; on the learner only its layout is read.
        aggregator: the rule.
        optimizer: at the start of the run, or where it goes on; of the policy's weights, with float32 points.
        comm: an mpi4py communicator; default ``COMM_WORLD`` under an MPI launcher, else none.
        num_workers: workers within this process where there is one rank; default 1.
        first_target: M of the first update of all (M_init).
        learner_timeout: seconds without word from the learner after which a worker ends the job.
        on_worker_loss: ``abort``, or ``continue`` without a worker that dies: over p2p, with an MPI that survives it
            (ULFM), and with rules that any worker's gradients can meet; others end the run and say whom they need.
        exit_workers: if False, the constructor returns a closed object on workers when the learner has closed.

    Raises:
        HandshakeError: the ranks do not fit together.
        WorkerError: a worker could not build its environments.
        ValueError: settings that cannot be.
    """

    def __init__(
        self,
        settings: GradientSettings,
        policy: torch.nn.Module,
        aggregator: Aggregator,
        optimizer: Optimizer,
        *,
        comm: Any = None,
        num_workers: int | None = None,
        first_target: int | None = None,
        learner_timeout: float = 3600.0,
        on_worker_loss: str = "abort",
        exit_workers: bool = True,
        backoff: Backoff | None = None,
    ) -> None:
        self.closed = True
        self.settings, self.rule, self.optimizer, self._first_target = settings, aggregator, optimizer, first_target
        size = num_weights(policy)
        if optimizer.size != size or optimizer.point.dtype != np.float32:
            raise ValueError(
                f"the optimizer must hold the policy's {size} weights and give float32 points, "
                f"got {optimizer.size} and {optimizer.point.dtype}"
            )
        if settings.transport == "allreduce" and isinstance(aggregator, PerArrival):
            raise ValueError("per-arrival updates have no all-reduce form: use transport=p2p")
        one_of("on_worker_loss", on_worker_loss, ("abort", "continue"))
        self.channel = channel = self._open(comm, num_workers, policy, survive=on_worker_loss == "continue")
        self.num_workers = channel.size - 1
        settings.check_workers(self.num_workers)
        backoff = backoff or default_backoff(channel)
        self.is_learner = channel.rank == 0
        if not self.is_learner:
            torch.set_num_threads(1)
            ending = Ending(channel, "worker", lambda clean: clean)
            worker = GradientWorker(channel, settings, policy.to("cpu"), aggregator, optimizer)
            run_worker(worker, channel, backoff, learner_timeout)
            ending.withdraw()
            if exit_workers:
                raise SystemExit(0)
            return
        self.stats = GradientStats()
        self._crew = GradientCrew(channel, settings, backoff)
        self._refused = [0] * self.num_workers
        self._ending = Ending(channel, "learner", self._leave) if channel.transport != "local" else None
        self._crew.meet(str(weights_layout(policy)))
        aggregator.name_of = lambda worker: self._crew.names([worker])
        kind = PointToPoint if settings.transport == "p2p" else AllReduce
        self._link: Link = kind(channel, aggregator, optimizer, self.stats)
        self.closed = False
        self._open_round(range(self.num_workers))

    def _open(self, comm: Any, num_workers: int | None, policy: torch.nn.Module, survive: bool) -> Channel:
        if comm is not None or in_mpi_world():
            channel = open_mpi_channel(comm, survive)
            problem = world_problem(channel.size, os.environ) if comm is None else None
            if problem is not None:
                raise HandshakeError(problem)
            if channel.size > 1:
                return channel
        hub = LocalHub(1 + (1 if num_workers is None else positive_int("num_workers", num_workers)))
        self.settings.check_workers(hub.size - 1)
        for rank in range(1, hub.size):
            own = (copy.deepcopy(policy).to("cpu"), copy.deepcopy(self.rule), copy.deepcopy(self.optimizer))
            hub.add_worker(rank, GradientWorker(hub.channel(rank), self.settings, *own).serve())
        return hub.channel(0)

    # -- updates ------------------------------------------------------------------------------------------------------

    def wait(self, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the rule is met; False as soon as ``give_up()``, which is asked now and then, says so.

        Nothing has changed then, and another call goes on waiting.  Raises what :meth:`update` does.
        """
        if self.closed or self._crew.broken:
            raise ClusterError("update() was called after close() or after a worker had failed")
        began = looked = time.monotonic()
        warned, busy, given_up = False, False, False

        def met() -> bool:
            nonlocal warned, busy, looked, given_up
            busy = self._link.poll(self._take)
            if (now := time.monotonic()) > looked + LOOK_EVERY_S:
                looked, given_up = now, give_up()
                if not warned and now > began + WARN_AFTER_S and (needed := self.rule.waiting_for()):
                    warned = True
                    log.warning("version %d waits for %s", self.rule.version, self._crew.names(needed))
            return self.rule.ready() or given_up

        what = f"computing gradients of version {self.rule.version}"
        self._crew.wait(met, self.rule.waiting_for, what, lambda: busy)
        return self.rule.ready()

    def update(self) -> Update:
        """Wait until the rule is met, make the optimizer's update, and send the next point out.

        Raises:
            SilenceError: a worker that the rule cannot do without was silent for too long, or all were.
            WorkerError: a worker failed, or gives nothing but gradients that are not finite.
        """
        self.wait()
        everybody = range(self.num_workers)
        done = self._link.estimate(lambda condition, what: self._crew.wait(condition, lambda: everybody, what))
        step = self.optimizer.step(done.gradient)
        sums = self._sums
        sums[done.counts == 0] = 0.0  # what was taken and then dropped, as begun shares are
        self._open_round([self.last_worker] if isinstance(self.rule, PerArrival) else everybody)
        return Update(step, done, units_of(sums.sum(axis=0)), [units_of(one) for one in sums])

    def _open_round(self, workers: Iterable[int]) -> None:
        target = self._first_target if self.optimizer.updates == 0 else None
        self._sums = np.zeros((self.num_workers, len(SUMMED)))
        absent = () if self.rule.needs_everyone else self._crew.lost
        self.rule.start(self.optimizer.updates, self.num_workers, target=target, absent=absent)
        self._link.announce(workers)

    def _take(self, worker: int, header: Any, gradient: NDArray[np.float32] | None) -> None:
        version, count = int(header["version"]), int(header["count"])
        self.stats.units[worker] += 1
        self.stats.seconds[worker] += float(header["seconds"])
        self.stats.cancelled[worker] += int(header["cancelled"])
        self._crew.alive(worker)
        if gradient is None and not header["finite"]:
            verdict = self.rule.refuse(worker, version, count)
        else:
            verdict = self.rule.offer(worker, version, gradient, count)
        self.last_worker = worker
        if verdict is Verdict.ACCEPTED:
            self._refused[worker] = 0
            self._sums[worker] += [float(header[key]) for key in SUMMED]
            return
        if verdict is Verdict.REJECTED:
            self._refused[worker] += 1
            if self._hopeless(worker):
                raise WorkerError(
                    f"{self._crew.names([worker])}: its last {REFUSALS_ALLOWED} gradients were not finite; look at the "
                    "rewards of its environment, or choose a smaller alpha", worker + 1, self._crew.host(worker),
                )  # fmt: skip
        if self.rule.fixed_share and (verdict is Verdict.REJECTED or isinstance(self.rule, PerArrival)):
            self._link.announce([worker])  # it gave one that does not count, and would rest now

    def _hopeless(self, worker: int) -> bool:
        """Whether nothing but refused gradients come from ``worker``, and the rule needs it; or from all that live."""
        broken = {w for w, refused in enumerate(self._refused) if refused >= REFUSALS_ALLOWED}
        others = set(range(self.num_workers)) - self._crew.lost - broken
        return worker in broken and (worker in self.rule.waiting_for() or not others)

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def hosts(self) -> list[str]:
        """Of the learner, then of every worker."""
        return [self.channel.host, *(self._crew.host(worker) for worker in range(self.num_workers))]

    @property
    def transport(self) -> str:
        """What carries the messages: ``local``, or the MPI library's name."""
        return self.channel.transport

    @property
    def version(self) -> int:
        """Updates made."""
        return self.optimizer.updates

    @property
    def lost(self) -> list[int]:
        """Workers that are known to be dead."""
        return sorted(self._crew.lost)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send the workers home.  One that does not go ends with the job, whose exit code then says so."""
        if self.is_learner and not self.closed:
            self.closed = True
            if missing := self._crew.dismiss():
                log.warning("%s did not leave within %g s: the job is to be ended at its end", missing, GRACE_S)
            self._link.free()
            if self.channel.transport == "local":
                self.channel.close()

    def abort(self) -> None:
        """After a failure: send the workers home at once, and end the job if one does not go."""
        self.closed = True
        if self._ending is not None:
            self._ending.end(clean=False)

    def _leave(self, clean: bool) -> bool:
        if clean and not self.closed:
            self.close()
        return not self._crew.dismiss()

    def __enter__(self) -> GradientCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the exception goes on; whoever ends the process sends the workers home
            self.closed = True
