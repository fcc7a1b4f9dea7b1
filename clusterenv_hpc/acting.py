"""DETACH on a worker: acts with a local copy of the policy, measures its divergence, and asks for weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .collect import Collector, ProbeStates, Slot
from .comm.channel import Channel, Deadline, SilenceError
from .comm.codec import encode
from .comm.messages import Report, RolloutShape, Tag, note, weights_layout
from .policies import PolicyError, load_flat_weights, num_weights
from .policies.distributions import Distribution
from .sync import SyncRule

ALIVE_EVERY_S = 5.0


class Acting:
    """Collects rollouts, in lockstep or one after the other, with weights that are as new as the sync rule demands.

    Args:
        channel: to the learner.
        collector: the environments.
        policy, distribution: the local copy, and what it acts by.
        rule: when to ask for weights.
        num_probes: states of each rollout on which the divergence is measured.
        timeout_s: how long to wait for an answer.
        commands: takes the learner's commands that have come; True if one of them says to leave.
        tell_restarts: reports environments that were built anew.
    """

    def __init__(
        self,
        channel: Channel,
        collector: Collector,
        policy: torch.nn.Module,
        distribution: Distribution,
        rule: SyncRule,
        num_probes: int,
        timeout_s: float,
        commands: Callable[[], bool],
        tell_restarts: Callable[[], None],
    ) -> None:
        self._channel, self._collector, self._policy, self._rule = channel, collector, policy, rule
        self._distribution, self._num_probes, self._timeout_s = distribution, num_probes, timeout_s
        self._commands, self._tell_restarts = commands, tell_restarts
        layout = weights_layout(num_weights(policy))
        self._weights_buffer = layout.allocate()
        self._weights = layout.views(self._weights_buffer)
        self._weights_port = channel.incoming(self._weights_buffer, 0, Tag.WEIGHTS)
        self._newest = -1
        self._requested = self._streaming = False
        self._readings: list[float] = []
        self._probes = ProbeStates()
        self._sequence = 0
        self._slots: dict[int, tuple[RolloutShape, list[Slot]]] = {}
        self._waited_s = 0.0
        # Often enough for the learner's patience too, which is as long.
        self._last_sign, self._alive_every_s = time.monotonic(), min(ALIVE_EVERY_S, timeout_s / 4)

    # -- synchronization ---------------------------------------------------------------------------------------------

    def see(self, version: int, sequence: int, params: Any) -> None:
        """A probe arrived: measure, and ask for weights if the rule says so."""
        self._newest = max(self._newest, version)
        kl = None
        if params is not None:
            with _one_thread():
                kl = self._probes.divergence(self._policy, self._distribution, sequence, params)
            if kl is not None:
                self._readings.append(kl)
        self._consider(kl)

    def _consider(self, kl: float | None) -> None:
        collector = self._collector
        if self._requested:
            return
        local = collector.version
        if local < 0 or self._rule.wants_weights(self._newest - local, kl):
            self._weights_port.start()
            self._requested = True
            self._channel.send_note(0, Tag.REPORT, note(Report.REQUEST, encode([local, kl])))

    def _load_arrived(self) -> bool:
        """Load weights if they have come; True if they have."""
        if not self._requested or not self._weights_port.done():
            return False
        if (count := int(self._weights["header"]["count"][0])) != (own := len(self._weights["weights"])):
            raise PolicyError(f"the learner's policy has {count:,} acting parameters, this rank's had {own:,}")
        load_flat_weights(self._policy, self._weights["weights"])
        self._collector.version = int(self._weights["header"]["version"][0])
        self._newest = max(self._newest, self._collector.version)
        self._requested = False
        self._consider(None)  # a newer version may have been announced meanwhile
        return True

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def _slots_for(self, num_steps: int) -> tuple[RolloutShape, list[Slot]]:
        if num_steps not in self._slots:
            self._slots = {k: v for k, v in self._slots.items() if any(s.handle and not s.handle.done() for s in v[1])}
            shape = self._collector.rollout_shape(num_steps, self._num_probes)
            layout = shape.layout()
            self._slots[num_steps] = (shape, [Slot(shape, layout, self._collector.space) for _ in range(2)])
        return self._slots[num_steps]

    def rollout(self, num_steps: int, newest: int) -> Iterator[bool]:
        """One rollout in lockstep: with the weights it asked for, if it asked."""
        slot = self._slots_for(num_steps)[1][0]
        self._newest = max(self._newest, newest)
        self._consider(None)
        began, deadline = time.perf_counter(), Deadline(self._timeout_s)
        while (self._requested and not self._load_arrived()) or (slot.handle is not None and not slot.handle.done()):
            if deadline.passed:
                raise SilenceError(
                    f"the learner did not answer for {deadline.seconds:g} s (a weight request, or taking a rollout)"
                )
            if self._commands():
                return
            yield False
        self._waited_s += time.perf_counter() - began
        self._collect(slot, num_steps, self._look_up)
        yield True

    def stream(self, num_steps: int, newest: int) -> Iterator[bool]:
        """Rollout after rollout without waiting for anybody, until told to stop."""
        slots = self._slots_for(num_steps)[1]
        self._newest = max(self._newest, newest)
        self._streaming = True
        self._consider(None)
        turn = 0
        while self._streaming:
            slot = slots[turn]
            ready = slot.handle is None or slot.handle.done()
            began = time.perf_counter()
            self._look_up_streaming()
            if not self._streaming:
                break
            if not ready or self._collector.version < 0:
                yield False
                self._waited_s += time.perf_counter() - began
                continue
            self._collect(slot, num_steps, self._look_up_streaming)
            turn = 1 - turn
            yield True
        deadline = Deadline(self._timeout_s)
        while any(slot.handle is not None and not slot.handle.done() for slot in slots):
            if deadline.passed:
                raise SilenceError(f"the learner did not take the last rollouts within {deadline.seconds:g} s")
            if self._commands():
                return
            yield False
        self._channel.send_note(0, Tag.REPORT, note(Report.STOPPED))

    def _look_up(self) -> None:
        """Between two steps of a long rollout: let messages move, and say that this rank is alive."""
        self._channel.progress()
        if time.monotonic() - self._last_sign > self._alive_every_s:
            self._last_sign = time.monotonic()
            self._channel.send_note(0, Tag.REPORT, note(Report.ALIVE))

    def _look_up_streaming(self) -> None:
        """The same, and take commands and weights that have come."""
        self._look_up()
        if self._commands():
            self._streaming = False
        self._load_arrived()

    def _collect(self, slot: Slot, num_steps: int, poll: Any) -> None:
        collector = self._collector
        if not collector.started:
            raise RuntimeError("rollout before the first reset")
        with _one_thread():
            collector.collect(slot, num_steps, poll)
        self._tell_restarts()
        header, readings = slot.arrays["header"], self._readings
        header[0] = (
            self._sequence,
            header["episodes"][0],
            header["probes"][0],
            len(readings),
            sum(readings),
            readings[-1] if readings else np.nan,
            collector.seconds_env,
            collector.seconds_policy,
            self._waited_s,
        )
        self._readings.clear()
        self._waited_s = 0.0
        if self._rule.needs_divergence:
            self._probes.keep(self._sequence, slot, collector.space)
        self._sequence += 1
        offset, dtype, _ = slot.layout.fields["episodes"]
        used = offset + int(header["episodes"][0]) * dtype.itemsize
        # Synchronous: done only when the learner takes it, so that two slots are all that can be under way.
        slot.handle = self._channel.post(slot.buffer[:used], 0, Tag.ROLLOUT, synchronous=True)
        self._last_sign = time.monotonic()

    def stop(self) -> None:
        """No rollout after the one under way."""
        self._streaming = False

    def free(self) -> None:
        """Give the port up."""
        self._weights_port.free()


class _one_thread:
    """Policy inference in one thread: several ranks share a machine, and the learner in one process keeps its own."""

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._before != 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self._before != 1:
            torch.set_num_threads(self._before)
