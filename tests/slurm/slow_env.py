"""CartPole at a steady pace, so that a run lasts about as long on any machine."""

from __future__ import annotations

import time
from typing import Any

import gymnasium


class SlowCartPole(gymnasium.Wrapper):
    """Each step takes ``delay_s`` seconds and a little."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._delay_s = delay_s

    def step(self, action: Any) -> Any:
        time.sleep(self._delay_s)
        return super().step(action)


gymnasium.register("SlowCartPole-v0", entry_point=SlowCartPole)
