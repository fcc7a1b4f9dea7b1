"""Infos on the wire: what arrives is what left, to the type and the bit; what cannot arrive is named."""

from __future__ import annotations

import math
import random
import string
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from exact import assert_same

from clusterenv_hpc.comm.codec import EncodeError, decode, encode

DTYPES = [
    "?",
    "i1",
    "u1",
    "<i2",
    ">i4",
    "<u4",
    "<i8",
    "<u8",
    "<f2",
    "<f4",
    ">f8",
    "<c8",
    "<c16",
    "<M8[s]",
    "<m8[ns]",
    "<U3",
    "S4",
]


def random_array(source: random.Random, dtype: str) -> np.ndarray:
    shape = tuple(source.randrange(0, 4) for _ in range(source.randrange(0, 4)))
    raw = np.frombuffer(source.randbytes(64 * 16), np.uint8)[: math.prod(shape) * 16]
    if dtype == "?":
        return (raw[: math.prod(shape)] % 2).astype(bool).reshape(shape)
    if dtype.startswith("<U"):
        return np.array([source.choice(["", "a", "äöü", "€"]) for _ in range(math.prod(shape))], dtype).reshape(shape)
    if dtype[1:2] == "M":
        return (
            np.array([source.randrange(2**31) for _ in range(math.prod(shape))])
            .astype("<i8")
            .view(dtype)
            .reshape(shape)
        )
    return raw.view(dtype)[: math.prod(shape)].reshape(shape)  # any bits: NaNs and denormals too


def random_value(source: random.Random, depth: int = 0) -> Any:
    leaves = [
        lambda: None,
        lambda: source.random() < 0.5,
        lambda: source.randrange(-5, 5),
        lambda: source.choice([2**31, -(2**63), 2**63 - 1, 2**64 - 1, 2**64, -(2**200)]),
        lambda: source.choice([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-320, source.random()]),
        lambda: complex(source.random(), -0.0),
        lambda: "".join(source.choices(string.printable + "äß€😀\0", k=source.randrange(40))),
        lambda: source.randbytes(source.randrange(40)),
        lambda: random_array(source, source.choice(DTYPES)),
        lambda: random_array(source, source.choice(DTYPES)).ravel().tolist(),
        lambda: np.dtype(source.choice(["f4", "f8", "f2", "i1", "u8", "?", "c16"])).type(source.randrange(2)),
        lambda: np.array([source.randrange(9), "x", None, (1, 2)], dtype=object),
    ]
    if depth < 4 and source.random() < 0.5:
        size = source.randrange(4)
        items = [random_value(source, depth + 1) for _ in range(size)]
        return source.choice([
            lambda: items,
            lambda: tuple(items),
            lambda: dict(zip(source.sample([*"abcdefg", 0, -7, b"k", 2.5], size), items, strict=True)),
        ])()  # fmt: skip
    value = source.choice(leaves)()
    return (
        [item.item() if isinstance(item, np.generic) else item for item in value] if isinstance(value, list) else value
    )


def plain(value: Any) -> bool:
    """``tolist`` of dates gives Python's own, which are none of ours."""
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    if isinstance(value, dict):
        return all(map(plain, value.values()))
    return type(value).__module__ != "datetime"


@pytest.mark.parametrize("seed", range(300))
def test_what_arrives_is_what_left(seed: int) -> None:
    value = random_value(random.Random(seed))
    if plain(value):
        assert_same(decode(encode(value)), value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_and_shape(dtype: str) -> None:
    source = random.Random(dtype)
    for _ in range(40):
        array = random_array(source, dtype)
        got = decode(encode(array))
        assert_same(got, array)
        assert got.flags.writeable, "Gymnasium's infos may be written to"
        for scalar in array.ravel()[:3]:
            assert_same(decode(encode(scalar)), scalar)


@pytest.mark.parametrize(
    "value",
    [
        np.str_("text"), np.str_(""), np.bytes_(b"text"), np.bytes_(b""), np.array(["", ""]), np.zeros((0, 3)),
        np.zeros((2, 0), np.int8), np.array(3.5), np.array(None, dtype=object), np.zeros((0,), object),
        np.array([[1, None], ["x", (2, [3])]], dtype=object), np.longdouble(1) / 3, np.ones(2, np.longdouble),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(10)[::-3], np.broadcast_to(np.float32(2), (2, 2)),
        {}, [], (), ((),), {"": {"": ()}}, {1: "int", "1": "str", b"1": "bytes"}, {True: 1}, b"", 10**400,
        "\ud800 alone",
        np.datetime64("2026-01-01"), np.datetime64("NaT"), np.timedelta64(3, "ms"),
    ],
    ids=repr,
)  # fmt: skip
def test_corner_cases(value: Any) -> None:
    assert_same(decode(encode(value)), value)


def test_key_order_and_key_types_stay() -> None:
    value = {"b": 1, "a": 2, 3: {"z": 1, "y": 2}, -1.5: 0}
    got = decode(encode(value))
    assert [(type(key), key) for key in got] == [(type(key), key) for key in value]
    assert list(got[3]) == ["z", "y"]


def test_an_ordered_dict_arrives_as_a_dict_in_its_order() -> None:
    assert_same(decode(encode(OrderedDict([("b", 1), ("a", 2)]))), {"b": 1, "a": 2})


def test_large_values() -> None:
    value = {"array": np.arange(700_000.0), "bytes": bytes(3_000_000), "many": list(range(50_000))}
    assert_same(decode(encode(value)), value)


def test_depth_of_two_hundred() -> None:
    value: Any = 1
    for i in range(200):
        value = [value] if i % 2 else {"x": value}
    assert_same(decode(encode(value)), value)
    for wrap in (lambda v: (v,), lambda v: [v], lambda v: {"x": v}):
        value = 1
        for _ in range(100):
            value = wrap(value)
        assert_same(decode(encode(value)), value)


class Mode(IntEnum):
    FAST = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        (object(), "info", "builtins.object"),
        ({"a": [1, {"b": object()}]}, "info['a'][1]['b']", "builtins.object"),
        ({"a": (1, {2, 3})}, "info['a'][1]", "builtins.set"),
        ({"a": np.array([1, object()], dtype=object)}, "info['a'][1]", "builtins.object"),
        ({(1, 2): 1}, "info: the key (1, 2)", "builtins.tuple"),
        ({None: 1}, "info: the key None", "builtins.NoneType"),
        ({np.int64(1): 1}, "info: the key np.int64(1)", "numpy.int64"),
        ({2**70: 1}, f"info: the key {2**70}", "builtins.int"),
        ({"a": np.zeros(2, [("x", "f4")])}, "info['a']", "numpy.ndarray"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, "info['a']", "numpy.ma.MaskedArray"),
        ({"a": Mode.FAST}, "info['a']", "test_codec.Mode"),
        ({"a": Text("x")}, "info['a']", "test_codec.Text"),
        (lambda: None, "info", "builtins.function"),
        (bytearray(b"x"), "info", "builtins.bytearray"),
    ],
    ids=lambda told: told if isinstance(told, str) else type(told).__name__,
)
def test_what_cannot_be_sent_is_named(value: Any, path: str, kind: str) -> None:
    with pytest.raises(EncodeError) as caught:
        encode(value, "info")
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} is a ") and kind.rpartition(".")[2] in str(caught.value)
    assert "expected numbers, strings" in str(caught.value)


def test_a_value_that_contains_itself_is_refused_in_a_few_words() -> None:
    value: list[Any] = []
    value.append({"again": value})
    with pytest.raises(EncodeError) as caught:
        encode(value, "info")
    assert len(str(caught.value)) < 600 and "info[0]['again']" in str(caught.value)
    deep: Any = 1
    for _ in range(5000):
        deep = (deep,)
    with pytest.raises(EncodeError):
        encode(deep, "info")


def test_a_torch_tensor_is_refused() -> None:
    import torch

    with pytest.raises(EncodeError, match=r"info\['x'\] is a torch.Tensor"):
        encode({"x": torch.zeros(2)}, "info")


def test_what_was_decoded_shares_nothing_with_the_message() -> None:
    message = bytearray(encode({"x": np.arange(4)}))
    got = decode(message)
    message[:] = bytes(len(message))
    assert_same(got["x"], np.arange(4))


def test_bytes_that_are_no_message_are_refused() -> None:
    for junk in (b"", b"\xc1", encode([1, 2])[:-1], encode([1, 2]) + b"\x01", b"\xc7\x01\x63\x00"):
        with pytest.raises(ValueError):
            decode(junk)
