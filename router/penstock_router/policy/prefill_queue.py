"""Requests that wait in the router for a prefill worker: first in, first out, bounded in number and time.

The queue lives here and not in the workers, so that its length is true pressure: a worker is handed more
only while its prompt tokens in flight are below one slot budget (`has_free_slot`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock_router.policy.candidate import Candidate

T = TypeVar("T")


def has_free_slot(candidate: Candidate, slot_tokens: int | None) -> bool:
    """Return whether a worker may be handed one more request.

    Args:
        candidate: The worker.
        slot_tokens: Budget of prompt tokens in flight; None is unbounded. An idle worker always takes one
            request, however long.
    """
    return slot_tokens is None or candidate.inflight_requests == 0 or candidate.inflight_tokens < slot_tokens


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """One waiting request.

    Attributes:
        item: What the caller queued.
        tokens: Prompt tokens, known or estimated.
        since_s: When it joined, modelled seconds.
        avoid: Workers that have failed it; taken only if there is no other.
    """

    item: T
    tokens: int
    since_s: float
    avoid: frozenset[str] = frozenset()


class PrefillQueue(Generic[T]):
    """FIFO with two bounds.

    Attributes:
        tokens: Prompt tokens of all waiting requests.
    """

    __slots__ = ("_max_requests", "_max_wait_s", "_next_key", "_waiting", "tokens")

    def __init__(self, *, max_requests: int, max_wait_s: float) -> None:
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._waiting: OrderedDict[int, Waiting[T]] = OrderedDict()
        self._next_key = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether a new request must be refused."""
        return len(self._waiting) >= self._max_requests

    def join(self, waiting: Waiting[T], *, front: bool = False) -> int:
        """Add a request and return the key that `leave` takes.

        Args:
            waiting: The request.
            front: Put it before all others; for one that was admitted before and failed on its worker.
        """
        key = self._next_key
        self._next_key += 1
        self._waiting[key] = waiting
        if front:
            self._waiting.move_to_end(key, last=False)
        self.tokens += waiting.tokens
        return key

    def leave(self, key: int) -> None:
        """Remove a request, wherever it stands; does nothing when it has left already."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self.tokens -= waiting.tokens

    def head(self) -> tuple[int, Waiting[T]] | None:
        """Return key and request of the next in line, or None."""
        return next(iter(self._waiting.items()), None)

    def take_expired(self, now_s: float) -> list[Waiting[T]]:
        """Remove and return the requests that have waited ``max_wait_s`` or longer."""
        expired = [key for key, each in self._waiting.items() if now_s - each.since_s >= self._max_wait_s]
        taken = [self._waiting[key] for key in expired]
        for key in expired:
            self.leave(key)
        return taken

    def oldest_s(self, now_s: float) -> float:
        """Return how long the longest wait has lasted, modelled seconds; 0 when empty."""
        return max((now_s - each.since_s for each in self._waiting.values()), default=0.0)
