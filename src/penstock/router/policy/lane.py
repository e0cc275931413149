"""One line of waiting requests: by arrival, by cached tokens, or those that can be in time first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from penstock.router.policy.queued_request import QueuedRequest

T = TypeVar("T")

_LATE_TURN = 10
"""Chosen: late requests get at least every tenth turn, so that they end, and leave the others 90% of a worker."""

IsLate = Callable[[QueuedRequest[T]], bool]
"""Tells whether a request can no longer be in time."""


class WaitingLine(Protocol[T]):
    """What a queue orders its waiting requests by: one lane, or a lane for each tier and tenant."""

    @property
    def queue(self) -> dict[T, QueuedRequest[T]]:
        """Requests that wait and were not found late."""

    @property
    def late_tokens(self) -> int:
        """Uncached tokens of those that were found late."""

    @property
    def has_tiers(self) -> bool:
        """Whether `lower_tokens` may be other than 0."""

    def lower_tokens(self, rank: int) -> int:
        """Return the uncached tokens of requests of tiers below a rank that were not found late."""

    def __bool__(self) -> bool:
        """Whether any request waits."""

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        """Iterate over all that wait, late ones first."""

    def put(self, queued: QueuedRequest[T], *, is_first: bool = False) -> None:
        """Add a request, at the end or before all others of its lane."""

    def pull(self, queued: QueuedRequest[T]) -> None:
        """Take a request out."""

    def charge(self, queued: QueuedRequest[T]) -> None:
        """Count a request's tokens as served."""

    def in_order(self, *, hit_first: bool) -> Iterator[QueuedRequest[T]]:
        """Iterate over `queue` in the order in which it is served, as far as it is known now."""

    def next_up(
        self, now_s: float, *, hit_first: bool = False, is_late: IsLate[T] | None = None
    ) -> QueuedRequest[T] | None:
        """Return the request to be served next; None when none waits.

        Args:
            now_s: Simulated seconds.
            hit_first: The largest number of cached tokens first, then arrival, instead of arrival alone.
            is_late: Late requests let all others of their lane go first, except each `_LATE_TURN`-th time. None:
                nobody is asked.
        """


class Lane(Generic[T]):
    """Requests of one tier and tenant, or all of them where there are no tiers.

    Attributes:
        queue: Requests that wait, in order of arrival.
        late: Requests that wait and were found unable to be in time.
        late_tokens: Their uncached tokens.
    """

    __slots__ = ("_late_turns", "late", "late_tokens", "queue")
    has_tiers = False

    def __init__(self) -> None:
        """Begin empty."""
        self.queue: dict[T, QueuedRequest[T]] = {}
        self.late: dict[T, QueuedRequest[T]] = {}
        self.late_tokens = 0
        self._late_turns = 0

    def lower_tokens(self, rank: int) -> int:  # noqa: ARG002 - one lane has no tiers
        """Return 0: all are of one tier."""
        return 0

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self.queue or self.late)

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        """Iterate over all that wait, late ones first."""
        yield from self.late.values()
        yield from self.queue.values()

    @property
    def oldest_s(self) -> float | None:
        """When the request that has waited longest was queued; None when none waits."""
        firsts = [next(iter(each.values())).since_s for each in (self.late, self.queue) if each]
        return min(firsts, default=None)

    def put(self, queued: QueuedRequest[T], *, is_first: bool = False) -> None:
        """Add a request."""
        if is_first:
            self.queue = {queued.item: queued, **self.queue}
        else:
            self.queue[queued.item] = queued

    def pull(self, queued: QueuedRequest[T]) -> None:
        """Take a request out."""
        if self.queue.pop(queued.item, None) is None:
            del self.late[queued.item]
            self.late_tokens -= queued.uncached

    def charge(self, queued: QueuedRequest[T]) -> None:
        """Count nothing: one lane has nobody to share with."""

    def in_order(self, *, hit_first: bool) -> Iterator[QueuedRequest[T]]:
        """Iterate over the queue in the order in which it is served; late ones are left out."""
        queue = self.queue.values()
        return iter(sorted(queue, key=_hit_order) if hit_first else queue)

    def next_up(
        self,
        now_s: float,  # noqa: ARG002 - a lane has no ages to compare
        *,
        hit_first: bool = False,
        is_late: IsLate[T] | None = None,
    ) -> QueuedRequest[T] | None:
        """Return the request to be served next; see `WaitingLine`."""
        while (queued := self._first(hit_first=hit_first)) is not None:
            if is_late is None or not is_late(queued):
                break
            del self.queue[queued.item]
            self.late[queued.item] = queued
            self.late_tokens += queued.uncached
        if self.late:
            self._late_turns += 1
            if queued is None or self._late_turns >= _LATE_TURN:
                self._late_turns = 0
                return next(iter(self.late.values()))
        return queued

    def _first(self, *, hit_first: bool) -> QueuedRequest[T] | None:
        if not hit_first:
            return next(iter(self.queue.values()), None)
        return min(self.queue.values(), key=_hit_order, default=None)


def _hit_order(queued: QueuedRequest[T]) -> int:
    return queued.uncached - queued.arrival.tokens
