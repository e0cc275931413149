"""Prefix cost: recomputing a token weighs more than waiting for one; measured best behind a single router.

What a request computes again delays not only itself but everybody behind it, and pushes another prefix out of a
cache. A policy that minimises its own TTFT counts such a token once, leaves caches too early under load, and so
makes the load that it flees from. bench/dualmap measures it. Pure.
"""

from __future__ import annotations

from penstock_router.policy.placer import Arrival, Instances, Place, View, eligible

HIT_WEIGHT = 4
"""Waiting tokens that one recomputed token is worth. Chosen: of 1, 1.5, 2, 3, 4, 6, 10 and 20 the smallest
behind which capacity no longer grows clearly, on all of bench/dualmap's workloads; 1 is min-TTFT."""


class PrefixCost:
    """The instance with the smallest pending + 4 x uncached tokens, more on a slower one.

    Equals go to the less loaded, and among those to the one that remembers least, so that idle caches fill evenly.
    """

    __slots__ = ()

    def joined(self, name: str) -> None:
        """Take no note."""

    def left(self, name: str) -> None:
        """Take no note."""

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:  # noqa: ARG002 - needs no estimate
        """Return the cheapest instance."""
        best, least, its_uncached = None, (0.0, 0, 0), 0
        for each in eligible(instances, arrival.avoid):
            uncached, pending = each.uncached(arrival), each.pending_tokens
            cost = ((pending + HIT_WEIGHT * uncached) * each.slowness, pending, each.index.count)
            if best is None or cost < least:
                best, least, its_uncached = each, cost, uncached
        assert best is not None  # noqa: S101 - there is at least one instance
        return Place(best.name, "lowest prefix cost", uncached=its_uncached)
