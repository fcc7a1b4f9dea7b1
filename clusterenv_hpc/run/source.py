"""Where the training loop's rollouts come from: all workers in lockstep, or single workers as they arrive.

Either way the loop is the same: take a rollout, learn from it, publish.  What differs is who waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clusterenv_hpc.algorithms import Arrivals
from clusterenv_hpc.collect import NotFiniteError
from clusterenv_hpc.rollout import Episodes, Rollout, Tree


class Source(Protocol):
    """What a source asks of the environments; ``ClusterEnv`` is one such."""

    def rollout(self, num_steps: int) -> Rollout:
        """One rollout of all environments."""
        ...

    def rollouts(self, num_steps: int) -> Iterator[Rollout]:
        """Rollouts of single workers, in the order they arrive."""
        ...


def rollouts_for(algo: Any, envs: Source, enough: Callable[[int], bool] = lambda steps: False) -> Iterator[Rollout]:
    """Rollouts without end, each of the size of one update, as the algorithm's settings want them.

    enough: whether so many steps will do, though an update wants more: the run is at its end, or asked to stop.
    """
    if isinstance(algo, Arrivals):
        return arrivals(envs, algo.num_steps, algo.rollouts_per_update, enough)
    return lockstep(envs, algo.num_steps)


def trim(rollout: Rollout, steps: int) -> Rollout:
    """``rollout`` with its first ``steps`` valid steps, in the order of time and then of rows; later ones are masked.

    So the last update of a run uses what is left of ``total_steps``, and not a step more.
    """
    if rollout.env_steps <= steps:
        return rollout
    earlier = np.cumsum(rollout.valid.reshape(-1)).reshape(rollout.valid.shape) <= steps
    return replace(rollout, valid=rollout.valid & earlier)


def lockstep(envs: Source, num_steps: int) -> Iterator[Rollout]:
    """Every worker's rollout, and nobody starts the next before all are there."""
    while True:
        yield envs.rollout(num_steps)


def arrivals(
    envs: Source, num_steps: int, count: int, enough: Callable[[int], bool] = lambda steps: False
) -> Iterator[Rollout]:
    """``count`` rollouts at a time, of whichever workers came first: a slow worker is waited for by nobody."""
    waiting: list[Rollout] = []
    steps = 0
    for rollout in envs.rollouts(num_steps):
        waiting.append(rollout)
        steps += rollout.env_steps
        if len(waiting) == count or enough(steps):
            together = side_by_side(waiting)
            steps = 0
            waiting.clear()  # so that the buffers that rollouts arrive in are free for the next ones
            del rollout
            yield together
            del together


def demand_finite(rollout: Rollout, error: Exception) -> None:
    """Raises NotFiniteError, from ``error`` that an update ended in, where an observation it learnt from is infinite.

    Infinity is no mistake as such, since a policy may know what to do with it: so it is looked for only afterwards.
    """
    for path, array in _leaves(rollout.observations):
        if array.dtype.kind == "f" and not (good := np.isfinite(array)).all():
            t, column = np.argwhere(~good)[0][:2]
            raise NotFiniteError(
                f"environment {int(rollout.rows[column])} (rank {int(rollout.ranks[column])}) gave an infinite "
                f"observation{path} in step {t} of a rollout, and the update that learnt from it stopped being finite; "
                "bound it with a wrapper (env.wrappers), or with a policy that does",
                int(rollout.rows[column]),
            ) from error


def _leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, NDArray[Any]]]:
    if isinstance(tree, dict | tuple):
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(part, f"{path}[{key!r}]")
    else:
        yield path, np.asarray(tree)


def publishes(algo: Any, update: int) -> bool:
    """Whether workers are to hear of a new version after update number ``update``, counted from 1."""
    return not isinstance(algo, Arrivals) or update % algo.publish_every == 0


def side_by_side(rollouts: Sequence[Rollout]) -> Rollout:
    """Rollouts of as many steps as one, in the order given; the same environment may be there several times."""
    if len(rollouts) == 1:
        return rollouts[0]
    first = rollouts[0]
    if len({rollout.num_steps for rollout in rollouts}) > 1:
        raise ValueError(f"rollouts must have as many steps each; got {[rollout.num_steps for rollout in rollouts]}")

    def joined(name: str, axis: int = 1) -> Any:
        return np.concatenate([getattr(rollout, name) for rollout in rollouts], axis)

    per_step = ("actions", "behaviour_params", "rewards", "terminated", "truncated", "valid", "versions")
    episodes = [
        np.concatenate([getattr(rollout.episodes, key) for rollout in rollouts])
        for key in ("returns", "lengths", "rows")
    ]
    return replace(
        first,
        observations=_join([rollout.observations for rollout in rollouts]),
        next_observations=_join([rollout.next_observations for rollout in rollouts]),
        **{name: joined(name) for name in per_step},
        rows=joined("rows", 0),
        ranks=joined("ranks", 0),
        episodes=Episodes(*episodes),
        version=max(rollout.version for rollout in rollouts),
    )


def _join(trees: Sequence[Tree]) -> Tree:
    first = trees[0]
    if isinstance(first, dict):
        return {key: _join([tree[key] for tree in trees]) for key in first}
    if isinstance(first, tuple):
        return tuple(_join(list(parts)) for parts in zip(*trees, strict=True))
    arrays: Sequence[NDArray[Any]] = trees
    return np.concatenate(arrays, axis=1)
