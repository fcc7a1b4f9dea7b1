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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clusterenv_hpc.acting import ALIVE_EVERY_S
from clusterenv_hpc.comm.channel import Channel
from clusterenv_hpc.comm.codec import encode
from clusterenv_hpc.comm.messages import Command, Report, note
from clusterenv_hpc.comm.messages import Tag as Stream
from clusterenv_hpc.envs import build_vector_env, encode_space
from clusterenv_hpc.envs.build import SyncEnvs
from clusterenv_hpc.gradients.aggregators import Aggregator
from clusterenv_hpc.gradients.gradient_settings import GradientSettings
from clusterenv_hpc.gradients.nigt import Optimizer
from clusterenv_hpc.gradients.policy_gradient import Sampler, Trajectories, summed_gradient
from clusterenv_hpc.gradients.wire import ENDLESS, UNIT_HEADER
from clusterenv_hpc.gradients.worker_links import Point, PointsIn, SumsStay, WorkerLink
from clusterenv_hpc.policies import PolicyError, check_policy, load_flat_weights, num_weights, weights_layout
from clusterenv_hpc.worker import interrupted, tell_failure

LOOK_EVERY_S = 1e-3
"""How often a worker at work looks for notes; for a new point it looks at every step."""


class GradientWorker:
    """One worker's side of the wire.

    Args:
        channel: to the learner.
        settings: what to build.
        policy: a copy of one's own.
        aggregator, optimizer: as the learner has them; used with the transport allreduce only.
    """

    closed = False
    """The learner always has something to say to this kind of worker."""

    def __init__(
        self,
        channel: Channel,
        settings: GradientSettings,
        policy: torch.nn.Module,
        aggregator: Aggregator,
        optimizer: Optimizer,
    ) -> None:
        self.channel, self.settings, self.policy = channel, settings, policy
        self._aggregator, self._optimizer = aggregator, optimizer
        self.index = channel.rank - 1
        self.compute_s = settings.compute_s[self.index] if settings.compute_s else 0.0
        self.version, self.share, self.unit = -1, 0, 0
        self.cancelled = 0
        self._envs: Any = None
        self._link: WorkerLink | None = None
        self._leaving = False
        self._next_look = self._last_sign = 0.0
        self._alive_every_s = min(ALIVE_EVERY_S, settings.timeout_s / 4)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def serve(self) -> Iterator[bool]:
        """Introduce itself, then compute gradients until told to leave."""
        try:
            link = self._link = self._build()
            while not self._leaving:
                self._next_look = 0.0
                self._listen(link)
                if (point := link.point()) is not None:
                    self._move_to(point)
                if self.share == 0 or not link.room():
                    yield point is not None
                else:
                    with _one_thread():
                        self._work(link)
                    yield True
        except GeneratorExit:
            raise
        except BaseException as error:
            if interrupted(error):
                raise
            yield from tell_failure(self.channel, self._describe(error))
        finally:
            self._release()

    def _build(self) -> WorkerLink:
        settings, channel, policy = self.settings, self.channel, self.policy
        self._envs = build_vector_env(settings.source(self.index), settings.envs_per_worker)
        if isinstance(self._envs, SyncEnvs):
            self._envs.record_infos = False  # nobody reads them
        policy.eval()
        observation_space, action_space = self._envs.single_observation_space, self._envs.single_action_space
        try:
            self.distribution = check_policy(policy, observation_space, action_space)
        except PolicyError as error:
            if len(settings.sources) == 1:
                raise
            raise PolicyError(
                f"the environments of all workers must have the same spaces, but the policy that suits worker 0 does "
                f"not suit worker {self.index}: {error}"
            ) from error
        self.sampler = Sampler(self._envs, self.distribution, settings.horizon, ending=settings.ending)
        self.generator = torch.Generator()
        communication_s = settings.communication_s[self.index] if settings.communication_s else 0.0
        link: WorkerLink
        if settings.transport == "p2p":
            link = PointsIn(channel, num_weights(policy), communication_s)
        else:
            link = SumsStay(channel, self._aggregator, self._optimizer, communication_s, settings.timeout_s)
        hello = {
            "rank": channel.rank,
            "host": channel.host,
            "agreed": settings.agreed(),
            "layout": weights_layout(policy),
            "observation_space": encode_space(observation_space),
            "action_space": encode_space(action_space),
        }
        channel.send_note(0, Stream.REPORT, note(Report.HELLO, encode(hello, "the handshake")))
        return link

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """What the learner is told of an exception."""
        return {
            "cause": f"{type(error).__name__}: {error}",
            "host": self.channel.host,
            "traceback": "".join(traceback.format_exception(error))[-20_000:],
        }

    def _release(self) -> None:
        if self._link is not None:
            self._link.free()
        if self._envs is not None:
            self._envs.close()
        self.channel.send_note(0, Stream.REPORT, note(Report.LEFT))

    # -- what comes in ------------------------------------------------------------------------------------------------

    def _listen(self, link: WorkerLink) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        while (arrived := self.channel.take_note(Stream.COMMAND, 0)) is not None:
            kind, body = arrived[1][0], arrived[1][1:]
            if kind == Command.LEAVE:
                self._leaving = True
            else:
                link.obey(kind, body)
        if now > self._last_sign + self._alive_every_s:
            self._last_sign = now
            self.channel.send_note(0, Stream.REPORT, note(Report.ALIVE))

    def _move_to(self, point: Point) -> None:
        if point.theta is not None:
            load_flat_weights(self.policy, point.theta)
        if point.version != self.version:  # else it is only asked for more
            self.unit = 0
        self.version, self.share = point.version, point.share
        self.cancelled += point.given_up

    def _undisturbed(self, link: WorkerLink) -> bool:
        """Whether to go on with the unit in hand; asked between any two steps."""
        self._listen(link)
        return not (self._leaving or link.disturbs())

    # -- one unit -----------------------------------------------------------------------------------------------------

    def _work(self, link: WorkerLink) -> None:
        began = time.monotonic()
        units = self._sample(link)
        if units is not None:
            summed_gradient(
                self.policy,
                self.distribution,
                units,
                self.settings.gamma,
                baseline=self.settings.baseline,
                out=link.buffer(),
            )
            while (left := began + self.compute_s - time.monotonic()) > 0 and self._undisturbed(link):
                time.sleep(min(left, LOOK_EVERY_S))
        if units is None or not self._undisturbed(link):
            self.cancelled += 1
            return
        self.unit += 1
        if self.share != ENDLESS:
            self.share = max(0, self.share - len(units))
        link.deliver(self._header(len(units), time.monotonic() - began))

    def _sample(self, link: WorkerLink) -> Trajectories | None:
        words = np.random.SeedSequence([self.settings.seed, self.index, self.version, self.unit]).generate_state(4)
        self.generator.manual_seed(int(words[0]) << 32 | int(words[1]))
        renewed = self.settings.source(self.index).backend == "envpool"  # a seed would build its environments anew
        seed = None if renewed else int(words[2]) << 30 | int(words[3]) >> 2
        return self.sampler.collect(self.policy, self.generator, lambda: self._undisturbed(link), seed)

    def _header(self, count: int, seconds: float) -> NDArray[Any]:
        returns, lengths = self.sampler.first_episodes()
        header = np.zeros(1, dtype=UNIT_HEADER)
        header["version"], header["count"], header["seconds"] = self.version, count, seconds
        header["env_steps"], header["episodes"] = self.sampler.env_steps, len(returns)
        with np.errstate(over="ignore", invalid="ignore"):  # huge rewards are the environment's affair
            header["return_sum"], header["return_square_sum"] = returns.sum(), (returns**2).sum()
        header["length_sum"], header["cancelled"] = lengths.sum(), self.cancelled
        self.cancelled = 0
        return header


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
