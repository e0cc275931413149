"""Whose requests may still enter a queue of bounded length: a room for each tier, a part of it for each tenant. Pure."""

from __future__ import annotations

from collections import Counter
from math import ceil

from penstock.api import Tier
from penstock.router.core.queue_settings import QueueSettings
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.tiers import SHARED


class QueueRoom:
    """Waiting requests by tier and by tenant.

    Each tier's share of the queue is kept for it: lower tiers may fill what the higher ones' shares leave, so a full
    background queue never refuses a premium request. System requests always enter. Requests without a tenant are bounded
    by their tier alone. A tenant has at most its part of what it holds itself and what is free for its tier, so that
    however many tenants flood, the next one finds room: with a part of a half one holds 1/2, two 1/3 each, three 1/4.

    Attributes:
        tiers: Waiting requests by tier.
    """

    __slots__ = ("_tenants", "tiers")

    def __init__(self) -> None:
        """Begin empty."""
        self.tiers: Counter[Tier] = Counter()
        self._tenants: Counter[tuple[Tier, str]] = Counter()

    def enter(self, arrival: Arrival) -> None:
        """Count a request in."""
        self.tiers[arrival.tier] += 1
        self._tenants[arrival.tier, arrival.tenant] += 1

    def leave(self, arrival: Arrival) -> None:
        """Count a request out."""
        self.tiers[arrival.tier] -= 1
        tenant = arrival.tier, arrival.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def has_room(self, arrival: Arrival, settings: QueueSettings) -> bool:
        """Return whether one more request may enter."""
        tiers, most = settings.tiers, settings.max_requests
        if most is None:
            return True
        if tiers is None:
            return self.tiers.total() < most
        if arrival.tier is Tier.SYSTEM:
            return True
        free = most - self.tiers.total()
        whole = sum(tiers.shares.values())
        for higher in SHARED[: SHARED.index(arrival.tier)]:
            free -= max(0, ceil(most * tiers.shares[higher] / whole) - self.tiers[higher])
        own = self._tenants[arrival.tier, arrival.tenant] if arrival.tenant else 0
        return free > 0 and (own == 0 or own < tiers.max_tenant_share * (own + free))
