"""Environments that are MPI programs: one environment spans a group of ranks.

The group's first rank is the worker that speaks to the learner.  Every rank of the group builds the same environments,
with the group's communicator as the keyword argument ``comm``.  What the worker does with one of them (reset, step, a
call, an attribute) its followers do too, so that the environment's own collective calls meet.  What the environment
returns counts on the first rank only.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from ..comm.channel import Backoff, Channel, Deadline
from ..comm.codec import decode, encode
from ..comm.messages import Tag

RESET, STEP, CALL, SET, CLOSE, LEAVE = "reset", "step", "call", "set", "close", "leave"


@dataclass(frozen=True)
class Group:
    """The ranks of one worker.

    comm: the communicator that the environments get.
    channel: among the group's ranks, for what the followers are to do; its rank 0 is the worker.
    worker, workers: which worker this is, from 0, and how many there are.
    """

    comm: Any
    channel: Channel
    worker: int
    workers: int

    def tell(self, *order: Any) -> None:
        """Have the followers do something."""
        data = encode(order, "what a group of ranks is told")
        for rank in range(1, self.channel.size):
            self.channel.send_note(rank, Tag.COMMAND, data)


class GroupEnv(gym.Wrapper[Any, Any, Any, Any]):
    """On the worker: does everything on all ranks of the group.

    Args:
        env: this rank's part.
        group: the ranks.
        index: which of the group's environments this is.
    """

    def __init__(self, env: gym.Env[Any, Any], group: Group, index: int) -> None:
        super().__init__(env)
        self._group, self._index = group, index

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._group.tell(RESET, self._index, seed, options)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._group.tell(STEP, self._index, action)
        return self.env.step(action)

    def get_wrapper_attr(self, name: str) -> Any:
        attribute = super().get_wrapper_attr(name)
        if not callable(attribute) or name in ("reset", "step", "close"):
            return attribute

        def on_all(*args: Any, **kwargs: Any) -> Any:
            self._group.tell(CALL, self._index, name, args, kwargs)
            return attribute(*args, **kwargs)

        return on_all

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        self._group.tell(SET, self._index, name, value)
        return bool(self.env.set_wrapper_attr(name, value, force=force))

    def close(self) -> None:
        self._group.tell(CLOSE, self._index)
        self.env.close()


def follow(group: Group, build: Callable[[int], gym.Env[Any, Any]], count: int, timeout_s: float) -> None:
    """A follower's life: build ``count`` environments, and do as the worker does.

    A failure here leaves the worker inside a collective call of the environment, where it hears nobody: the job is
    ended, with one message.  So is a worker silent for ``timeout_s``.
    """
    channel = group.channel
    backoff, deadline = Backoff(), Deadline(timeout_s)
    who = (
        f"rank {channel.world_rank(channel.rank)} (of the group of worker rank {channel.world_rank(0)}, {channel.host})"
    )
    order: Any = "building the environment"
    try:
        envs = [build(index) for index in range(count)]
        while True:
            arrived = channel.take_note(Tag.COMMAND, 0)
            if arrived is None:
                if deadline.passed:
                    raise TimeoutError(f"no word from the worker for {timeout_s:g} s")
                channel.progress()
                backoff.wait()
                continue
            backoff.reset()
            deadline.renew()
            order = decode(arrived[1])
            if order[0] == LEAVE:
                return
            _do(envs, *order)
    except Exception as error:
        trace = traceback.format_exc()
        doing = order if isinstance(order, str) else order[0]
        print(f"clusterenv-hpc: {who} failed in {doing}: {type(error).__name__}: {error}\n{trace}", file=sys.stderr)
        channel.abort(1)


def _do(envs: list[gym.Env[Any, Any]], kind: str, index: int, *arguments: Any) -> None:
    env = envs[index]
    if kind == RESET:
        seed, options = arguments
        env.reset(seed=seed, options=options)
    elif kind == STEP:
        env.step(arguments[0])
    elif kind == CALL:
        name, args, kwargs = arguments
        env.get_wrapper_attr(name)(*args, **kwargs)
    elif kind == SET:
        env.set_wrapper_attr(*arguments)
    elif kind == CLOSE:
        env.close()
