"""Settings that explain themselves: a dataclass field with its default, its meaning and what it allows.

Help texts, range checks and error messages are all read from the fields.  Imports neither torch nor MPI.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import field
from operator import ge, gt, le, lt
from typing import Any, TypeVar

T = TypeVar("T")

KINDS: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
"""What a value may be, by the type of its default."""


def about(help: str, *, choices: tuple[str, ...] = (), **bounds: float) -> dict[str, Any]:
    """A field's metadata: its meaning, and the values allowed: a set of words, or bounds named ge, gt, le, lt."""
    return {"help": help, "choices": choices, **bounds}


def key(default: Any, help: str, **allowed: Any) -> Any:
    """A dataclass field with its default and what :func:`about` says of it."""
    return field(default=default, metadata=about(help, **allowed))


def out_of_range(settings: Any, prefix: str = "") -> Iterator[str]:
    """One line for each value of ``settings`` (a dataclass of such fields) that its key does not allow."""
    for spec in dataclasses.fields(settings):
        value, path = getattr(settings, spec.name), f"{prefix}{spec.name}"
        if dataclasses.is_dataclass(value):
            yield from out_of_range(value, f"{path}.")
        elif value is not None and (allowed := _allowed(value, spec.metadata)):
            yield f"{path}={value}: {allowed}"


def _allowed(value: Any, metadata: Any) -> str | None:
    """What the key allows, where ``value`` is something else; None where it is fine."""
    if choices := metadata.get("choices"):
        return None if value in choices else f"allowed: {', '.join(choices)}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    bounds = [
        (sign, metadata[name], holds)
        for name, sign, holds in (("ge", ">=", ge), ("gt", ">", gt), ("le", "<=", le), ("lt", "<", lt))
        if metadata.get(name) is not None
    ]
    if math.isfinite(value) and all(holds(value, bound) for _, bound, holds in bounds):
        return None
    limits = " and ".join(f"{sign} {bound}" for sign, bound, _ in bounds)
    return f"allowed: {'an integer' if isinstance(value, int) else 'a finite number'} {limits}".rstrip()


def checked(settings: T) -> T:
    """``settings`` itself; raises ``ValueError`` naming the first key whose value is not allowed, or of another kind.

    For objects made in a script; a run's configuration has been through its own checks, which see every key.
    """
    for spec in dataclasses.fields(settings):  # type: ignore[arg-type]
        value, default = getattr(settings, spec.name), spec.default
        wanted = KINDS.get(type(default))
        wrong = wanted is not None and (
            not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool)
        )
        if wrong and not (value is None and "None" in str(spec.type)):
            raise ValueError(f"{spec.name}={value!r}: allowed: a {type(default).__name__}, such as {default!r}")
    for line in out_of_range(settings):
        raise ValueError(line)
    return settings
