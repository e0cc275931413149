"""The event heap: virtual time with a total order. Events at one time run by priority, then as they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import Any

Action = Callable[..., None]


class Order(IntEnum):
    """What goes first among events of one and the same time.

    A request that arrives with a new worker sees it; a step that begins at that time includes its arrivals; observers come last.
    """

    FLEET = 0
    ARRIVAL = 1
    ENGINE = 2
    MESSAGE = 3
    PLANNER = 4
    POOL = 5
    SAMPLE = 6


class Kernel:
    """Pending events and the time reached."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._sequence = 0
        self._heap: list[tuple[float, int, int, Action, tuple[Any, ...]]] = []

    def at(self, time_s: float, order: Order, action: Action, *arguments: Any) -> None:
        """Schedule ``action(*arguments)``."""
        if not time_s >= self.now_s:
            raise ValueError(f"cannot schedule at {time_s} s: it is {self.now_s} s already")
        heapq.heappush(self._heap, (time_s, order, self._sequence, action, arguments))
        self._sequence += 1

    def step(self) -> bool:
        """Run the next event; False without one."""
        if not self._heap:
            return False
        self.now_s, _, _, action, arguments = heapq.heappop(self._heap)
        self.events += 1
        action(*arguments)
        return True
