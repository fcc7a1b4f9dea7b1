"""What one collection of steps looks like, on both sides of the wire.

Axes are ``[T, N, ...]``: ``T`` steps, ``N`` environments, row ``i`` is always the same environment.
A worker auto-resets in Gymnasium's ``NEXT_STEP`` manner: the step after an episode's end only resets
(its action is ignored, its reward is 0).  Such a step is not a transition of the environment, and
``valid`` is False there; no loss, count or statistic may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tree = Any
"""An array, or a dict or tuple of trees: observations of nested spaces keep the space's structure."""


@dataclass(frozen=True)
class Episodes:
    """The episodes that ended within a rollout, in no particular order.

    ``returns`` are undiscounted sums of rewards ``[E]``, ``lengths`` counts of valid steps ``[E]``,
    ``rows`` the environments they ended in ``[E]``.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.returns)


@dataclass(frozen=True)
class Rollout:
    """``T`` consecutive steps of ``N`` environments, with what a learner needs to correct for staleness.

    observations: tree of ``[T, N, ...]`` in the observation space's own dtypes; what the action was chosen on.
    next_observations: tree of ``[T, N, ...]``; the true successor of each valid step.  Where an episode ended
        it is the final observation, never the next episode's first: bootstrap truncations from it.
    actions: ``[T, N, ...]`` as drawn from the behaviour distribution.  Discrete kinds: members of the action space.
        Box: the unclipped (unsquashed) sample, the one whose log-probability is meant.
    behaviour_params: ``[T, N, P]`` float32, the flat parameters of the distribution the action was drawn from.
    rewards: ``[T, N]`` float64.  terminated, truncated: ``[T, N]`` bool, never merged.
    valid: ``[T, N]`` bool; False on reset-only steps.
    versions: ``[T, N]`` int64, the policy version that chose each action.
    rows: ``[N]`` int64, which environments of the whole these are.  ranks: ``[N]`` int64, the worker rank of each.
    episodes: the episodes that ended here.
    version: int, the newest policy version the learner had published when it took this rollout up.
    """

    observations: Tree
    next_observations: Tree
    actions: NDArray[Any]
    behaviour_params: NDArray[np.float32]
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    versions: NDArray[np.int64]
    rows: NDArray[np.int64]
    ranks: NDArray[np.int64]
    episodes: Episodes
    version: int

    @property
    def num_steps(self) -> int:
        """T."""
        return int(self.rewards.shape[0])

    @property
    def num_envs(self) -> int:
        """N."""
        return int(self.rewards.shape[1])

    @property
    def env_steps(self) -> int:
        """How many true environment steps this holds (reset-only steps are not counted)."""
        return int(np.count_nonzero(self.valid))

    @property
    def lag(self) -> NDArray[np.int64]:
        """``[T, N]``: how many versions behind the learner's newest the behaviour policy was."""
        return self.version - self.versions
