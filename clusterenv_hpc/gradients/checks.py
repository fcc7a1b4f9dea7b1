"""What a parameter must be, said once: each function returns the value or raises ``ValueError`` naming it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def positive_int(name: str, value: Any) -> int:
    """``value`` as an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def positive_float(name: str, value: Any) -> float:
    """``value`` as a finite float > 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.integer, np.floating))
        or not (math.isfinite(value) and value > 0)
    ):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def unit_fraction(name: str, value: Any) -> float:
    """``value`` as a float in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)) or not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}")
    return float(value)


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """``value`` as one of the strings ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)
