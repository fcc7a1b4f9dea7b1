"""Plain Gymnasium on a worker: steps, resets and calls as the learner asks for them, one at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .collect import Collector
from .comm.channel import Channel, Deadline, SilenceError
from .comm.codec import EncodeError, encode
from .comm.messages import Report, Tag, actions_layout, note, step_layout
from .envs.build import EnvError, SyncEnvs
from .envs.spaces import join, leaves


class Stepping:
    """Answers ``reset``, ``step``, ``call`` and ``set_attr``.

    Args:
        channel: to the learner.
        collector: the environments.
        first_row: the row of the first of them in the whole.
        backend: what they were built with, for messages.
        timeout_s: how long the learner may leave a result untaken.
        describe: what the learner is told of an exception.
        may_refuse: whether a call that failed can be answered by a refusal; else it ends the worker, because the ranks
            of its group may be apart by then.
    """

    def __init__(
        self,
        channel: Channel,
        collector: Collector,
        first_row: int,
        backend: str,
        timeout_s: float,
        describe: Callable[[BaseException], dict[str, Any]],
        may_refuse: bool,
    ) -> None:
        self._channel, self._collector, self._first_row, self._backend = channel, collector, first_row, backend
        self._timeout_s, self._describe, self._may_refuse = timeout_s, describe, may_refuse
        envs = collector.envs
        n = envs.num_envs
        self._action_space = envs.single_action_space
        action_leaves = leaves(self._action_space)
        inward = actions_layout(action_leaves, n)
        self._actions_buffer = inward.allocate()
        views = inward.views(self._actions_buffer)
        self._actions_sequence = views["sequence"]
        self._actions = join(self._action_space, [views[f"action{i}"] for i in range(len(action_leaves))])
        self._actions_port = channel.incoming(self._actions_buffer, 0, Tag.ACTIONS)
        self._actions_port.start()
        outward = step_layout(collector.leaves, n)
        self._step_buffer = outward.allocate()
        self._step_views = outward.views(self._step_buffer)
        self._step_observation = [self._step_views[f"observation{i}"] for i in range(len(collector.leaves))]
        self._step_port = channel.outgoing(self._step_buffer, 0, Tag.STEP)

    def arrived(self) -> bool:
        """Whether actions have come."""
        return self._actions_port.done()

    def step(self) -> None:
        """Step with the actions that have come."""
        actions, sequence = _copied(self._actions), int(self._actions_sequence[0])
        self._actions_port.start()
        self.advance(sequence, actions)

    def advance(self, sequence: int, actions: Any) -> None:
        """Step with ``actions``, and send back what comes of it."""
        self._step_back(sequence, *self._collector.step(actions))

    def reset(self, sequence: int, seed: Any, options: dict[str, Any] | None, skip: bool) -> None:
        """Reset (unless to ``skip``: no environment here is meant), and send back what comes of it."""
        collector = self._collector
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
        deadline = Deadline(self._timeout_s)
        while not self._step_port.done():  # the learner takes one result before it asks for the next
            if deadline.passed:
                raise SilenceError(f"the learner did not take the result of a step within {deadline.seconds:g} s")
            time.sleep(20e-6)
        for row, leaf in zip(self._step_observation, collector.observation, strict=True):
            np.copyto(row, leaf, casting="same_kind")
        views["rewards"][...], views["terminated"][...], views["truncated"][...] = rewards, terminated, truncated
        self.tell_restarts()
        packed = self._pack_infos(infos)
        header = views["header"]
        header["sequence"], header["has_infos"] = sequence, packed is not None
        self._step_port.start()
        if packed is not None:
            self._channel.send_note(0, Tag.REPORT, note(Report.INFOS, packed))

    def tell_restarts(self) -> None:
        """Report the environments that failed and were built anew since the last time."""
        if isinstance(self._collector.envs, SyncEnvs):
            for restart in self._collector.envs.take_restarts():
                body = encode([self._first_row + restart.row, restart.count, restart.cause])
                self._channel.send_note(0, Tag.REPORT, note(Report.RESTART, body))

    def _pack_infos(self, infos: dict[str, Any]) -> bytes | None:
        envs = self._collector.envs
        if not isinstance(envs, SyncEnvs):
            return encode(["vector", infos], "infos") if infos else None
        recorded = envs.take_infos()
        if not recorded:
            return None
        try:
            return encode(["single", [[self._first_row + row, info] for row, info in recorded]])
        except EncodeError:
            for row, info in recorded:  # again, one by one, to name the environment and the key
                _demand_sendable(info, self._first_row + row, "info")
            raise

    def call(self, *arguments: Any) -> None:
        """Call or get an attribute of each environment, and reply with the results."""
        self._answer(self._call, *arguments)

    def set(self, *arguments: Any) -> None:
        """Set an attribute of each environment, and reply."""
        self._answer(self._set, *arguments)

    def _answer(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Reply with what ``function`` returns, or why it could not: the caller may go on without."""
        try:
            reply = note(Report.REPLY, encode(function(*arguments)))
        except Exception as error:
            if not self._may_refuse:
                raise
            reply = note(Report.REFUSAL, encode(self._describe(error)))
        self._channel.send_note(0, Tag.REPORT, reply)

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
        envs = self._collector.envs
        if not isinstance(envs, SyncEnvs):
            raise EnvError(
                f"{what} needs single environments, but backend={self._backend} has none: use backend='sync'"
            )
        return [(self._first_row + i, env) for i, env in enumerate(envs.envs)]

    def free(self) -> None:
        """Give the ports up."""
        self._actions_port.free()
        self._step_port.free()


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
