"""Infos, options, arguments and results as msgpack with arrays: typed, exact, and never code.

What arrives has the type that left: NumPy scalars stay NumPy scalars, tuples stay tuples, arrays keep dtype
and shape.  That matters: Gymnasium decides an info array's dtype from the type of the first value it sees.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

_ARRAY, _SCALAR, _TUPLE, _BIG_INT, _OBJECTS, _COMPLEX = 1, 2, 3, 4, 5, 6


DEEPEST = 200
"""How deep containers may nest: msgpack's own limits lie not far beyond."""


class EncodeError(TypeError):
    """A value that cannot cross the wire; ``path`` says which."""

    def __init__(self, path: str, value: Any, why: str = "") -> None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        shown = path if len(path) <= 120 else f"{path[:80]}...{path[-30:]}"
        super().__init__(
            f"{shown or 'the value'} is a {kind}{why}, which cannot be sent between ranks: expected numbers, strings, "
            "bytes, None, NumPy arrays of them, or lists, tuples and dicts of these"
        )
        self.path = path


def _prepare(value: Any, path: str, depth: int = 0) -> Any:
    """``value`` in msgpack's own types and ``ExtType``."""
    kind = type(value)
    if depth > DEEPEST:
        raise EncodeError(path, value, f" nested more than {DEEPEST} deep")
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        if _is_small(value):
            return value
        return msgpack.ExtType(_BIG_INT, str(value).encode())
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, np.complex128(value).tobytes())
    depth += 1
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise EncodeError(path, value)
        if value.dtype.hasobject:
            items = [_prepare(item, f"{path}[{i}]", depth) for i, item in enumerate(value.ravel().tolist())]
            return msgpack.ExtType(_OBJECTS, _pack([list(value.shape), items]))
        if value.dtype.fields is not None:
            raise EncodeError(path, value)
        return msgpack.ExtType(_ARRAY, msgpack.packb([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, np.generic) and value.dtype.kind in "biufcmMSU":
        return msgpack.ExtType(_SCALAR, msgpack.packb([value.dtype.str, value.tobytes()]))
    if kind is tuple:
        items = [_prepare(item, f"{path}[{i}]", depth) for i, item in enumerate(value)]
        return msgpack.ExtType(_TUPLE, _pack(items))
    if kind is list:
        return [_prepare(item, f"{path}[{i}]", depth) for i, item in enumerate(value)]
    if isinstance(value, dict):
        prepared = {}
        for key, item in value.items():
            if type(key) not in (str, int, bytes, bool, float) or (type(key) is int and not _is_small(key)):
                raise EncodeError(f"{path}: the key {key!r}", key)
            prepared[key] = _prepare(item, f"{path}[{key!r}]", depth)
        return prepared
    raise EncodeError(path, value)


def encode(value: Any, path: str = "") -> bytes:
    """``value`` as bytes.  ``path`` prefixes the place named in an error.

    Raises:
        EncodeError: it holds something other than numbers, strings, arrays and containers of them.
    """
    return _pack(_prepare(value, path))


def _is_small(value: int) -> bool:
    return -(2**63) <= value < 2**64


def _pack(prepared: Any) -> bytes:
    return msgpack.packb(prepared, unicode_errors="surrogatepass")


def _scalar(dtype: str, data: bytes) -> Any:
    kind = np.dtype(dtype)
    return np.frombuffer(data, dtype=kind, count=1)[0] if kind.itemsize else kind.type()  # as for empty strings


def _revive(code: int, data: bytes) -> Any:
    if code == _ARRAY:
        dtype, shape, raw = msgpack.unpackb(data)
        kind = np.dtype(dtype)
        if not kind.itemsize:  # empty strings have no bytes to read
            return np.zeros(shape, dtype=kind)
        return np.frombuffer(raw, dtype=kind).reshape(shape).copy()
    if code == _SCALAR:
        return _scalar(*msgpack.unpackb(data))
    if code == _TUPLE:
        return tuple(decode(data))
    if code == _BIG_INT:
        return int(data.decode())
    if code == _OBJECTS:
        shape, items = decode(data)
        array = np.empty(len(items), dtype=object)
        for i, item in enumerate(items):
            array[i] = item
        return array.reshape(shape)
    if code == _COMPLEX:
        return complex(np.frombuffer(data, dtype=np.complex128)[0])
    raise ValueError(f"unknown extension type {code} in a message")


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value that ``encode`` was given."""
    return msgpack.unpackb(data, ext_hook=_revive, strict_map_key=False, unicode_errors="surrogatepass")
