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
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clusterenv_hpc.comm.channel import (
    Backoff,
    Channel,
    ClusterError,
    Deadline,
    HandshakeError,
    SilenceError,
    WorkerError,
)
from clusterenv_hpc.comm.codec import decode
from clusterenv_hpc.comm.local import LocalHub
from clusterenv_hpc.comm.messages import Command, Report, note
from clusterenv_hpc.comm.messages import Tag as Stream
from clusterenv_hpc.comm.world import Ending, in_mpi_world, open_mpi_channel
from clusterenv_hpc.gradients.aggregators import Aggregator, PerArrival, Verdict
from clusterenv_hpc.gradients.checks import one_of, positive_int
from clusterenv_hpc.gradients.gradient_settings import GradientSettings
from clusterenv_hpc.gradients.gradient_worker import GRACE_S, GradientWorker, run_gradient_worker
from clusterenv_hpc.gradients.links import AllReduce, GradientStats, Link, PointToPoint
from clusterenv_hpc.gradients.nigt import Optimizer
from clusterenv_hpc.gradients.updates import SUMMED, Update, units_of
from clusterenv_hpc.policies import num_weights, weights_layout

log = logging.getLogger(__name__)

WARN_AFTER_S = 10.0
LOOK_EVERY_S = 0.05
REFUSALS_ALLOWED = 100
"""Gradients of one worker, in a row, that are not finite, before the learner gives up."""


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
        self._backoff = backoff or Backoff(spin_s=20e-6 if channel.oversubscribed else 100e-6)
        self.is_learner = channel.rank == 0
        if not self.is_learner:
            torch.set_num_threads(1)
            ending = Ending(channel, "worker", lambda clean: clean)
            run_gradient_worker(
                GradientWorker(channel, settings, policy.to("cpu"), aggregator, optimizer),
                self._backoff,
                learner_timeout,
            )
            ending.withdraw()
            if exit_workers:
                raise SystemExit(0)
            return
        self.stats = GradientStats()
        self._left: set[int] = set()
        self._lost: set[int] = set()
        self._hellos: dict[int, dict[str, Any]] = {}
        self._heard = dict.fromkeys(range(self.num_workers), time.monotonic())
        self._refused = [0] * self.num_workers
        self._busy = False  # whether anything came since the last wait
        self._ending = Ending(channel, "learner", self._leave) if channel.transport != "local" else None
        self._meet(str(weights_layout(policy)))
        aggregator.name_of = lambda worker: self._names([worker])
        kind = PointToPoint if settings.transport == "p2p" else AllReduce
        self._link: Link = kind(channel, aggregator, optimizer, self.stats)
        self.closed = False
        self._open_round(range(self.num_workers))

    def _open(self, comm: Any, num_workers: int | None, policy: torch.nn.Module, survive: bool) -> Channel:
        if comm is not None or in_mpi_world():
            from clusterenv_hpc.jobs.environment import world_problem

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

    def _meet(self, layout: str) -> None:
        """The handshake: hear every worker, check that all fit together."""
        self._wait(lambda: len(self._hellos) == self.num_workers, self._silent_at_start, "starting")
        first = self._hellos[0]
        for worker, hello in self._hellos.items():
            pairs = [("the policy's layout", layout, hello["layout"])]
            pairs += [(key, value, hello["agreed"].get(key)) for key, value in self.settings.agreed().items()]
            pairs += [(f"the {key}", first[key], hello[key]) for key in ("observation_space", "action_space")]
            for what, expected, got in pairs:
                if expected != got:
                    raise HandshakeError(
                        f"the ranks do not fit together: {what} is {str(expected)[:160]} here but {str(got)[:160]} on "
                        f"{self._names([worker])}; every rank must run the same script with the same arguments"
                    )

    # -- updates ------------------------------------------------------------------------------------------------------

    def update(self) -> Update:
        """Wait until the rule is met, make the optimizer's update, and send the next point out.

        Raises:
            SilenceError: a worker that the rule cannot do without was silent for too long, or all were.
            WorkerError: a worker failed, or gives nothing but gradients that are not finite.
        """
        if self.closed:
            raise ClusterError("update() was called after close() or after a worker had failed")
        self._sums = np.zeros((self.num_workers, len(SUMMED)))
        began, warned = time.monotonic(), False

        def met() -> bool:
            nonlocal warned
            self._busy = self._link.poll(self._take)
            if not warned and time.monotonic() > began + WARN_AFTER_S and (needed := self.rule.waiting_for()):
                warned = True
                log.warning("version %d waits for %s", self.rule.version, self._names(needed))
            return self.rule.ready()

        self._wait(met, self.rule.waiting_for, f"computing gradients of version {self.rule.version}")
        done = self._link.estimate(lambda condition, what: self._wait(condition, lambda: range(self.num_workers), what))
        step = self.optimizer.step(done.gradient)
        everybody = not isinstance(self.rule, PerArrival)
        self._open_round(range(self.num_workers) if everybody else [self.last_worker])
        self._sums[done.counts == 0] = 0.0  # what was taken and then dropped, as begun shares are
        return Update(step, done, units_of(self._sums.sum(axis=0)), [units_of(sums) for sums in self._sums])

    def _open_round(self, workers: Iterable[int]) -> None:
        target = self._first_target if self.optimizer.updates == 0 else None
        absent = () if self.rule.needs_everyone else self._lost
        self.rule.start(self.optimizer.updates, self.num_workers, target=target, absent=absent)
        self._link.announce(workers)

    def _take(self, worker: int, header: Any, gradient: NDArray[np.float32] | None) -> None:
        version, count = int(header["version"]), int(header["count"])
        self.stats.units[worker] += 1
        self.stats.seconds[worker] += float(header["seconds"])
        self.stats.cancelled[worker] += int(header["cancelled"])
        self._heard[worker] = time.monotonic()
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
            if self._refused[worker] >= REFUSALS_ALLOWED:
                self.closed = True
                name, host = self._names([worker]), self._hellos[worker]["host"]
                raise WorkerError(
                    f"{name}: its last {REFUSALS_ALLOWED} gradients were not finite; look at the rewards of its "
                    "environment, or choose a smaller alpha", worker + 1, host,
                )  # fmt: skip
        if self.rule.fixed_share and (verdict is Verdict.REJECTED or isinstance(self.rule, PerArrival)):
            self._link.announce([worker])  # it gave one that does not count, and would rest now

    # -- waiting and hearing ------------------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool], needed: Callable[[], Iterable[int]], what: str) -> None:
        """Poll until ``condition()``; silence counts of workers that are needed, or of all of them."""
        self._backoff.reset()
        began = look = time.monotonic()
        try:
            while self._bury(needed, what) or not condition():
                self._busy = self._listen() or self._busy
                if (now := time.monotonic()) > look + LOOK_EVERY_S:
                    look = now
                    self._check_silence(began, needed(), what)
                if self.channel.progress() or self._busy:
                    self._busy = False
                    self._backoff.reset()
                else:
                    self._backoff.wait()
        except ClusterError:
            self.closed = True
            raise

    def _bury(self, needed: Callable[[], Iterable[int]], what: str) -> bool:
        """Part with workers that died; raises where that cannot be.  Always False."""
        if not self.channel.lost:
            return False
        dead = {rank - 1 for rank in self.channel.lost}
        for worker in sorted(dead - self._lost):
            log.warning("%s is dead", self._names([worker]))
        self._lost |= dead
        if len(dead) == self.num_workers:
            raise ClusterError(f"every worker is dead; the last of them: {self._names([max(dead)])}")
        if self.settings.transport == "allreduce":
            missed = dead
            remedy = "transport=allreduce sums over every rank: go on from the last checkpoint, or use p2p"
        else:
            missed = dead.intersection(needed())
            remedy = "its gradients are needed: go on from the last checkpoint with other workers"
        if missed:
            worker = min(missed)
            host = self._hellos.get(worker, {}).get("host", "unknown host")
            raise WorkerError(f"{self._names([worker])} is dead while {what}, and {remedy}", worker + 1, host)
        return False

    def _check_silence(self, began: float, needed: Iterable[int], what: str) -> None:
        """Silence is counted from ``began`` on: nobody listened before."""
        now, limit = time.monotonic(), self.settings.timeout_s
        silent = {w for w, heard in self._heard.items() if now - max(began, heard) > limit} - self._lost
        stuck = silent.intersection(needed) or (silent if len(silent) == self.num_workers - len(self._lost) else ())
        if stuck:
            raise SilenceError(
                f"{self._names(sorted(stuck))} gave no sign of life for {limit:g} s while {what}: dead or stuck; raise "
                "timeout_s if it only needs longer"
            )

    def _silent_at_start(self) -> list[int]:
        return [w for w in range(self.num_workers) if w not in self._hellos]

    def _listen(self) -> bool:
        busy = False
        while (arrived := self.channel.take_note(Stream.REPORT)) is not None:
            busy = True
            rank, kind, body = arrived[0], arrived[1][0], arrived[1][1:]
            self._heard[rank - 1] = time.monotonic()
            if kind == Report.HELLO:
                self._hellos[rank - 1] = decode(body)
            elif kind == Report.LEFT:
                self._left.add(rank)
            elif kind == Report.ERROR:
                report = decode(body)
                message = f"rank {rank} (worker, {report['host']}) failed: {report['cause']}"
                raise WorkerError(message, rank, report["host"], report["traceback"])
        return busy

    @property
    def hosts(self) -> list[str]:
        """Of the learner, then of every worker."""
        return [self.channel.host, *(self._hellos[worker]["host"] for worker in range(self.num_workers))]

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
        return sorted(self._lost)

    def _names(self, workers: Iterable[int]) -> str:
        names = [f"rank {w + 1} (worker, {self._hellos.get(w, {}).get('host', 'unknown host')})" for w in workers]
        return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send the workers home."""
        if self.is_learner and not self.closed:
            self.closed = True
            if not self._dismiss():
                raise ClusterError(f"{self._names(w - 1 for w in self._missing())} did not leave within {GRACE_S:g} s")
            self._link.free()
            if self.channel.transport == "local":
                self.channel.close()

    def abort(self) -> None:
        """After a failure: send the workers home at once, and end the job if one does not go."""
        self.closed = True
        if self._ending is not None:
            self._ending.end(clean=False)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.channel.size) if rank not in self._left | self.channel.lost]

    def _leave(self, clean: bool) -> bool:
        if clean and not self.closed:
            try:
                self.close()
            except ClusterError as error:
                print(f"clusterenv-hpc: {error}", file=sys.stderr, flush=True)
        return self._dismiss()

    def _dismiss(self) -> bool:
        """Tell every worker to leave its process; False if one did not confirm in time."""
        for rank in self._missing():
            self.channel.send_note(rank, Stream.COMMAND, note(Command.LEAVE))
        deadline, backoff = Deadline(GRACE_S), Backoff()
        while self._missing() and not deadline.passed:
            try:
                busy = self._listen()
            except WorkerError:  # the first failure is what counts; this one leaves by itself
                busy = True
            if not self.channel.progress() and not busy:
                backoff.wait()
        return not self._missing()

    def __enter__(self) -> GradientCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the exception goes on; whoever ends the process sends the workers home
            self.closed = True
