"""How many requests a worker takes: a number in its engine, a few more in a queue, and not one beyond. Pure.

Source: NVIDIA Dynamo's document "Request Rejection", "Worker-Side Request Admission".
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class SlotState(Enum):
    """What becomes of a request that arrives."""

    RUNNING = auto()
    QUEUED = auto()
    REJECTED = auto()


class RequestSlots(Generic[T]):
    """The requests of one worker; at most ``limit`` run and at most ``queue`` wait, at every moment."""

    def __init__(self, limit: int | None, queue: int) -> None:
        """Begin empty; ``limit`` None: no bound, and nothing waits."""
        self._limit = limit
        self._queue = queue
        self._running: set[T] = set()
        self._queued: dict[T, int] = {}
        self.rejected = 0

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests that wait for the engine."""
        return len(self._queued)

    def enter(self, item: T, priority: int = 0) -> SlotState:
        """Take a request, if there is room; ``item`` is unique among those within, and the lowest priority runs first."""
        if self._limit is None or len(self._running) < self._limit:
            self._running.add(item)
            return SlotState.RUNNING
        if len(self._queued) < self._queue:
            self._queued[item] = priority
            return SlotState.QUEUED
        self.rejected += 1
        return SlotState.REJECTED

    def leave(self, item: T) -> T | None:
        """Let a request go, from wherever it is; return the one that runs in its place, of one priority the first that came."""
        if item in self._queued:
            del self._queued[item]
            return None
        if item not in self._running:
            return None
        self._running.remove(item)
        following = min(self._queued, key=self._queued.__getitem__, default=None)
        if following is not None:
            del self._queued[following]
            self._running.add(following)
        return following
