"""The policies that DualMap is compared with, behind the same interface.

Sources: the DualMap paper's baselines; Preble; Dynamo's router documentation for the KV cost. Among equals the
instance that remembers the fewest blocks is taken, so that idle instances fill their caches evenly. Pure.
"""

from __future__ import annotations

from typing import Any

from penstock_router.policy.hotness import HotnessTree
from penstock_router.policy.instance import Instance
from penstock_router.policy.placer import Arrival, Instances, Place, View, eligible
from penstock_router.policy.rings import HashRing

_PREBLE_SHARE = 0.5
"""Share of a prompt that must be cached for affinity. Source: Preble, as the DualMap paper states it."""


_NOISE = 0.05
"""Chosen: estimates that differ by less are equal, since measured paces of equal GPUs do."""


class Memoryless:
    """A policy that need not know who joins and leaves."""

    __slots__ = ()

    def joined(self, name: str) -> None:
        """Take no note."""

    def left(self, name: str) -> None:
        """Take no note."""


class CacheAffinity:
    """One ring: equal prefixes always go to the same instance, however busy."""

    __slots__ = ("_hotness", "_ring")

    def __init__(self) -> None:
        self._ring = HashRing(seed=1)
        self._hotness = HotnessTree()

    def joined(self, name: str) -> None:
        """Put an instance on the ring."""
        self._ring.add(name)

    def left(self, name: str) -> None:
        """Take an instance off the ring."""
        self._ring.remove(name)

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:  # noqa: ARG002 - looks at no load
        """Return the key's instance."""
        name = self._ring.find(self._hotness.key(arrival.chain, len(instances)))
        if name is None or name in arrival.avoid:
            return Place(_emptiest(eligible(instances, arrival.avoid)).name, "its place has failed it")
        return Place(name, "prefix's place on the ring")


class LeastPending(Memoryless):
    """The fewest uncached tokens pending, whatever is cached where: the paper's Least Loaded."""

    __slots__ = ()

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:  # noqa: ARG002 - needs no estimate
        """Return the least loaded instance."""
        return Place(_emptiest(eligible(instances, arrival.avoid)).name, "fewest pending tokens")


class RoundRobinPlacer(Memoryless):
    """Each instance in turn, when the request arrives."""

    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = -1

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:  # noqa: ARG002 - looks at nothing
        """Return the next instance."""
        self._turn += 1
        pool = eligible(instances, arrival.avoid)
        return Place(pool[self._turn % len(pool)].name, "next in turn")


class MinTtft(Memoryless):
    """The smallest estimated TTFT over all instances."""

    __slots__ = ()

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:
        """Return the instance with the smallest estimate; by tokens alone while no pace is known."""
        fleet = view.pace.tokens_per_s
        pool = eligible(instances, arrival.avoid)
        costs = [
            (each.pending_tokens + each.uncached(arrival)) / (each.pace.mixed(fleet) or 1.0) for each in pool
        ]
        as_good = min(costs) * (1 + _NOISE)
        best = min(
            (each for each, cost in zip(pool, costs, strict=True) if cost <= as_good),
            key=lambda each: each.index.count,
        )
        return Place(best.name, "smallest estimated TTFT")


class Preble(Memoryless):
    """Affinity when more than half of the prompt is cached somewhere, else load."""

    __slots__ = ()

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:  # noqa: ARG002 - needs no estimate
        """Return the instance with the largest hit, or the least loaded one."""
        pool = eligible(instances, arrival.avoid)
        uncached, _, at = min(
            (each.uncached(arrival), each.pending_tokens, at) for at, each in enumerate(pool)
        )
        if uncached < (1 - _PREBLE_SHARE) * arrival.tokens:
            return Place(pool[at].name, "more than half is cached there")
        return Place(_emptiest(pool).name, "little is cached anywhere: least loaded")


class KvCost(Memoryless):
    """Dynamo's cost in blocks: pending and own uncached prefill, plus all blocks that requests there occupy.

    ``prefill_load_scale`` and the overlap credit are 1, and the weight of a request 0: its defaults. Blocks
    of decoding requests are counted from handing over to the computed prompt, all that a router in front of
    prefill workers sees of them.
    """

    __slots__ = ()

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:  # noqa: ARG002 - needs no estimate
        """Return the instance of lowest cost; what the request itself will occupy is the same everywhere."""
        pool = eligible(instances, arrival.avoid)
        _, _, at = min(
            (
                each.pending_tokens + each.uncached(arrival) + each.running_prompt_tokens,
                each.index.count,
                at,
            )
            for at, each in enumerate(pool)
        )
        return Place(pool[at].name, "lowest KV cost")


def _emptiest(pool: list[Instance[Any]]) -> Instance[Any]:
    """Return the instance with the fewest pending tokens; among equals, the one that remembers least."""
    return min(pool, key=lambda each: (each.pending_tokens, each.index.count))
