"""The gradient worker: samples trajectories of fixed length at the point it was given, and gives back their gradient.

``serve`` is a generator that yields False where it would wait and True when it has done something, so that the same
code runs on a rank of its own and within the learner's process.  Between two environment steps the worker looks whether
a new point has come; if so it gives up what it is doing (within one process nobody else runs meanwhile: none comes).

Random numbers depend on (seed, worker, version, number of the unit), not on what happened before: work that was given
up leaves no trace, and the same units are the same gradients whatever carries them.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clusterenv_hpc.comm.channel import Backoff, Channel, ClusterError, Deadline, Port
from clusterenv_hpc.comm.codec import decode, encode
from clusterenv_hpc.comm.messages import Command, Report, note
from clusterenv_hpc.comm.messages import Tag as Stream
from clusterenv_hpc.envs import build_vector_env, encode_space
from clusterenv_hpc.envs.build import SyncEnvs
from clusterenv_hpc.gradients.aggregators import Aggregator
from clusterenv_hpc.gradients.gradient_settings import GradientSettings
from clusterenv_hpc.gradients.nigt import Optimizer
from clusterenv_hpc.gradients.policy_gradient import Sampler, Trajectories, summed_gradient
from clusterenv_hpc.gradients.tree_sum import TreeSum
from clusterenv_hpc.gradients.wire import ENDLESS, UNIT_HEADER, Order, Tag, gradient_layout, point_layout
from clusterenv_hpc.policies import check_policy, load_flat_weights, num_weights, weights_layout

ALIVE_EVERY_S = 5.0
LOOK_EVERY_S = 1e-3
"""How often a worker at work looks for notes; for a new point it looks at every step."""
GRACE_S = 5.0
UNACKNOWLEDGED = 8
"""allreduce: gradients a worker keeps apart until it knows that they count."""


@dataclass
class _Slot:
    """A gradient on its way to the learner."""

    header: NDArray[Any]
    gradient: NDArray[np.float32]
    port: Port
    due: float | None = None  # when its injected delay is over; None: not waiting


@dataclass
class _Kept:
    """allreduce: the sum of what counts for sure, and single units of which that is not known yet."""

    total: NDArray[np.float64]
    count: int = 0
    open: deque[tuple[int, NDArray[np.float32]]] = field(default_factory=deque)

    def clear(self) -> None:
        self.total[:] = 0.0
        self.count = 0
        self.open.clear()

    def settle(self, count: int) -> None:
        """The first ``count`` gradients count."""
        while self.open and self.count < count:
            gradients, vector = self.open.popleft()
            self.total += vector
            self.count += gradients


class GradientWorker:
    """One worker's side of the wire.

    Args:
        channel: to the learner.
        settings: what to build.
        policy: a copy of one's own.
        aggregator, optimizer: as the learner has them; used with the transport allreduce only.
    """

    def __init__(
        self,
        channel: Channel,
        settings: GradientSettings,
        policy: torch.nn.Module,
        aggregator: Aggregator,
        optimizer: Optimizer,
    ) -> None:
        self.channel, self.settings, self.policy = channel, settings, policy
        self.aggregator, self.optimizer = aggregator, optimizer
        self.index = channel.rank - 1
        self.compute_s = settings.compute_s[self.index] if settings.compute_s else 0.0
        self.communication_s = settings.communication_s[self.index] if settings.communication_s else 0.0
        self.size = num_weights(policy)
        self.version, self.share, self.unit = -1, 0, 0
        self.cancelled = 0
        self._envs: Any = None
        self._leaving = False
        self._met: list[Any] | None = None
        self._begun: list[int] | None = None
        self._point_came: float | None = None
        self._next_look = self._last_sign = 0.0
        self._link_free = 0.0
        self._slots: list[_Slot] = []
        self._queue: deque[_Slot] = deque()
        self._ports: list[Port] = []

    # -- the loop -----------------------------------------------------------------------------------------------------

    def serve(self) -> Iterator[bool]:
        """Introduce itself, then compute gradients until told to leave."""
        try:
            self._build()
            while not self._leaving:
                self._next_look = 0.0
                self._listen()
                self._adopt()
                if self._met is not None:
                    yield from self._reduce()
                elif self.version < 0 or self.share == 0 or self._must_wait():
                    yield False
                else:
                    with _one_thread():
                        self._work()
                    yield True
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            yield from self._fail(error)
        finally:
            self._release()

    def _build(self) -> None:
        settings, channel, policy = self.settings, self.channel, self.policy
        self._envs = build_vector_env(settings.source(self.index), settings.envs_per_worker)
        if isinstance(self._envs, SyncEnvs):
            self._envs.record_infos = False  # nobody reads them
        policy.eval()
        observation_space, action_space = self._envs.single_observation_space, self._envs.single_action_space
        self.distribution = check_policy(policy, observation_space, action_space)
        self.sampler = Sampler(self._envs, self.distribution, settings.horizon, ending=settings.ending)
        self.generator = torch.Generator()
        if settings.transport == "p2p":
            layout = point_layout(self.size)
            buffer = layout.allocate()
            self._point = layout.views(buffer)
            self._point_port = channel.incoming(buffer, 0, Tag.POINT)
            self._point_port.start()
            self._ports.append(self._point_port)
        else:
            self._kept = _Kept(np.zeros(self.size))
            self._sum = TreeSum(channel, self.size + 1)
        hello = {
            "rank": channel.rank,
            "host": channel.host,
            "agreed": settings.agreed(),
            "layout": weights_layout(policy),
            "observation_space": encode_space(observation_space),
            "action_space": encode_space(action_space),
        }
        channel.send_note(0, Stream.REPORT, note(Report.HELLO, encode(hello, "the handshake")))

    def _fail(self, error: BaseException) -> Iterator[bool]:
        """Tell the learner, and wait until it lets this rank go; end the job if it does not."""
        report = {
            "cause": f"{type(error).__name__}: {error}",
            "host": self.channel.host,
            "traceback": "".join(traceback.format_exception(error))[-20_000:],
        }
        self.channel.send_note(0, Stream.REPORT, note(Report.ERROR, encode(report)))
        deadline = Deadline(GRACE_S)
        while not deadline.passed and not self._leaving:
            self._next_look = 0.0
            self._listen(leaving_only=True)
            yield False
        if not self._leaving:
            print(f"clusterenv-hpc: rank {self.channel.rank} (worker, {self.channel.host}) failed: {report['cause']}")
            self.channel.abort(1)

    def _release(self) -> None:
        for port in (*self._ports, *(slot.port for slot in self._slots)):
            port.free()
        if hasattr(self, "_sum"):
            self._sum.free()
        if self._envs is not None:
            self._envs.close()
        self.channel.send_note(0, Stream.REPORT, note(Report.LEFT))

    # -- what comes in ------------------------------------------------------------------------------------------------

    def _listen(self, leaving_only: bool = False) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        while (arrived := self.channel.take_note(Stream.COMMAND, 0)) is not None:
            kind, body = arrived[1][0], arrived[1][1:]
            if kind in (Order.LEAVE, Command.LEAVE):
                self._leaving = True
            elif leaving_only:
                continue
            elif kind == Order.MET:
                self._met = decode(body)
            elif kind == Order.ACKNOWLEDGED:
                version, count = decode(body)
                if version == self.version:
                    self._kept.settle(count)
            elif kind == Order.STATE:
                state = {name: torch.from_numpy(np.array(array)) for name, array in decode(body).items()}
                self.optimizer.load_state_dict(state)
                self._move_to(self.optimizer.updates, 0, self.optimizer.point)
            elif kind == Order.BEGIN:
                self._begun = decode(body)
        if now > self._last_sign + ALIVE_EVERY_S:
            self._last_sign = now
            self.channel.send_note(0, Stream.REPORT, note(Report.ALIVE))

    def _adopt(self) -> None:
        """Go to a new point, if one has come and its injected delay is over."""
        if self._begun is not None and self._begun[0] == self.version:
            self.share, self._begun = self._begun[1], None
        if not self._new_point():
            return
        header = self._point["header"][0]
        self._move_to(int(header["version"]), int(header["share"]), self._point["theta"])
        self._point_came = None
        self._point_port.start()

    def _new_point(self) -> bool:
        if self.settings.transport != "p2p" or not self._point_port.done():
            return False
        if self.communication_s == 0.0:
            return True
        if self._point_came is None:
            self._point_came = time.monotonic()
        return time.monotonic() >= self._point_came + self.communication_s

    def _move_to(self, version: int, share: int, theta: NDArray[np.float32]) -> None:
        load_flat_weights(self.policy, theta)
        if version != self.version:  # else it is only asked for more
            self.unit = 0
        self.version, self.share = version, share

    def _undisturbed(self) -> bool:
        """Whether to go on with the unit in hand; asked between any two steps."""
        self._send_due()
        self._listen()
        return not (self._leaving or self._met is not None or self._new_point())

    # -- one unit -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        began = time.monotonic()
        units = self._sample()
        if units is not None:
            slot = self._slot()
            gradient = slot.gradient if slot is not None else np.empty(self.size, dtype=np.float32)
            summed_gradient(
                self.policy,
                self.distribution,
                units,
                self.settings.gamma,
                baseline=self.settings.baseline,
                out=gradient,
            )
            while (left := began + self.compute_s - time.monotonic()) > 0 and self._undisturbed():
                time.sleep(min(left, LOOK_EVERY_S))
        if units is None or not self._undisturbed():
            self.cancelled += 1
            return
        self.unit += 1
        if self.share != ENDLESS:
            self.share = max(0, self.share - len(units))
        header = self._header(len(units), time.monotonic() - began)
        if slot is None:
            header["finite"] = np.isfinite(gradient).all()
            if header["finite"][0]:
                self._kept.open.append((len(units), gradient))
            self.channel.send_note(0, Tag.COUNT, header.tobytes())
        else:
            slot.header[:] = header
            # Sends of one worker do not overlap: the next waits until the link is free.
            self._link_free = slot.due = max(time.monotonic(), self._link_free) + self.communication_s
            self._queue.append(slot)
            self._send_due()

    def _sample(self) -> Trajectories | None:
        words = np.random.SeedSequence([self.settings.seed, self.index, self.version, self.unit]).generate_state(4)
        self.generator.manual_seed(int(words[0]) << 32 | int(words[1]))
        renewed = self.settings.source(self.index).backend == "envpool"  # a seed would build its environments anew
        seed = None if renewed else int(words[2]) << 30 | int(words[3]) >> 2
        return self.sampler.collect(self.policy, self.generator, self._undisturbed, seed)

    def _header(self, count: int, seconds: float) -> NDArray[Any]:
        returns, lengths = self.sampler.first_episodes()
        header = np.zeros(1, dtype=UNIT_HEADER)
        header["version"], header["count"], header["seconds"] = self.version, count, seconds
        header["env_steps"], header["episodes"] = self.sampler.env_steps, len(returns)
        header["return_sum"], header["return_square_sum"] = returns.sum(), (returns**2).sum()
        header["length_sum"], header["cancelled"] = lengths.sum(), self.cancelled
        self.cancelled = 0
        return header

    def _must_wait(self) -> bool:
        """Whether nothing can be begun, for want of room for its gradient."""
        self._send_due()
        if self.settings.transport == "allreduce":
            return len(self._kept.open) >= UNACKNOWLEDGED
        return self._slot() is None

    def _slot(self) -> _Slot | None:
        """A free slot: two are made, or as many as an injected delay keeps busy; None for allreduce, or if all are
        taken."""
        if self.settings.transport == "allreduce":
            return None
        for slot in self._slots:
            if slot.due is None and slot.port.done():
                return slot
        if len(self._slots) >= 2 and self.communication_s == 0.0:
            return None
        layout = gradient_layout(self.size)
        buffer = layout.allocate()
        views = layout.views(buffer)
        self._slots.append(_Slot(views["header"], views["gradient"], self.channel.outgoing(buffer, 0, Tag.GRADIENT)))
        return self._slots[-1]

    def _send_due(self) -> None:
        while self._queue and (due := self._queue[0].due) is not None and due <= time.monotonic():
            slot = self._queue.popleft()
            slot.due = None
            slot.port.start()

    # -- allreduce ----------------------------------------------------------------------------------------------------

    def _reduce(self) -> Iterator[bool]:
        """The round is over: contribute what counts, and make the same update as everybody."""
        assert self._met is not None
        version, present, accepted = self._met
        self._met = None
        if version != self.version:
            raise ClusterError(f"rank {self.channel.rank}: round {version} is over, but this rank is at {self.version}")
        self._kept.settle(accepted)
        if not accepted:  # m-synchronous: the share was not finished
            self._kept.clear()
        ready = time.monotonic() + self.communication_s
        while time.monotonic() < ready:
            yield False
        self._sum.begin(self.aggregator.pack(self._kept.total, self._kept.count, present))
        deadline = Deadline(self.settings.timeout_s)
        while not self._sum.done():
            if deadline.passed:
                raise ClusterError(f"the sum of round {version} did not come within {deadline.seconds:g} s")
            if self._leaving:
                return
            self._listen()
            yield False
        self.optimizer.step(self.aggregator.unpack(self._sum.total))
        self._kept.clear()
        self._move_to(self.optimizer.updates, 0, self.optimizer.point)
        yield True


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small networks lose by a second thread, and several ranks share a machine."""
    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


def run_gradient_worker(worker: GradientWorker, backoff: Backoff, timeout_s: float) -> None:
    """Drive ``worker`` on a rank of its own until it leaves; end the job if the learner is silent for ``timeout_s``."""
    channel, deadline = worker.channel, Deadline(timeout_s)
    for busy in worker.serve():
        channel.progress()
        if busy:
            backoff.reset()
            deadline.renew()
        elif deadline.passed:
            print(
                f"clusterenv-hpc: rank {channel.rank} (worker, {channel.host}) heard nothing from the learner (rank 0) "
                f"for {timeout_s:g} s and ends the job",
                flush=True,
            )
            channel.abort(1)
        else:
            backoff.wait()
    channel.flush(Deadline(GRACE_S))
