"""From a rollout's NumPy trees to rows of tensors on the training device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..rollout import Tree


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """``function`` of every array, in a tree of the same structure."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, value) for value in tree)
    return function(tree)


def take(tree: Tree, rows: NDArray[np.int64], device: torch.device) -> Tree:
    """The given rows ``[M]`` of ``[T, N, ...]`` arrays, counted as ``[T*N, ...]``: tensors ``[M, ...]`` on ``device``.

    On the way to a GPU the rows are gathered in page-locked memory, so that the copy runs beside the next one's
    gathering; torch keeps that memory until the copy is done.
    """
    pinned = device.type == "cuda"

    def leaf(array: NDArray[Any]) -> Tensor:
        flat = array.reshape(-1, *array.shape[2:])
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        staged = torch.empty((len(rows), *flat.shape[1:]), dtype=dtype, pin_memory=pinned)
        np.take(flat, rows, axis=0, out=staged.numpy(), mode="clip")  # any other mode makes a copy first
        return staged.to(device, non_blocking=True)

    return map_leaves(leaf, tree)


def select(tree: Tree, rows: Tensor) -> Tree:
    """Rows of a tensor tree ``[M, ...]``."""
    return map_leaves(lambda tensor: tensor.index_select(0, rows), tree)


def chunks(tree: Tree, size: int) -> Iterator[Tree]:
    """A tensor tree ``[M, ...]`` in slices of at most ``size`` rows."""
    leaf = tree
    while not isinstance(leaf, Tensor):
        leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
    for start in range(0, len(leaf), size):
        stop = start + size
        yield map_leaves(lambda tensor: tensor[start:stop], tree)  # noqa: B023 - used before the next turn
