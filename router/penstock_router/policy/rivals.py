"""The policies that DualMap is compared with, behind the same interface.

Sources: the DualMap paper's baselines; Preble; Dynamo's router documentation for the KV cost. Pure.
"""

from __future__ import annotations

from penstock_router.policy.hotness import HotnessTree
from penstock_router.policy.placer import Arrival, Instances, Place, View, eligible
from penstock_router.policy.rings import HashRing

_PREBLE_SHARE = 0.5
"""Share of a prompt that must be cached for affinity. Source: Preble, as the DualMap paper states it."""


class _Memoryless:
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
            name = min(eligible(instances, arrival.avoid), key=lambda each: each.pending_tokens).name
        return Place(name, "prefix's place on the ring")


class LeastPending(_Memoryless):
    """The fewest uncached tokens pending, whatever is cached where: the paper's Least Loaded."""

    __slots__ = ()

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:  # noqa: ARG002 - needs no estimate
        """Return the least loaded instance."""
        best = min(eligible(instances, arrival.avoid), key=lambda each: each.pending_tokens)
        return Place(best.name, f"fewest pending tokens: {best.pending_tokens}")


class MinTtft(_Memoryless):
    """The smallest estimated TTFT over all instances."""

    __slots__ = ()

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:
        """Return the instance with the smallest estimate; by tokens alone while no pace is known."""
        best, least = None, float("inf")
        for each in eligible(instances, arrival.avoid):
            uncached = each.uncached(arrival.chain, arrival.tokens)
            ttft_s = view.ttft_s(each, uncached)
            cost = float(each.pending_tokens + uncached) if ttft_s is None else ttft_s
            if best is None or cost < least:
                best, least = each, cost
        assert best is not None  # noqa: S101 - there is at least one instance
        return Place(best.name, "smallest estimated TTFT")


class Preble(_Memoryless):
    """Affinity when more than half of the prompt is cached somewhere, else load."""

    __slots__ = ()

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:  # noqa: ARG002 - needs no estimate
        """Return the instance with the largest hit, or the least loaded one."""
        pool = eligible(instances, arrival.avoid)
        costs = [(each.uncached(arrival.chain, arrival.tokens), each.pending_tokens, each) for each in pool]
        uncached, _, nearest = min(costs, key=lambda cost: cost[:2])
        if uncached < (1 - _PREBLE_SHARE) * arrival.tokens:
            return Place(nearest.name, "more than half is cached there")
        emptiest = min(pool, key=lambda each: each.pending_tokens)
        return Place(emptiest.name, "little is cached anywhere: least loaded")


class KvCost(_Memoryless):
    """Dynamo's cost in blocks: pending and own uncached prefill, plus all blocks that requests there occupy.

    ``prefill_load_scale`` and the overlap credit are 1, and the weight of a request 0: its defaults. Blocks
    of decoding requests are counted from handing over to the computed prompt, all that a router in front of
    prefill workers sees of them.
    """

    __slots__ = ()

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:  # noqa: ARG002 - needs no estimate
        """Return the instance of lowest cost."""
        best = min(
            eligible(instances, arrival.avoid),
            key=lambda each: (
                each.pending_tokens
                + each.uncached(arrival.chain, arrival.tokens)
                + each.running_prompt_tokens
                + arrival.tokens
            ),
        )
        return Place(best.name, "lowest KV cost")
