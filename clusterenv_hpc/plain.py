"""Plain Gymnasium on the learner's side: one reset, step or call at a time, of all workers together.

The workers' side is ``stepping``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from .comm.codec import EncodeError, decode, encode
from .comm.messages import Command
from .crew import Crew
from .envs.infos import array_leaves, check_actions, merge_infos, slice_actions
from .envs.spaces import join, leaves

Stepped = tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]
"""What ``step`` returns: observations, rewards, terminated, truncated, infos."""


class Plain:
    """Asks the workers, and puts their answers together in the order of rows.

    Args:
        crew: the workers.
        spaces: of one environment: observation, action.
        num_envs: in all.
        mode: how the environments reset by themselves.
        backend: what the workers step; only ``sync`` takes a seed for each environment.
        seed: of the first reset, if that is given none.
    """

    def __init__(
        self,
        crew: Crew,
        spaces: tuple[Space[Any], Space[Any]],
        num_envs: int,
        mode: AutoresetMode,
        backend: str,
        seed: int | None,
    ) -> None:
        self._crew, self._num_envs, self._mode, self._backend, self._seed = crew, num_envs, mode, backend, seed
        self._observation_space, self._action_space = spaces
        self._leaves, self._action_leaves = leaves(self._observation_space), leaves(self._action_space)
        self._infos: VectorEnv[Any, Any, Any] = VectorEnv()  # knows how infos of single environments become one
        self._infos.num_envs, self._infos.closed = num_envs, True
        self.was_reset, self._sequence = False, 0
        self._resetting = np.zeros(self._num_envs, dtype=bool)  # in the next step, whose action for them is not read
        for peer in crew.active:
            peer.prepare_steps(self._leaves, self._action_leaves)

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """See ``ClusterEnv.reset``."""
        if seed is None and not self.was_reset:
            seed = self._seed
        seeds = self._seeds(seed)
        mask = None
        if options is not None and "reset_mask" in options:
            mask = _checked_mask(options.pop("reset_mask"), self._num_envs)
            if not self.was_reset:
                raise ValueError("`options['reset_mask']` needs a reset of all environments before")
        encode(options, "options")  # names what cannot be sent, before anything is
        self._sequence += 1
        for peer in self._crew.active:
            part, own, skip = seeds[peer.rows], options, False
            if mask is not None:
                own = {**(options or {}), "reset_mask": mask[peer.rows]}
                skip = not mask[peer.rows].any()
            block = part if self._backend == "sync" else part[0]
            self._crew.command(peer, Command.RESET, encode([self._sequence, block, own, skip]))
            peer.step_port.start()
        self.was_reset = True
        self._resetting[slice(None) if mask is None else mask] = False
        observation, _, _, _, infos = self._gather("resetting the environments")
        return observation, infos

    def _seeds(self, seed: Any) -> list[Any]:
        if seed is None:
            return [None] * self._num_envs
        given = [seed] if isinstance(seed, (int, np.integer)) else seed
        if any(one is not None and one < 0 for one in given):  # before anything is sent: the environments live on
            raise ValueError(f"expected seeds of at least 0, or None, got {seed!r}")
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + i for i in range(self._num_envs)]
        if self._backend != "sync":
            raise ValueError(f"backend={self._backend} takes one seed for all environments, got {seed!r}")
        if len(seed) != self._num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self._num_envs} "
                f"but got length={len(seed)}."
            )
        return [None if one is None else int(one) for one in seed]

    def step(self, actions: Any) -> Stepped:
        """See ``ClusterEnv.step``."""
        if not self.was_reset:
            raise ResetNeeded("step() was called before the first reset()")
        self._send_actions(actions)
        result = self._gather("stepping the environments")
        if self._mode is AutoresetMode.NEXT_STEP:
            np.logical_or(result[2], result[3], out=self._resetting)
        return result

    def _send_actions(self, actions: Any) -> None:
        check_actions(self._action_space, actions, self._num_envs, self._resetting)
        self._sequence += 1
        arrays = self._typed_actions(actions)
        if arrays is None:  # another dtype or type than the space's: sent as it is, so that env.step gets just that
            rows = [peer.rows for peer in self._crew.active]
            parts = [slice_actions(self._action_space, actions, part.start, part.stop) for part in rows]
            try:
                bodies = [encode([self._sequence, part]) for part in parts]  # all, before any is sent
            except EncodeError:
                encode(actions, "actions")  # again, to name the environment
                raise
            for peer, body in zip(self._crew.active, bodies, strict=True):
                peer.step_port.start()
                self._crew.command(peer, Command.ACTIONS, body)
            return
        for peer in self._crew.active:
            peer.step_port.start()
            peer.sequence[0] = self._sequence
            for target, array in zip(peer.actions, arrays, strict=True):
                np.copyto(target, array[peer.rows])
            self._crew.stats.sent["actions"].add(peer.actions_bytes)
            peer.actions_port.start()

    def _typed_actions(self, actions: Any) -> list[NDArray[Any]] | None:
        """The leaf arrays of ``actions`` if each has just the dtype and shape that the space says."""
        arrays = array_leaves(self._action_space, actions)
        for array, leaf in zip(arrays or (), self._action_leaves, strict=False):
            if array.dtype != leaf.dtype or array.shape != (self._num_envs, *leaf.shape):
                return None
        return arrays

    def _gather(self, what: str) -> Stepped:
        """The results of all workers for the current sequence number, in the order of rows."""
        waiting = list(self._crew.active)

        def came() -> bool:
            waiting[:] = [peer for peer in waiting if not peer.step_came()]
            if not waiting:
                return True
            self._crew.demand_all(what)
            self._crew.listen()
            return False

        self._crew.wait(came, lambda: self._crew.silence(waiting, what))
        n = self._num_envs
        observation = [np.empty((n, *leaf.shape), dtype=leaf.dtype) for leaf in self._leaves]
        rewards, terminated, truncated = np.empty(n), np.empty(n, dtype=bool), np.empty(n, dtype=bool)
        parts = []
        for peer in self._crew.active:
            for whole, part in zip(observation, peer.observation, strict=True):
                whole[peer.rows] = part
            rewards[peer.rows], terminated[peer.rows] = peer.step["rewards"], peer.step["terminated"]
            truncated[peer.rows] = peer.step["truncated"]
            self._crew.stats.received["step"].add(peer.step_bytes)
            if peer.step["header"]["has_infos"][0]:
                parts.append(((peer.rows.start, peer.rows.stop), decode(peer.infos.pop(0))))
        return (
            join(self._observation_space, observation),
            rewards,
            terminated,
            truncated,
            merge_infos(self._infos, parts),
        )

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """See ``ClusterEnv.call``."""
        body = encode([name, args, kwargs], f"the arguments of {name}")
        peers = self._crew.active
        replies = self._crew.ask(peers, Command.CALL, [body] * len(peers), f"calling {name}")
        return tuple(value for reply in replies for value in decode(reply))

    def set(self, name: str, values: Any) -> None:
        """See ``ClusterEnv.set_attr``."""
        if not isinstance(values, (list, tuple)):
            values = [values] * self._num_envs
        if len(values) != self._num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self._num_envs} environments."
            )
        for row, value in enumerate(values):
            encode(value, f"the new {name} of environment {row}")  # names what cannot be sent, before anything is
        bodies = [encode([name, list(values[peer.rows])]) for peer in self._crew.active]
        self._crew.ask(self._crew.active, Command.SET, bodies, f"setting {name}")


def _checked_mask(mask: Any, num_envs: int) -> NDArray[np.bool_]:
    """A ``reset_mask`` as Gymnasium demands it."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(f"`options['reset_mask']` must contain at least one True value, got reset_mask={mask}")
    return mask
