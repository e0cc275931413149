"""Which of several routers keeps a worker's queue; the others pass on what is to wait there.

Requests that wait for a worker are served in one order, and one router knows exactly what runs there, as long as one router
keeps its queue. So as few routers keep queues as their processors allow: a single one knows as much as if it were alone.
Where more are needed each keeps the queues of the workers that a hash ring gives it. Routers agree without a word, because
all are told the same; while they disagree a worker has two queues. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import ceil

import xxhash

from penstock.router.policy.rings import HashRing

CORES_PER_OWNER = 0.7
"""Chosen: processor cores that all routers together use per router that keeps queues, before one more does. It leaves a
third of such a router's core free even if all of their work were its own."""
_SHRINK = 0.7
"""Chosen: fewer keep queues only once they would be used to this share of that, so that load at the bound moves nothing."""
_SEED = 3
"""Of the ring; 1 and 2 are the workers'."""


@dataclass(frozen=True, slots=True)
class RouterState:
    """What all routers know alike of one of them.

    Attributes:
        name: Unique among the routers.
        since_s: When it began, Unix seconds.
        busy_cores: Processor cores that it uses, >= 0.
    """

    name: str
    since_s: float
    busy_cores: float


def owner_count(routers: int, busy_cores: float, before: int) -> int:
    """Return how many routers keep queues, in [1, ``routers``].

    One for each 0.7 cores that all use together; fewer than before only below 0.7 of that. 1.5 cores: 3; after 3,
    1.3 cores still: 3; 0.9 cores: 2.

    Args:
        routers: >= 1.
        busy_cores: Used by all of them together, >= 0.
        before: Routers that kept queues until now; 0: none yet.
    """

    def needed(cores: float) -> int:
        return max(1, min(routers, ceil(cores / CORES_PER_OWNER)))

    grown, kept = needed(busy_cores), needed(busy_cores / _SHRINK)
    return grown if grown >= before else min(before, kept)


def owners_among(routers: Iterable[RouterState], before: int) -> tuple[str, ...]:
    """Return the names of the routers that keep queues: the oldest, because they know most; none among none."""
    known = sorted(routers, key=lambda each: (each.since_s, each.name))
    if not known:
        return ()
    count = owner_count(len(known), sum(each.busy_cores for each in known), before)
    return tuple(each.name for each in known[:count])


class QueueOwners:
    """Maps workers to the routers that keep their queues."""

    __slots__ = ("_names", "_ring")

    def __init__(self) -> None:
        """Start without routers."""
        self._ring = HashRing(_SEED)
        self._names: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Return the number of routers that keep queues."""
        return len(self._names)

    def set_owners(self, names: Collection[str]) -> None:
        """Set the routers that keep queues."""
        wanted = frozenset(names)
        for name in self._names - wanted:
            self._ring.remove(name)
        for name in wanted - self._names:
            self._ring.add(name)
        self._names = wanted

    @property
    def only(self) -> str | None:
        """The router that keeps every queue; None: none, or several do."""
        return next(iter(self._names)) if len(self._names) == 1 else None

    def owner(self, worker: str) -> str | None:
        """Return the router that keeps a worker's queue; None: whoever got the request.

        Args:
            worker: Its name; empty: none is chosen yet.
        """
        if len(self._names) < 2 or not worker:
            return self.only
        return self._ring.find(xxhash.xxh3_64_intdigest(worker.encode()))
