"""What every kind of run counts, over all the times it was started."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class Counters(ABC):
    """The counters of one run; ``state_dict`` and ``load_state_dict`` carry them over a resume.

    Every field but the first two is one of them.

    Args:
        window: episodes in the recent mean return.
        workers: workers, real or logical.
    """

    WIRE: ClassVar[tuple[str, ...]] = ()
    """Names of what is counted on the wire, by statistics that begin anew at every start."""

    window: int
    workers: int
    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    wall_s: float = 0.0
    idle_s: float = 0.0
    lag_sum: float = 0.0
    lag_max: int = 0

    def __post_init__(self) -> None:
        self._before = dict.fromkeys(self.WIRE, 0)
        self.wire = dict(self._before)

    @property
    @abstractmethod
    def return_mean(self) -> float:
        """Mean return of the recent episodes, as sampled; NaN before the first has ended."""

    @property
    @abstractmethod
    def return_std(self) -> float:
        """Their standard deviation."""

    @property
    @abstractmethod
    def length_mean(self) -> float:
        """Their mean length."""

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether there are ``window`` of them."""

    def _count(
        self, steps: int, episodes: int, seconds: float, idle_s: float, lag_max: int, wire: Mapping[str, int]
    ) -> None:
        """One update: its steps and episodes, how long it took and of that waited, and the wire's statistics so far."""
        self.updates += 1
        self.env_steps += steps
        self.episodes += episodes
        self.wall_s += seconds
        self.idle_s += idle_s
        self.lag_max = max(self.lag_max, lag_max)
        self.wire = {name: before + wire[name] for name, before in self._before.items()}

    def _record(self, steps: int, seconds: float, idle_s: float) -> dict[str, Any]:
        """What metrics.jsonl says of any update."""
        return {
            "update": self.updates,
            "env_steps": self.env_steps,
            "wall_s": self.wall_s,
            "steps_per_s": steps / seconds,
            "idle_share": idle_s / seconds,
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "length_mean": self.length_mean,
            "episodes": self.episodes,
            **self.wire,
        }

    def summary(self) -> dict[str, Any]:
        """The counters, under the names of summary.json."""
        return {
            "env_steps": self.env_steps,
            "updates": self.updates,
            "wall_s": self.wall_s,
            "steps_per_s": self.env_steps / self.wall_s if self.wall_s else 0.0,
            "idle_share": self.idle_s / self.wall_s if self.wall_s else 0.0,
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "episodes": self.episodes,
            **self.wire,
            "lag_max": self.lag_max,
        }

    def _plain(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self)[2:]]

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers and lists."""
        return {name: getattr(self, name) for name in self._plain()} | {"wire": dict(self.wire)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state_dict`` gave, with statistics of the wire that begin anew."""
        for name in self._plain():
            setattr(self, name, state[name])
        self._before = {name: state["wire"].get(name, 0) for name in self.WIRE}
        self.wire = dict(self._before)
