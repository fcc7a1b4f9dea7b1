"""Transitions kept for learning from them again.

Each environment has a ring of its own, so that its steps lie one after the other however its worker's rollouts
arrive:

    ...  | step | step | last | end  | step | step | next |  oldest ...
           o a r  o a r  o a r  o      o a r  o a r  o
                                ^ the final observation     ^ head: the successor of the newest step

An observation is stored once: it is what one step saw, and the successor of the step before.  Where an episode
ended, a slot without an action holds the final observation (a reset-only step is just that).  Sums over n steps are
made when a batch is drawn, so they cross from one rollout into the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..rollout import Rollout, Tree
from .batches import map_leaves, take
from .returns import n_step
from .sum_tree import SumTree

NO_STEP, GOES_ON, TRUNCATED, TERMINATED = 0, 1, 2, 3
"""What a slot holds: an observation alone, or a step and how it ended."""


@dataclass(frozen=True)
class Sample:
    """B transitions of up to n steps.

    index: ``[B]``, where they lie; for ``Replay.set_priorities``.
    observations, next_observations: trees of tensors ``[B, ...]``; next: the state to bootstrap from.
    actions: ``[B, ...]``.  rewards: ``[B]``, the discounted sum.
    discounts: ``[B]``, the weight of the next state's value: gamma to the number of rewards, 0 where nothing follows.
    weights: ``[B]``, importance weights, at most 1; all 1 where sampling is uniform.
    """

    index: NDArray[np.int64]
    observations: Tree
    next_observations: Tree
    actions: Tensor
    rewards: Tensor
    discounts: Tensor
    weights: Tensor


class Replay:
    """The newest ``capacity`` steps of ``num_envs`` environments, an equal share for each.

    n_step, gamma: of the sums of rewards.
    prioritized: draw in proportion to priorities rather than uniformly.

    Memory is one block per field, made when the first rollout shows its shapes: observations in their own dtypes, and
    beside them an action, a reward and a byte for each step.  Raises ``ValueError`` where a rollout does not fit in.
    """

    def __init__(self, capacity: int, num_envs: int, n_step: int = 1, gamma: float = 0.99, prioritized: bool = False):
        self.num_envs, self.length = num_envs, capacity // num_envs + 1  # and one for the successor
        if self.length < 3:
            raise ValueError(f"capacity={capacity}: allowed: at least two steps for each of {num_envs} environments")
        self.n_step, self.gamma = n_step, gamma
        self._tree = SumTree(num_envs * self.length) if prioritized else None
        self._largest = 1.0
        self._head = np.zeros(num_envs, np.int64)
        self._count = np.zeros(num_envs, np.int64)
        self._kinds = np.zeros((num_envs, self.length), np.uint8)
        self._rewards = np.zeros((num_envs, self.length), np.float32)
        self._observations: Tree = None
        self._actions: NDArray[Any] | None = None
        self._size = 0

    def __len__(self) -> int:
        """How many steps can be drawn."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        blocks: list[NDArray[Any]] = [self._kinds, self._rewards, *_leaves(self._observations)]
        if self._actions is not None:
            blocks.append(self._actions)
        return sum(block.nbytes for block in blocks) + (self._tree.nbytes if self._tree else 0)

    # -- writing -----------------------------------------------------------------------------------------------------

    def add(self, rollout: Rollout, priorities: NDArray[Any] | None = None) -> None:
        """Take in a rollout; what it overwrites is gone.

        priorities: ``[T, N]``, above 0; without them a step counts as much as the largest so far.
        """
        if self._observations is None:
            self._allocate(rollout)
        for columns in _apart(rollout.rows):  # several rollouts of one environment follow each other
            self._add(rollout, columns, priorities)

    def _allocate(self, rollout: Rollout) -> None:
        def block(array: NDArray[Any]) -> NDArray[Any]:
            return np.empty((self.num_envs, self.length, *array.shape[2:]), array.dtype)

        self._observations = map_leaves(block, rollout.observations)
        self._actions = block(rollout.actions)

    def _add(self, rollout: Rollout, columns: NDArray[np.int64], priorities: NDArray[Any] | None) -> None:
        assert self._actions is not None
        rows, steps = rollout.rows[columns], rollout.num_steps
        valid, terminated = rollout.valid[:, columns], rollout.terminated[:, columns]
        ended = valid & (terminated | rollout.truncated[:, columns])
        # An end that no reset-only step follows needs a slot of its own for the final observation.
        extra = np.zeros_like(ended)
        extra[:-1] = ended[:-1] & valid[1:]
        before = np.cumsum(extra, axis=0)
        need = steps + int(before[-1].max(initial=0)) + 1
        if need >= self.length:
            raise ValueError(
                f"capacity={(self.length - 1) * self.num_envs}: allowed: more than {need * self.num_envs}, since a "
                f"rollout has {steps} steps of each of {self.num_envs} environments"
            )
        observations = [leaf[:, columns] for leaf in _leaves(rollout.observations)]
        following = [leaf[:, columns] for leaf in _leaves(rollout.next_observations)]
        blocks = _leaves(self._observations)
        self._begin(rows, [leaf[0] for leaf in observations], blocks)

        offset = np.arange(steps)[:, None] + before - extra  # of each step from its row's head
        slots = self._slots(rows, offset)
        finals = self._slots(rows, offset + 1)[extra]
        newest = self._slots(rows, steps + before[-1])
        written = np.concatenate((slots.ravel(), finals, newest))
        kinds = self._kinds.reshape(-1)
        gone = int(np.count_nonzero(kinds[written]))
        kinds[written] = NO_STEP
        kinds[slots] = np.where(valid, np.where(terminated, TERMINATED, np.where(ended, TRUNCATED, GOES_ON)), NO_STEP)
        self._size += int(np.count_nonzero(valid)) - gone
        self._rewards.reshape(-1)[slots] = np.where(valid, rollout.rewards[:, columns], 0.0)
        _flat(self._actions)[slots] = rollout.actions[:, columns]
        for block, now, after in zip(blocks, observations, following, strict=True):
            flat = _flat(block)
            flat[slots] = now
            flat[finals] = after[extra]
            flat[newest] = after[-1]
        self._head[rows] = newest - rows * self.length
        self._count[rows] = np.minimum(self._count[rows] + steps + before[-1], self.length - 1)
        if self._tree is not None:
            worth = np.full(valid.shape, self._largest) if priorities is None else priorities[:, columns]
            self._tree.set(np.sort(np.concatenate((finals, newest))), 0.0)
            by_row = slots.T.ravel()  # ascending but for the rings' ends
            self._tree.set(by_row, np.where(valid, worth, 0.0).T.ravel())
            self._largest = max(self._largest, float(np.max(worth, where=valid, initial=0.0)))

    def _begin(self, rows: NDArray[np.int64], first: list[NDArray[Any]], blocks: list[NDArray[Any]]) -> None:
        """Where a rollout does not go on from the successor that is stored, leave that in place and begin behind it."""
        head = self._head[rows]
        broken = np.zeros(len(rows), np.bool_)
        for block, leaf in zip(blocks, first, strict=True):
            broken |= (block[rows, head] != leaf).reshape(len(rows), -1).any(1)
        broken &= self._count[rows] > 0
        self._head[rows[broken]] = (head[broken] + 1) % self.length
        self._count[rows[broken]] = np.minimum(self._count[rows[broken]] + 1, self.length - 1)

    def _slots(self, rows: NDArray[np.int64], offset: NDArray[np.int64]) -> NDArray[np.int64]:
        """Flat positions, ``offset [..., R]`` behind the heads of ``rows [R]``."""
        return rows * self.length + (self._head[rows] + offset) % self.length

    # -- drawing -----------------------------------------------------------------------------------------------------

    def sample(
        self, size: int, generator: torch.Generator, device: torch.device, importance_exponent: float = 1.0
    ) -> Sample:
        """Draw ``size`` transitions, with replacement.

        importance_exponent: beta; weights are ``(P_i * len(self)) ** -beta``, divided by the largest of the batch
            (Schaul et al. 2016, section 3.4), where P_i is the chance of a draw.
        Raises ``ValueError`` where there is nothing to draw.
        """
        if not self._size:
            raise ValueError("the replay is empty: nothing can be drawn before a step was added")
        weights = np.ones(size, np.float32)
        if self._tree is None:
            index = self._uniform(size, generator)
        else:
            index = self._tree.sample(torch.rand(size, generator=generator, dtype=torch.float64).numpy())
            relative = (self._tree.leaves[index] / self._tree.total * self._size) ** -importance_exponent
            weights = (relative / relative.max()).astype(np.float32)
        row, time = np.divmod(index, self.length)
        window = row * self.length + (time + np.arange(self.n_step)[:, None]) % self.length
        kinds = self._kinds.reshape(-1)[window]
        rewards, lengths, terminal = n_step(
            self._rewards.reshape(-1)[window], kinds == TERMINATED, kinds == TRUNCATED, kinds != NO_STEP, self.gamma
        )
        discounts = np.where(terminal, 0.0, self.gamma**lengths).astype(np.float32)
        last = row * self.length + (time + lengths) % self.length
        to = lambda array: torch.from_numpy(array).to(device, non_blocking=True)  # noqa: E731
        return Sample(
            index=index,
            observations=take(self._observations, index, device),
            next_observations=take(self._observations, last, device),
            actions=take(self._actions, index, device),
            rewards=to(rewards),
            discounts=to(discounts),
            weights=to(weights),
        )

    def _uniform(self, size: int, generator: torch.Generator) -> NDArray[np.int64]:
        """Steps drawn uniformly: any slots that were written, again and again until enough of them hold a step."""
        ends = np.cumsum(self._count)
        found: list[NDArray[np.int64]] = []
        missing = size
        while missing > 0:
            drawn = torch.randint(int(ends[-1]), (missing + missing // 8 + 8,), generator=generator).numpy()
            row = np.searchsorted(ends, drawn, side="right")
            back = ends[row] - drawn  # from 1, the newest slot before the head
            index = row * self.length + (self._head[row] - back) % self.length
            found.append(index[self._kinds.reshape(-1)[index] != NO_STEP][:missing])
            missing -= len(found[-1])
        return np.concatenate(found)

    def set_priorities(self, index: NDArray[np.int64], priorities: NDArray[Any]) -> None:
        """New priorities ``[B]``, above 0, of steps that were drawn."""
        assert self._tree is not None
        self._tree.set(index, priorities)
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was written so far, as plain tensors."""
        used = self.length if (self._count == self.length - 1).any() else int(self._head.max()) + 1

        def saved(block: NDArray[Any]) -> Tensor:
            return torch.from_numpy(block[:, :used].copy())

        state: dict[str, Any] = {
            "shape": [self.num_envs, self.length],
            "size": self._size,
            "largest": self._largest,
            "head": torch.from_numpy(self._head.copy()),
            "count": torch.from_numpy(self._count.copy()),
        }
        if self._observations is not None:
            state |= {
                "kinds": saved(self._kinds),
                "rewards": saved(self._rewards),
                "actions": saved(self._actions),  # type: ignore[arg-type]
                "observations": map_leaves(saved, self._observations),
            }
            if self._tree is not None:
                state["priorities"] = saved(self._tree.leaves.reshape(self.num_envs, self.length))
        return state

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` is of a replay of this shape."""
        return list(state["shape"]) == [self.num_envs, self.length]

    def misfit(self, state: dict[str, Any]) -> str:
        """How it is not."""
        envs, length = state["shape"]
        return (
            f"the saved replay is of {envs} environments and capacity {envs * (length - 1)}; expected "
            f"{self.num_envs} and {self.num_envs * (self.length - 1)}, as now configured"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave.  Raises ``ValueError`` where this replay has another shape."""
        if not self.fits(state):
            raise ValueError(self.misfit(state))
        self._size, self._largest = state["size"], state["largest"]
        self._head[:], self._count[:] = state["head"].numpy(), state["count"].numpy()
        self._kinds[:] = NO_STEP
        if "kinds" not in state:
            return

        def restored(saved: Tensor) -> NDArray[Any]:
            array = saved.numpy()
            block = np.empty((self.num_envs, self.length, *array.shape[2:]), array.dtype)
            block[:, : array.shape[1]] = array
            return block

        self._observations = map_leaves(restored, state["observations"])
        self._actions = restored(state["actions"])
        used = state["kinds"].shape[1]
        self._kinds[:, :used], self._rewards[:, :used] = state["kinds"].numpy(), state["rewards"].numpy()
        if self._tree is not None:
            leaves = np.zeros((self.num_envs, self.length))
            leaves[:, :used] = state["priorities"].numpy()
            self._tree.set(np.arange(leaves.size), leaves.reshape(-1))


def _leaves(tree: Tree) -> list[NDArray[Any]]:
    """The arrays of a tree, in a fixed order."""
    if tree is None:
        return []
    found: list[NDArray[Any]] = []
    map_leaves(found.append, tree)
    return found


def _flat(block: NDArray[Any]) -> NDArray[Any]:
    """``[N, L, ...]`` as ``[N*L, ...]``, the same memory."""
    return block.reshape(-1, *block.shape[2:])


def _apart(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Columns in groups that have each environment once, the earlier of two columns of one first."""
    left = np.arange(len(rows))
    while len(left):
        _, first = np.unique(rows[left], return_index=True)
        yield left[np.sort(first)]
        left = np.delete(left, first)
