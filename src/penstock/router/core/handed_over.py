"""What was handed to the second stage and has not begun there, and the tiers that are held back for it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from penstock.api import Tier

T = TypeVar("T")
_TIERS: Final = tuple(Tier)

WINDOW_S: Final = 2.0
"""Chosen: of a tier no more wait at a worker of the second stage than have begun there in so long, which is then what the
next one waits about. More than most transfers of KV take; simulated seconds."""
_LEAST: Final = 4
"""Chosen: requests of a tier that may wait there at least, so that a burst into idle workers goes on at once."""


class _Place(Generic[T]):
    """Requests of one tier at one worker."""

    __slots__ = ("begun_s", "waiting")

    def __init__(self) -> None:
        self.waiting: set[T] = set()
        # When the latest of them began to answer.
        self.begun_s: deque[float] = deque()

    def is_full(self, now_s: float) -> bool:
        begun_s = self.begun_s
        while begun_s and now_s - begun_s[0] > WINDOW_S:
            begun_s.popleft()
        return len(self.waiting) >= max(_LEAST, len(begun_s))


class HandedOver(Generic[T]):
    """Requests at workers of the second stage whose first token is still to come."""

    __slots__ = ("_of", "_places")

    def __init__(self) -> None:
        """Begin empty."""
        self._of: dict[T, _Place[T]] = {}
        # By worker, and in it by rank of the tier.
        self._places: dict[str, list[_Place[T]]] = {}

    def enter(self, item: T, worker: str, rank: int) -> None:
        """Note that a request went to a worker."""
        places = self._places.get(worker)
        if places is None:
            places = self._places[worker] = [_Place() for _ in _TIERS]
        self._of[item] = places[rank]
        places[rank].waiting.add(item)

    def begun(self, item: T, now_s: float) -> None:
        """Note that an answer has begun; does nothing when its request is not within."""
        place = self._of.get(item)
        if place is not None:
            place.begun_s.append(now_s)
            place.is_full(now_s)
        self.leave(item)

    def leave(self, item: T) -> None:
        """Note that a request is gone; does nothing when it is not within."""
        place = self._of.pop(item, None)
        if place is not None:
            place.waiting.discard(item)

    def held(self, workers: Iterable[str], now_s: float) -> frozenset[Tier]:
        """Return the tiers of which no more is to come: at every worker enough of them, or of one above them, wait.

        The system tier is never among them.

        Args:
            workers: Those that may be chosen.
            now_s: Simulated seconds.
        """
        lowest = max((self._full_rank(each, now_s) for each in workers), default=len(_TIERS))
        return frozenset(_TIERS[lowest:])

    def _full_rank(self, worker: str, now_s: float) -> int:
        places = self._places.get(worker, ())
        full = (rank for rank, place in enumerate(places) if rank and place.is_full(now_s))
        return next(full, len(_TIERS))
