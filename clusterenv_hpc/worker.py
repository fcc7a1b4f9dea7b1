"""The worker: steps its environments, acts with a local copy of the policy, and asks for weights when it has drifted.

``Worker.serve`` is a generator that yields whenever it would wait (False) or has done something (True).  Under MPI
``run_worker`` drives it with sleeps in between; in one process the learner does, whenever it waits itself.  So one
piece of code runs on both transports, without threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch

from .collect import Collector, NotFiniteError, ProbeStates, Slot
from .comm.channel import Backoff, Channel, Deadline, Handle, Port, SilenceError
from .comm.codec import EncodeError, decode, encode
from .comm.messages import (
    Command,
    Report,
    RolloutShape,
    Tag,
    actions_layout,
    note,
    read_probe,
    step_layout,
    weights_layout,
)
from .envs.build import EnvError, EnvSource, SyncEnvs, build_vector_env, failing_row
from .envs.delays import slow_down
from .envs.group import LEAVE, Group
from .envs.spaces import encode_space, join, leaves
from .handshake import Hello, deal, plain_metadata, software_versions, this_process
from .policies import check_policy, distribution_of, load_flat_weights, num_weights
from .policies import weights_layout as policy_layout_of
from .sync import SyncRule

ALIVE_EVERY_S = 5.0
NO_ENVIRONMENTS: dict[str, Any] = {
    "observation_space": b"",
    "action_space": b"",
    "autoreset_mode": "",
    "num_params": 0,
    "metadata": {},
    "render_mode": None,
}
"""What a worker says of its environments where it holds none."""

GRACE_S = 5.0
"""How long a failed worker leaves the learner to report the failure before it ends the job itself."""


@dataclass(frozen=True)
class WorkerSettings:
    """What every rank is told by the script: see ``ClusterEnv``'s arguments."""

    source: EnvSource
    num_envs: int
    config_hash: str
    seed: int | None
    num_probes: int
    timeout_s: float
    leave_on_close: bool


class Worker:
    """One worker's side of the wire.

    Args:
        channel: to the learner.
        settings: what to build.
        policy: the local copy; None without one.
        rule: when to ask for weights.
        group: the ranks that this worker's environments span; None: this one alone.
    """

    def __init__(
        self,
        channel: Channel,
        settings: WorkerSettings,
        policy: torch.nn.Module | None,
        rule: SyncRule | None,
        group: Group | None = None,
    ):
        self.channel, self.settings, self.policy, self.rule, self.group = channel, settings, policy, rule, group
        first, last = deal(settings.num_envs, channel.size - 1)[channel.rank - 1]
        self.rows = (first, last)
        self._collector: Collector | None = None
        self._actions_port: Port | None = None
        self._weights_port: Port | None = None
        self._newest = -1
        self._requested = False
        self._readings: list[float] = []
        self._probes = ProbeStates()
        self._sequence = 0
        self._slots: dict[int, tuple[RolloutShape, list[Slot]]] = {}
        self._waited_s = 0.0
        self._last_sign = time.monotonic()
        self._streaming: int | None = None
        self._leaving = self._failed = False
        self.closed = False
        """Whether the environments are closed, so that the learner may stay silent for as long as it likes."""

    # -- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> Iterator[bool]:
        """Introduce itself, then do as it is told until it is told to leave."""
        try:
            self._build()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            yield from self._fail(error)
            self._release()
            return
        try:
            while not self._leaving:
                if self._actions_port is not None and self._actions_port.done():
                    self._step()
                    yield True
                    continue
                arrived = self.channel.take_note(Tag.COMMAND, 0)
                if arrived is None:
                    yield False
                    continue
                data = arrived[1]
                if data[0] == Command.ROLLOUT:
                    yield from self._rollout(*decode(data[1:]))
                elif data[0] == Command.STREAM:
                    yield from self._stream(*decode(data[1:]))
                else:
                    self._obey(data)
                yield True
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            yield from self._fail(error)
        finally:
            self._release()

    def _obey(self, data: bytes) -> None:
        """Commands that need no waiting."""
        command, body = data[0], data[1:]
        if command == Command.PROBE:
            self._see(*read_probe(body))
        elif command == Command.RESET:
            self._reset(*decode(body))
        elif command == Command.ACTIONS:
            sequence, actions = decode(body)
            self._advance(sequence, actions)
        elif command == Command.CALL:
            self._answer(self._call, *decode(body))
        elif command == Command.SET:
            self._answer(self._set, *decode(body))
        elif command == Command.STOP:
            self._streaming = None
        elif command == Command.CLOSE:
            if self._collector is not None:
                self._collector.envs.close(**decode(body))
            self.closed = True
            self.channel.send_note(0, Tag.REPORT, note(Report.REPLY))
            self._leaving = self.settings.leave_on_close
        elif command == Command.LEAVE:
            self._leaving = True

    def _build(self) -> None:
        settings, first, last = self.settings, *self.rows
        policy = self.policy
        hello: dict[str, Any] = {
            "rank": self.channel.rank,
            "world_rank": self.channel.world_rank(self.channel.rank),
            **this_process(),
            "rows": self.rows,
            "versions": software_versions(),
            "config_hash": settings.config_hash,
            "num_envs": settings.num_envs,
            "backend": settings.source.backend,
            "policy_layout": "" if policy is None else str(policy_layout_of(policy)),
            "num_weights": 0 if policy is None else num_weights(policy),
            "seed": settings.seed,
            "num_probes": settings.num_probes,
            "sync": {} if self.rule is None else self.rule.describe(),
            **NO_ENVIRONMENTS,
        }
        if last > first:
            envs = build_vector_env(settings.source, last - first, first, self.group)
            slow_down(envs, settings.source.delay.by_worker(self.channel.size - 1)[self.channel.rank - 1])
            distribution = None
            if policy is not None:
                policy.eval()
                be_worker: Callable[[int, int], None] | None = getattr(policy, "for_worker", None)
                if be_worker is not None:  # what it explores with may depend on who it is
                    be_worker(self.channel.rank - 1, self.channel.size - 1)
                check_policy(policy, envs.single_observation_space, envs.single_action_space)
                distribution = distribution_of(policy, envs.single_action_space)
                hello["num_params"] = distribution.num_params
            seed = np.random.SeedSequence(settings.seed, spawn_key=(first,)).generate_state(1, np.uint64)[0] >> 1
            self._collector = Collector(envs, policy, distribution, int(seed))
            hello |= {
                "observation_space": encode_space(envs.single_observation_space),
                "action_space": encode_space(envs.single_action_space),
                "autoreset_mode": self._collector.mode.value,
                "metadata": plain_metadata(envs.metadata),
                "render_mode": envs.render_mode,
            }
            self._prepare_steps()
        if policy is not None:
            layout = weights_layout(num_weights(policy))
            self._weights_buffer = layout.allocate()
            self._weights = layout.views(self._weights_buffer)
            self._weights_port = self.channel.incoming(self._weights_buffer, 0, Tag.WEIGHTS)
        self.channel.send_note(0, Tag.REPORT, note(Report.HELLO, Hello(**hello).pack()))

    def _fail(self, error: BaseException) -> Iterator[bool]:
        """Tell the learner, and wait until it lets this rank go; end the job if it does not."""
        self._failed = True
        report = self._describe(error)
        self.channel.send_note(0, Tag.REPORT, note(Report.ERROR, encode(report)))
        deadline = Deadline(GRACE_S)
        while not deadline.passed:
            arrived = self.channel.take_note(Tag.COMMAND, 0)
            if arrived is not None and arrived[1][0] == Command.LEAVE:
                return
            yield False
        where = f"rank {self.channel.world_rank(self.channel.rank)} (worker, {self.channel.host})"
        told = f"clusterenv-hpc: {where} failed: {report['cause']}\n{report['traceback']}"
        print(told, file=sys.stderr, flush=True)
        self.channel.abort(1)

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """What the learner is told of an exception."""
        row = getattr(error, "row", None)
        if row is None and self._collector is not None:
            row = failing_row(self._collector.envs, error.__traceback__)
        if row is not None and not isinstance(error, EnvError):
            row += self.rows[0]
        cause = str(error) if isinstance(error, (EnvError, NotFiniteError)) else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        place = _place(error)
        return {"cause": cause, "row": row, "host": self.channel.host, "traceback": trace[-20000:], "place": place}

    def _release(self) -> None:
        for port in (self._actions_port, self._weights_port):
            if port is not None:
                port.free()
        if self._collector is not None:
            with contextlib.suppress(Exception):  # whoever wanted to know asked to close
                self._collector.envs.close()
        if self.group is not None:
            self.group.tell(LEAVE)
        self.channel.flush(Deadline(GRACE_S / 2))  # first: the learner takes what is under way until it hears this
        self.channel.send_note(0, Tag.REPORT, note(Report.LEFT))

    # -- plain Gymnasium ---------------------------------------------------------------------------------------------

    def _prepare_steps(self) -> None:
        assert self._collector is not None
        envs = self._collector.envs
        n = envs.num_envs
        self._action_space = envs.single_action_space
        action_leaves = leaves(self._action_space)
        inward = actions_layout(action_leaves, n)
        self._actions_buffer = inward.allocate()
        views = inward.views(self._actions_buffer)
        self._actions_sequence = views["sequence"]
        self._actions = join(self._action_space, [views[f"action{i}"] for i in range(len(action_leaves))])
        self._actions_port = self.channel.incoming(self._actions_buffer, 0, Tag.ACTIONS)
        self._actions_port.start()
        outward = step_layout(self._collector.leaves, n)
        self._step_buffer = outward.allocate()
        self._step_views = outward.views(self._step_buffer)
        self._step_observation = [self._step_views[f"observation{i}"] for i in range(len(self._collector.leaves))]
        self._step_port = self.channel.outgoing(self._step_buffer, 0, Tag.STEP)

    def _step(self) -> None:
        assert self._actions_port is not None
        actions, sequence = _copied(self._actions), int(self._actions_sequence[0])
        self._actions_port.start()
        self._advance(sequence, actions)

    def _advance(self, sequence: int, actions: Any) -> None:
        assert self._collector is not None
        self._step_back(sequence, *self._collector.step(actions))

    def _reset(self, sequence: int, seed: Any, options: dict[str, Any] | None, skip: bool) -> None:
        collector = self._collector
        assert collector is not None
        infos: dict[str, Any] = {}
        if not skip:
            infos = collector.reset(seed, options)
            first_seed = seed[0] if isinstance(seed, list) else seed
            if first_seed is not None:
                collector.seed_noise(first_seed)
        n = collector.envs.num_envs
        self._step_back(sequence, np.zeros(n), np.zeros(n, dtype=bool), np.zeros(n, dtype=bool), infos)

    def _step_back(self, sequence: int, rewards: Any, terminated: Any, truncated: Any, infos: dict[str, Any]) -> None:
        collector, views = self._collector, self._step_views
        assert collector is not None
        deadline = Deadline(self.settings.timeout_s)
        while not self._step_port.done():  # the learner takes one result before it asks for the next
            if deadline.passed:
                raise SilenceError(f"the learner did not take the result of a step within {deadline.seconds:g} s")
            time.sleep(20e-6)
        for row, leaf in zip(self._step_observation, collector.observation, strict=True):
            np.copyto(row, leaf, casting="same_kind")
        views["rewards"][...], views["terminated"][...], views["truncated"][...] = rewards, terminated, truncated
        self._tell_restarts()
        packed = self._pack_infos(infos)
        header = views["header"]
        header["sequence"], header["has_infos"] = sequence, packed is not None
        self._step_port.start()
        if packed is not None:
            self.channel.send_note(0, Tag.REPORT, note(Report.INFOS, packed))

    def _tell_restarts(self) -> None:
        assert self._collector is not None
        if isinstance(self._collector.envs, SyncEnvs):
            for restart in self._collector.envs.take_restarts():
                body = encode([self.rows[0] + restart.row, restart.count, restart.cause])
                self.channel.send_note(0, Tag.REPORT, note(Report.RESTART, body))

    def _pack_infos(self, infos: dict[str, Any]) -> bytes | None:
        assert self._collector is not None
        envs = self._collector.envs
        if not isinstance(envs, SyncEnvs):
            return encode(["vector", infos], "infos") if infos else None
        recorded = envs.take_infos()
        if not recorded:
            return None
        try:
            return encode(["single", [[self.rows[0] + row, info] for row, info in recorded]])
        except EncodeError:
            for row, info in recorded:  # again, one by one, to name the environment and the key
                _demand_sendable(info, self.rows[0] + row, "info")
            raise

    def _answer(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Reply with what ``function`` returns, or why it could not: the caller may go on without."""
        try:
            reply = note(Report.REPLY, encode(function(*arguments)))
        except Exception as error:
            if self.group is not None:  # its ranks may be apart now
                raise
            reply = note(Report.REFUSAL, encode(self._describe(error)))
        self.channel.send_note(0, Tag.REPORT, reply)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        results = []
        for row, env in self._single_envs("call"):
            with _naming(row):
                attribute = env.get_wrapper_attr(name)
                value = attribute(*args, **kwargs) if callable(attribute) else attribute
                _demand_sendable(value, row, name)
            results.append(value)
        return results

    def _set(self, name: str, values: list[Any]) -> None:
        for (row, env), value in zip(self._single_envs("set_attr"), values, strict=True):
            with _naming(row):
                env.set_wrapper_attr(name, value)

    def _single_envs(self, what: str) -> list[tuple[int, Any]]:
        assert self._collector is not None
        envs = self._collector.envs
        if not isinstance(envs, SyncEnvs):
            raise EnvError(
                f"{what} needs single environments, but backend={self.settings.source.backend} has none: "
                "use backend='sync'"
            )
        return [(self.rows[0] + i, env) for i, env in enumerate(envs.envs)]

    # -- synchronization ---------------------------------------------------------------------------------------------

    def _see(self, version: int, sequence: int, params: Any) -> None:
        """A probe arrived: measure, and ask for weights if the rule says so."""
        self._newest = max(self._newest, version)
        kl = None
        if params is not None and self._collector is not None and self.policy is not None:
            assert self._collector.distribution is not None
            with _one_thread():
                kl = self._probes.divergence(self.policy, self._collector.distribution, sequence, params)
            if kl is not None:
                self._readings.append(kl)
        self._consider(kl)

    def _consider(self, kl: float | None) -> None:
        collector = self._collector
        if self._requested or collector is None or self.rule is None:
            return
        local = collector.version
        if local < 0 or self.rule.wants_weights(self._newest - local, kl):
            assert self._weights_port is not None
            self._weights_port.start()
            self._requested = True
            self.channel.send_note(0, Tag.REPORT, note(Report.REQUEST, encode([local, kl])))

    def _load_arrived(self) -> bool:
        """Load weights if they have come; True if they have."""
        if not self._requested or self._weights_port is None or not self._weights_port.done():
            return False
        assert self.policy is not None and self._collector is not None
        load_flat_weights(self.policy, self._weights["weights"])
        self._collector.version = int(self._weights["header"]["version"][0])
        self._newest = max(self._newest, self._collector.version)
        self._requested = False
        self._consider(None)  # a newer version may have been announced meanwhile
        return True

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def _slots_for(self, num_steps: int) -> tuple[RolloutShape, list[Slot]]:
        assert self._collector is not None
        if num_steps not in self._slots:
            self._slots = {k: v for k, v in self._slots.items() if any(s.handle and not s.handle.done() for s in v[1])}
            shape = self._collector.rollout_shape(num_steps, self.settings.num_probes)
            layout = shape.layout()
            self._slots[num_steps] = (shape, [Slot(shape, layout, self._collector.space) for _ in range(2)])
        return self._slots[num_steps]

    def _rollout(self, num_steps: int, newest: int) -> Iterator[bool]:
        """One rollout in lockstep: with the weights it asked for, if it asked."""
        slot = self._slots_for(num_steps)[1][0]
        self._newest = max(self._newest, newest)
        self._consider(None)
        began, deadline = time.perf_counter(), Deadline(self.settings.timeout_s)
        while (self._requested and not self._load_arrived()) or (slot.handle is not None and not slot.handle.done()):
            if deadline.passed:
                raise SilenceError(
                    f"the learner did not answer for {deadline.seconds:g} s (a weight request, or taking a rollout)"
                )
            if self._told_to_leave():
                return
            yield False
        self._waited_s += time.perf_counter() - began
        self._collect(slot, num_steps, self._look_up)
        yield True

    def _stream(self, num_steps: int, newest: int) -> Iterator[bool]:
        """Rollout after rollout without waiting for anybody, until told to stop."""
        slots = self._slots_for(num_steps)[1]
        self._newest = max(self._newest, newest)
        self._streaming = num_steps
        self._consider(None)
        turn = 0
        while self._streaming is not None and not self._leaving:
            slot = slots[turn]
            ready = slot.handle is None or slot.handle.done()
            began = time.perf_counter()
            self._look_up_streaming()
            assert self._collector is not None
            if self._streaming is None:
                break
            if not ready or self._collector.version < 0:
                yield False
                self._waited_s += time.perf_counter() - began
                continue
            self._collect(slot, num_steps, self._look_up_streaming)
            turn = 1 - turn
            yield True
        deadline = Deadline(self.settings.timeout_s)
        while any(slot.handle is not None and not slot.handle.done() for slot in slots):
            if deadline.passed:
                raise SilenceError(f"the learner did not take the last rollouts within {deadline.seconds:g} s")
            if self._told_to_leave():
                return
            yield False
        self.channel.send_note(0, Tag.REPORT, note(Report.STOPPED))

    def _told_to_leave(self) -> bool:
        """While waiting for the learner to take or to answer: it may leave instead."""
        while not self._leaving and (arrived := self.channel.take_note(Tag.COMMAND, 0)) is not None:
            self._obey(arrived[1])
        return self._leaving

    def _look_up(self) -> None:
        """Between two steps of a long rollout: let messages move, and say that this rank is alive."""
        self.channel.progress()
        if time.monotonic() - self._last_sign > ALIVE_EVERY_S:
            self._last_sign = time.monotonic()
            self.channel.send_note(0, Tag.REPORT, note(Report.ALIVE))

    def _look_up_streaming(self) -> None:
        """The same, and take commands and weights that have come."""
        self._look_up()
        while (arrived := self.channel.take_note(Tag.COMMAND, 0)) is not None:
            self._obey(arrived[1])
        self._load_arrived()

    def _collect(self, slot: Slot, num_steps: int, poll: Any) -> None:
        collector = self._collector
        assert collector is not None
        if not collector.started:
            raise RuntimeError("rollout before the first reset")
        with _one_thread():
            collector.collect(slot, num_steps, poll)
        self._tell_restarts()
        header = slot.arrays["header"]
        header["sequence"] = self._sequence
        header["kl_count"], header["kl_sum"] = len(self._readings), sum(self._readings)
        header["kl_last"] = self._readings[-1] if self._readings else np.nan
        header["seconds_env"], header["seconds_policy"] = collector.seconds_env, collector.seconds_policy
        header["seconds_wait"] = self._waited_s
        self._readings.clear()
        self._waited_s = 0.0
        if self.rule is not None and self.rule.needs_divergence:
            self._probes.keep(self._sequence, slot, collector.space, collector.envs.num_envs)
        self._sequence += 1
        offset, dtype, _ = slot.layout.fields["episodes"]
        used = offset + int(header["episodes"][0]) * dtype.itemsize
        # Synchronous: done only when the learner takes it, so that two slots are all that can be under way.
        slot.handle = self._post(slot.buffer[:used])
        self._last_sign = time.monotonic()

    def _post(self, buffer: Any) -> Handle:
        return self.channel.post(buffer, 0, Tag.ROLLOUT, synchronous=True)


class _one_thread:
    """Policy inference in one thread: several ranks share a machine, and the learner in one process keeps its own."""

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._before != 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self._before != 1:
            torch.set_num_threads(self._before)


def _place(error: BaseException) -> str:
    """Where in the user's code an exception came about, as a traceback prints it; empty if it was not there."""
    while error.__cause__ is not None:
        error = error.__cause__
    theirs = (os.path.dirname(__file__), os.path.dirname(gymnasium.__file__), os.path.dirname(torch.__file__))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(theirs)]
    return "".join(traceback.format_list(frames))


@contextlib.contextmanager
def _naming(row: int) -> Iterator[None]:
    """Errors of an environment say which one it was."""
    try:
        yield
    except EnvError:
        raise
    except Exception as error:
        raise EnvError(f"environment {row}: {type(error).__name__}: {error}", row) from error


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(item) for key, item in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_copied(item) for item in tree)
    return tree.copy()


def _demand_sendable(value: Any, row: int, name: str) -> None:
    try:
        encode(value, name)
    except EncodeError as error:
        raise EnvError(f"environment {row}: {error}", row) from None


def run_worker(worker: Worker, channel: Channel, backoff: Backoff, timeout_s: float) -> None:
    """Drive ``worker`` until it leaves.  If nothing is heard from the learner for ``timeout_s``, end the job."""
    deadline = Deadline(timeout_s)
    who = f"rank {channel.world_rank(channel.rank)} (worker, {channel.host})"
    for busy in worker.serve():
        channel.progress()
        if 0 in channel.lost:
            print(f"clusterenv-hpc: {who}: the learner is dead", file=sys.stderr)
            raise SystemExit(1)
        if busy or worker.closed:
            deadline.renew()
        if busy:
            backoff.reset()
            continue
        if deadline.passed:
            print(
                f"clusterenv-hpc: {who} heard nothing from the learner (rank 0) for "
                f"{timeout_s:g} s and ends the job; raise learner_timeout if it needs longer between rollouts",
                file=sys.stderr,
                flush=True,
            )
            channel.abort(1)
        backoff.wait()
    channel.flush(Deadline(GRACE_S))
