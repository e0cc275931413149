"""Limits the requests of a worker: a maximum number in its engine, some more in a queue, and further ones are rejected. Pure.

Source: NVIDIA Dynamo's document "Request Rejection", "Worker-Side Request Admission".
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class SlotState(Enum):
    """Result of the admission of a request.

    Attributes:
        RUNNING: It can enter the engine.
        QUEUED: It waits for the engine.
        REJECTED: It was not added, because engine and queue are full.
    """

    RUNNING = auto()
    QUEUED = auto()
    REJECTED = auto()


class RequestSlots(Generic[T]):
    """The requests of one worker; at most ``limit`` run and at most ``queue`` wait at any time.

    Attributes:
        rejected: Number of requests rejected since the start.
    """

    def __init__(self, limit: int | None, queue: int) -> None:
        """Create an empty set of requests.

        Args:
            limit: Maximum number of running requests; None means no limit, so that no request waits.
            queue: Maximum number of waiting requests.
        """
        self._limit = limit
        self._queue = queue
        self._running: set[T] = set()
        self._queued: dict[T, int] = {}
        self.rejected = 0

    @property
    def running(self) -> int:
        """Number of requests in the engine."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Number of requests that wait for the engine."""
        return len(self._queued)

    def enter(self, item: T, priority: int = 0) -> SlotState:
        """Add a request if there is room, and return whether it runs, is queued or was rejected.

        Args:
            item: The request, any hashable object; it must not be running or queued already.
            priority: Priority; the lowest value runs first.
        """
        if self._limit is None or len(self._running) < self._limit:
            self._running.add(item)
            return SlotState.RUNNING
        if len(self._queued) < self._queue:
            self._queued[item] = priority
            return SlotState.QUEUED
        self.rejected += 1
        return SlotState.REJECTED

    def leave(self, item: T) -> T | None:
        """Remove a request, running or queued; return the queued request that runs in its place, or None if there is none.

        Of queued requests with equal priority, the one that came first runs. An unknown request is ignored.
        """
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
