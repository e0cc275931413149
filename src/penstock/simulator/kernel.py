"""Discrete-event kernel: virtual time, and a heap of events in a total order.

Events at the same time run by their `Order`, then in the order in which they were scheduled.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import Any

Action = Callable[..., None]


class Order(IntEnum):
    """Order of events at the same time; a lower value runs first.

    FLEET events (workers become ready, die, resize) come before ARRIVAL, so that a request sees a worker that becomes ready at its arrival.
    An ENGINE step includes the requests that arrive at the time when it starts. MESSAGE are messages between components. PLANNER, POOL (the
    GPU pool's allocation) and SAMPLE observe the result, and come last.
    """

    FLEET = 0
    ARRIVAL = 1
    ENGINE = 2
    MESSAGE = 3
    PLANNER = 4
    POOL = 5
    SAMPLE = 6


class Kernel:
    """Discrete-event loop.

    Attributes:
        now_s: Current virtual time, in simulated seconds; starts at 0.
        events: Number of events run so far.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._sequence = 0
        self._heap: list[tuple[float, int, int, Action, tuple[Any, ...]]] = []

    def at(self, time_s: float, order: Order, action: Action, *arguments: Any) -> None:
        """Schedule the call ``action(*arguments)`` at the virtual time ``time_s``.

        Args:
            time_s: Virtual time of the call, in simulated seconds from the start.
            order: Position among events at the same time.
            action: Function to call.
            arguments: Arguments of the call.

        Raises:
            ValueError: ``time_s`` is before the current time.
        """
        if not time_s >= self.now_s:
            raise ValueError(f"cannot schedule at {time_s} s: it is {self.now_s} s already")
        heapq.heappush(self._heap, (time_s, order, self._sequence, action, arguments))
        self._sequence += 1

    def step(self) -> bool:
        """Advance the virtual time to the next scheduled event, and run it. Return True, or False if no event is scheduled."""
        if not self._heap:
            return False
        self.now_s, _, _, action, arguments = heapq.heappop(self._heap)
        self.events += 1
        action(*arguments)
        return True
