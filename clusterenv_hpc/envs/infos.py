"""Infos and actions of several workers as if one vector environment held all environments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray


def merge_infos(envs: VectorEnv[Any, Any, Any], parts: list[tuple[tuple[int, int], list[Any]]]) -> dict[str, Any]:
    """One info dict from what the workers sent.

    Args:
        envs: the whole; its own ``_add_info`` adds single infos, in the order of rows, as ``SyncVectorEnv`` does.
        parts: ``((first row, end row), ["single", [[row, info], ...]] or ["vector", infos])`` in the order of rows.
    """
    merged: dict[str, Any] = {}
    for (first, end), (kind, content) in parts:
        if kind == "single":
            for row, info in content:
                merged = envs._add_info(merged, info, row)
        else:
            _place(merged, content, first, end, envs.num_envs)
    return merged


def _place(merged: dict[str, Any], infos: dict[str, Any], first: int, end: int, total: int) -> None:
    """Rows ``first`` to ``end`` of a vector environment's infos into those of the whole."""
    for key, value in infos.items():
        if isinstance(value, dict):
            _place(merged.setdefault(key, {}), value, first, end, total)
        elif isinstance(value, np.ndarray) and value.shape[:1] == (end - first,):
            if key not in merged:
                empty = None if value.dtype.hasobject else np.zeros((), value.dtype)
                merged[key] = np.full((total, *value.shape[1:]), empty, dtype=value.dtype)
            merged[key][first:end] = value
        else:  # not one value for each environment: kept beside the rows it came from
            if key not in merged:
                merged[key] = np.full(total, None, dtype=object)
            for row in range(first, end):
                merged[key][row] = value


def slice_actions(space: Space[Any], actions: Any, first: int, end: int) -> Any:
    """The actions of rows ``first`` to ``end``, of whatever type they were given in."""
    if isinstance(space, spaces.Dict):
        return {key: slice_actions(part, actions[key], first, end) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(slice_actions(part, item, first, end) for part, item in zip(space.spaces, actions, strict=True))
    if not isinstance(actions, (np.ndarray, list, tuple)):
        actions = np.asarray(actions)
    return actions[first:end]


def check_actions(
    space: Space[Any], actions: Any, num_envs: int, unread: NDArray[np.bool_] | None = None, path: str = "actions"
) -> None:
    """Raises ``ValueError`` unless every part of ``actions`` has one entry for each of ``num_envs`` environments.

    unread: ``[num_envs]``, whose entries nobody will read, because they only reset: those may hold any number.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for key, part in _parts(space):
            try:
                item = actions[key]
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"{path} have no part {key!r}, which the action space {space} has") from None
            check_actions(part, item, num_envs, unread, f"{path}[{key!r}]")
        return
    try:
        given = len(actions)
    except TypeError:
        given = 0
    if given != num_envs:
        raise ValueError(
            f"{path} must be for num_envs={num_envs} environments, one after the other; got "
            f"{given or f'{type(actions).__name__} {actions!r}'}"
        )
    _check_values(space, actions, unread, path)


def _check_values(space: Space[Any], actions: Any, unread: NDArray[np.bool_] | None, path: str) -> None:
    """Raises ``ValueError`` where a row has more or fewer numbers than ``space`` says, or cannot be meant.

    A ``Box``'s bounds are left to the environment: many clip what goes beyond them.  So are other shapes and dtypes
    of as many numbers, and what is no number is refused where it is sent.
    """
    shape = space.shape or ()
    try:
        values = np.asarray(actions)
        if values.dtype == object:
            values = np.array(values.tolist())
        if values.dtype.kind not in "biuf":
            return
        values = values.reshape(len(values), *shape)
    except ValueError:
        raise ValueError(
            f"{path} must have shape {shape} for each environment, as {space} says; got {_form(actions)}"
        ) from None
    if isinstance(space, spaces.Box):
        good = values == values if values.dtype.kind == "f" else np.ones(len(values), dtype=bool)  # but for NaN
    else:
        low, count = _range(space)
        good = (values >= low) & (values < low + count)
    if good.all():
        return
    wrong = ~good.reshape(len(values), -1).all(axis=1)
    if unread is not None:
        wrong &= ~unread
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{path}[{row}], of environment {row}, is {actions[row]!r}; expected a member of {space}")


def _range(space: Space[Any]) -> tuple[Any, Any]:
    """The least member of a discrete ``space``, and how many there are, place by place."""
    if isinstance(space, spaces.Discrete):
        return space.start, space.n
    return (space.start, space.nvec) if isinstance(space, spaces.MultiDiscrete) else (0, 2)


def _form(actions: Any) -> str:
    return str(actions.shape[1:]) if isinstance(actions, np.ndarray) else f"{type(actions).__name__} {actions!r:.80}"


def array_leaves(space: Space[Any], actions: Any) -> list[NDArray[Any]] | None:
    """The leaves of ``actions``, if each is an array."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        found = [array_leaves(part, actions[key]) for key, part in _parts(space)]
        return None if None in found else [array for arrays in found for array in arrays or ()]
    return [actions] if isinstance(actions, np.ndarray) else None


def _parts(space: spaces.Dict | spaces.Tuple) -> Iterable[tuple[Any, Space[Any]]]:
    return space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
