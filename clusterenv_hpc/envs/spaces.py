"""Gymnasium spaces as what the wire needs: a list of typed leaves, and a description that can be compared.

A nested observation (Dict, Tuple, and any mixture) is a tree of arrays; ``leaves`` names them in a fixed
order, ``split`` takes a batched value apart into them, ``join`` puts it together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from ..comm.codec import decode, encode
from ..comm.messages import Leaf


class SpaceError(TypeError):
    """A space that has no fixed shape, or that no policy here can act in."""


_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def leaves(space: Space[Any], path: str = "") -> tuple[Leaf, ...]:
    """The arrays that one value of ``space`` consists of, in a fixed order.

    Raises:
        SpaceError: for spaces whose values have no fixed shape (Text, Graph, Sequence, OneOf).
    """
    if isinstance(space, spaces.Dict):
        return tuple(leaf for key, part in space.spaces.items() for leaf in leaves(part, f"{path}[{key!r}]"))
    if isinstance(space, spaces.Tuple):
        return tuple(leaf for i, part in enumerate(space.spaces) for leaf in leaves(part, f"{path}[{i}]"))
    if isinstance(space, _LEAVES):
        return (Leaf(path, np.dtype(space.dtype), tuple(space.shape or ())),)
    where = f" at {path}" if path else ""
    raise SpaceError(
        f"{type(space).__name__} spaces have no fixed shape and cannot be sent as typed arrays{where}: "
        "expected Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of these; wrap the environment"
    )


def split(space: Space[Any], value: Any) -> list[NDArray[Any]]:
    """A batched value of ``space`` as its leaf arrays ``[..., *leaf.shape]``, without copies where they are arrays."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in split(part, value[key])]
    if isinstance(space, spaces.Tuple):
        return [leaf for part, item in zip(space.spaces, value, strict=True) for leaf in split(part, item)]
    return [np.asarray(value)]


def join(space: Space[Any], arrays: Sequence[NDArray[Any]]) -> Any:
    """The tree of ``space``'s structure over leaf arrays in the order of ``leaves``."""
    return _join(space, iter(arrays))


def _join(space: Space[Any], arrays: Iterator[NDArray[Any]]) -> Any:
    # Not a closure: one that calls itself is a cycle, and would keep the arrays' buffer in use until it is collected.
    if isinstance(space, spaces.Dict):
        return {key: _join(part, arrays) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_join(part, arrays) for part in space.spaces)
    return next(arrays)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """``function`` of every array in a tree of dicts and tuples."""
    if isinstance(tree, dict):
        return {key: map_tree(function, item) for key, item in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, item) for item in tree)
    return function(tree)


def _describe(space: Space[Any]) -> list[Any]:
    if isinstance(space, spaces.Box):
        bounded = [space.bounded_below, space.bounded_above]  # of whole numbers, the bounds themselves do not tell
        return ["box", space.low, space.high, list(space.shape), np.dtype(space.dtype).str, *bounded]
    if isinstance(space, spaces.Discrete):
        return ["discrete", int(space.n), int(space.start), np.dtype(space.dtype).str]
    if isinstance(space, spaces.MultiDiscrete):
        return ["multidiscrete", space.nvec, space.start, np.dtype(space.dtype).str]
    if isinstance(space, spaces.MultiBinary):
        return ["multibinary", int(space.n) if isinstance(space.n, (int, np.integer)) else list(space.n)]
    if isinstance(space, spaces.Dict):
        return ["dict", [[key, _describe(part)] for key, part in space.spaces.items()]]
    if isinstance(space, spaces.Tuple):
        return ["tuple", [_describe(part) for part in space.spaces]]
    raise SpaceError(f"unknown space {space!r}")


def encode_space(space: Space[Any]) -> bytes:
    """A canonical description: equal bytes mean equal spaces.

    Raises:
        SpaceError: for spaces that cannot be sent.
    """
    leaves(space)
    return encode(_describe(space), "the space")


def _restore(description: list[Any]) -> Space[Any]:
    kind, *rest = description
    if kind == "box":
        low, high, shape, dtype, below, above = rest
        box = spaces.Box(low=low, high=high, shape=tuple(shape), dtype=np.dtype(dtype).type)
        box.bounded_below, box.bounded_above = below, above
        return box
    if kind == "discrete":
        n, start, dtype = rest
        return spaces.Discrete(n, start=start, dtype=np.dtype(dtype).type)
    if kind == "multidiscrete":
        nvec, start, dtype = rest
        return spaces.MultiDiscrete(nvec, dtype=np.dtype(dtype).type, start=start)
    if kind == "multibinary":
        return spaces.MultiBinary(rest[0])
    if kind == "dict":
        return spaces.Dict([(key, _restore(part)) for key, part in rest[0]])
    if kind == "tuple":
        return spaces.Tuple([_restore(part) for part in rest[0]])
    raise SpaceError(f"unknown space description {kind!r}")


def decode_space(data: bytes) -> Space[Any]:
    """The space that ``encode_space`` described."""
    return _restore(decode(data))
