"""Which of several routers decides about a request: the one that owns its prefix; the others pass it on.

A router knows at once and exactly what it has sent itself, and late and in sums what its peers have sent. So as few
routers decide as their processors allow: a single one knows as much as if it were alone. Where more are needed each
owns the prefixes that a hash ring gives it, and knows their caches as if it were alone. Routers agree without a word,
because all are told the same; one that disagrees for a moment costs a cache miss. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from penstock_router.policy.hotness import HotnessTree
from penstock_router.policy.rings import HashRing

CORES_PER_OWNER = 0.7
"""Chosen: processor cores that all routers together use per router that decides, before one more does. It leaves a
third of an owner's core free even if all of their work were the owners'."""
_SHRINK = 0.7
"""Chosen: fewer decide only once they would be used to this share of that, so that load at the bound moves nothing."""
_SEED = 3
"""Of the ring; 1 and 2 are the workers'."""
_SHARDS_PER_OWNER = 8
"""Chosen: a prefix with more than a quarter of an owner's even share of the traffic is told apart further, so that no
owner gets much more than the others."""


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
    """Return how many routers decide, in [1, ``routers``].

    One for each 0.7 cores that all use together; fewer than before only below 0.7 of that. 1.5 cores: 3; after 3,
    1.3 cores still: 3; 0.9 cores: 2.

    Args:
        routers: >= 1.
        busy_cores: Used by all of them together, >= 0.
        before: Routers that decided until now; 0: none yet.
    """

    def needed(cores: float) -> int:
        return max(1, min(routers, ceil(cores / CORES_PER_OWNER)))

    grown, kept = needed(busy_cores), needed(busy_cores / _SHRINK)
    return grown if grown >= before else min(before, kept)


def owners_among(routers: Iterable[RouterState], before: int) -> tuple[str, ...]:
    """Return the names of the routers that decide: the oldest, because they know most; none among none."""
    known = sorted(routers, key=lambda each: (each.since_s, each.name))
    if not known:
        return ()
    count = owner_count(len(known), sum(each.busy_cores for each in known), before)
    return tuple(each.name for each in known[:count])


class PrefixOwners:
    """Maps prompts to the routers that decide about them."""

    __slots__ = ("_hotness", "_names", "_ring")

    def __init__(self) -> None:
        """Start without routers."""
        self._ring = HashRing(_SEED)
        self._names: frozenset[str] = frozenset()
        self._hotness = HotnessTree()

    def __len__(self) -> int:
        """Return the number of routers that decide."""
        return len(self._names)

    def set_owners(self, names: Collection[str]) -> None:
        """Set the routers that decide."""
        wanted = frozenset(names)
        for name in self._names - wanted:
            self._ring.remove(name)
        for name in wanted - self._names:
            self._ring.add(name)
        self._names = wanted

    @property
    def only(self) -> str | None:
        """The router that decides about every request, whatever its prompt; None: none, or several do."""
        return next(iter(self._names)) if len(self._names) == 1 else None

    def owner(self, chain: Sequence[int]) -> str | None:
        """Return the router that decides about a prompt; None: whoever got it.

        Args:
            chain: Chained prefix keys; empty: the prompt could not be read.
        """
        if len(self._names) < 2 or not chain:
            return self.only
        return self._ring.find(self._hotness.key(chain, _SHARDS_PER_OWNER * len(self._names)))
