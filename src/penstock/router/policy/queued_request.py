"""A request that waits in a router or runs at a worker, with its place. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.router.policy.arrival import Arrival

T = TypeVar("T")


@dataclass(slots=True)
class QueuedRequest(Generic[T]):
    """A request with its place.

    Attributes:
        item: What the caller queued.
        arrival: What the policy was told of it.
        since_s: When it was first queued.
        worker: Where it waits or runs.
        uncached: Tokens expected to be computed there.
        held: Blocks of it that the worker held before.
        other: The pair's other worker, empty without one.
        other_uncached: Tokens expected to be computed there.
        started_s: When it was dispatched; None while it waits.
        reason: Why it stands there, one short phrase.
        is_prefilled: Its prompt is computed and it still weighs at its worker.
        is_adopted: Another router dispatched it, which counts it, and knows when its prompt was begun.
        weight: ``uncached`` when it was submitted, wherever it goes afterwards; see `PromptTokenCounts`.
    """

    item: T
    arrival: Arrival
    since_s: float
    worker: str = ""
    uncached: int = 0
    held: int = 0
    other: str = ""
    other_uncached: int = 0
    started_s: float | None = None
    reason: str = ""
    weight: int = 0
    is_prefilled: bool = False
    is_adopted: bool = False

    @property
    def tokens(self) -> int:
        """Prompt tokens."""
        return self.arrival.tokens
