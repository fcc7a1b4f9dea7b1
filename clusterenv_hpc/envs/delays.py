"""Injected delays: steps that take longer on some workers than on others, as real sleeps, for experiments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import VectorEnv

SCHEMES = ("none", "equal", "sqrt", "linear", "straggler", "list")


@dataclass(frozen=True)
class Delay:
    """How long each worker sleeps at each step of its environments, all of them together, in seconds.

    scheme: for worker i = 1 .. n: ``equal``: ``seconds``; ``sqrt``: ``seconds * sqrt(i)``; ``linear``: ``seconds * i``;
        ``straggler``: ``seconds``, and ``seconds * factor`` for the last; ``list``: ``values[i - 1]``; ``none``: 0.

    Raises:
        ValueError: a setting that cannot be.
    """

    scheme: str = "none"
    seconds: float = 0.0
    factor: float = 10.0
    values: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(f"delay.scheme must be one of {', '.join(SCHEMES)}; got {self.scheme!r}")
        for name, numbers in (("seconds", [self.seconds]), ("factor", [self.factor]), ("values", self.values)):
            if not all(math.isfinite(number) and number >= 0 for number in numbers):
                raise ValueError(f"delay.{name} must be finite and not negative, got {getattr(self, name)}")
        if (self.scheme == "list") != bool(self.values):
            raise ValueError(
                f"delay.values are for scheme='list', one for each worker; got scheme={self.scheme!r} and "
                f"{len(self.values)} values"
            )

    def by_worker(self, workers: int) -> tuple[float, ...]:
        """Seconds for each of ``workers`` workers.

        Raises:
            ValueError: ``values`` are for another number of them.
        """
        if self.scheme == "list" and len(self.values) != workers:
            raise ValueError(f"delay.values must be one for each of {workers} workers, got {len(self.values)}")
        scale: dict[str, Callable[[int], float]] = {
            "none": lambda i: 0.0,
            "equal": lambda i: self.seconds,
            "sqrt": lambda i: self.seconds * math.sqrt(i),
            "linear": lambda i: self.seconds * i,
            "straggler": lambda i: self.seconds * (self.factor if i == workers else 1.0),
            "list": lambda i: float(self.values[i - 1]),
        }
        return tuple(scale[self.scheme](i) for i in range(1, workers + 1))


def slow_down(envs: VectorEnv[Any, Any, Any], seconds: float) -> None:
    """Have each ``envs.step`` take ``seconds`` longer.  The environments themselves do not notice."""
    if seconds > 0:
        step = envs.step

        def slow_step(actions: Any) -> Any:
            time.sleep(seconds)
            return step(actions)

        envs.step = slow_step  # type: ignore[method-assign]
