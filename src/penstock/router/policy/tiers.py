"""Priority tiers, and who is next among them and their tenants: deficit round robin, and fair queueing of tenants. Pure.

The unit is the tokens that a request makes its worker compute. The system tier always goes first. The others have a credit
each, from which the one served pays; while a tier with requests has credit left, the one of the highest effective priority
goes; when none has, all get their shares of another round. So a tier that asks for less than its share is served as if it
had strict priority over those below, and one that asks for more gets its share and what others leave.

Premium within its share goes to workers at once, however much they have, and pays as well, by a debt of `BURST_ROUNDS` at most.

An idle tier saves one round's share at most: enough for its next request to go ahead at once, too little to starve another.
A request may cost more than its tier's credit, which is then negative and paid back round by round, so that
``-(largest request) < credit <= share of one round``, and the first request of a tier waits while at most
``largest // share + 2`` rounds and one request of each other tier are served, system requests aside.

Source: Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin" (1995); of tenants: Goyal, Vin and
Cheng, "Start-time Fair Queuing" (1996).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import floor
from typing import Final, Generic, TypeAlias, TypeVar

from penstock.api import Tier, TiersConfig
from penstock.api.router_tiers import BackgroundSlo, PremiumSlo, StandardSlo
from penstock.core.tiers import priority_of
from penstock.router.policy.arrival import IsLate, Lane, QueuedRequest

PRIORITIES: Final[Mapping[Tier, int]] = {tier: priority_of(tier) for tier in Tier}
"""As vLLM's ``priority`` of a request: lower goes first. From the highest tier to the lowest."""

SHARED: Final = (Tier.PREMIUM, Tier.STANDARD, Tier.BACKGROUND)
"""Tiers that share capacity, highest first; system goes before them and has no share."""

BURST_ROUNDS: Final = 8
"""Chosen: rounds whose share a tier may ask for at once, and be within it. With 4, of the requests of a premium tier that asks
for 85% of its share one in 200 finds its part of the thresholds full by chance alone, with 8 none of 1,800."""

_AGED_PRIORITY: Final = 0.5
"""Where aging ends: before a fresh standard request, behind any premium one."""

Slo: TypeAlias = PremiumSlo | StandardSlo | BackgroundSlo
_NO_SLO: Final = BackgroundSlo(end_to_end_seconds=None)


def slo_of(tiers: TiersConfig, tier: Tier) -> Slo:
    """Return what a tier is promised; system is promised nothing."""
    slo: Slo = getattr(tiers.slo, tier.value, _NO_SLO)
    return slo


def share_of(tiers: TiersConfig, tier: Tier) -> float:
    """Return the share of a tier of `SHARED`, in (0, 1]; all shares sum up to 1."""
    share: float = getattr(tiers.shares, tier.value)
    return share


def quantum(tiers: TiersConfig, tier: Tier) -> float:
    """Return the tokens that a tier of `SHARED` gets in one round."""
    return tiers.round_tokens * share_of(tiers, tier)


def effective_priority(tiers: TiersConfig, tier: Tier, waited_s: float) -> float:
    """Return the priority of a request that has waited; lower goes first.

    By default background reaches 1 after 10 s and ends at 0.5 after 15 s; standard reaches 0.5 after 5 s. No age brings
    a request before fresh premium.
    """
    base = PRIORITIES[tier]
    if base <= 0:
        return base
    return max(_AGED_PRIORITY, base - min(tiers.max_aging, tiers.aging_per_second * max(0.0, waited_s)))


T = TypeVar("T")


class TierQueue(Generic[T]):
    """Waiting requests by tier and tenant; serves as `Lane` does.

    Late requests let others of their lane go first, and yet they are pending: a tier with a short target has hardly any other
    requests under overload, so that a worker that makes no progress would look empty and draw all that come.

    Attributes:
        held: Tiers that are not served for now.
    """

    has_tiers = True
    late_tokens = 0

    def __init__(self, settings: TiersConfig) -> None:
        self._settings = settings
        self._tiers: dict[Tier, _TenantLanes[T]] = {tier: _TenantLanes() for tier in PRIORITIES}
        self._credits = {tier: quantum(settings, tier) for tier in SHARED}
        # Of the tiers below each, by rank.
        self._lower_tokens = [0] * len(PRIORITIES)
        self.held: Collection[Tier] = ()

    def configure(self, settings: TiersConfig) -> None:
        """Take other shares, aging and targets; the requests that wait are not moved."""
        self._settings = settings
        self._credits = {tier: min(self._credits[tier], quantum(settings, tier)) for tier in SHARED}

    @property
    def queue(self) -> dict[T, QueuedRequest[T]]:
        """Requests that wait and were not found late, the highest tier's first."""
        return {queued.item: queued for queued in self.in_order(hit_first=False)}

    def lower_tokens(self, rank: int) -> int:
        """Return the uncached tokens of requests of tiers below a rank."""
        return self._lower_tokens[rank]

    def __bool__(self) -> bool:
        return any(tier.lanes for tier in self._tiers.values())

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        for tier in self._tiers.values():
            for lane in tier.lanes.values():
                yield from lane

    def credit(self, tier: Tier) -> float:
        """Return the tokens that a tier of `SHARED` may still be served in this round; negative: its debt."""
        return self._credits[tier]

    def put(self, queued: QueuedRequest[T], *, is_first: bool = False) -> None:
        """Add a request, behind or before all others of its tier and tenant."""
        tier = queued.arrival.tier
        self._count(queued.arrival.rank, queued.uncached)
        self._tiers[tier].lane(queued.arrival.tenant).put(queued, is_first=is_first)

    def pull(self, queued: QueuedRequest[T]) -> None:
        """Take a request out."""
        self._count(queued.arrival.rank, -queued.uncached)
        self._tiers[queued.arrival.tier].pull(queued)

    def charge(self, queued: QueuedRequest[T]) -> None:
        """Count a request's tokens as served to its tier and tenant."""
        tier, tokens = queued.arrival.tier, max(1, queued.uncached)
        if tier in self._credits:
            self._credits[tier] -= tokens
        self._tiers[tier].charge(queued, tokens)

    def in_order(self, *, hit_first: bool) -> Iterator[QueuedRequest[T]]:
        """Iterate over the requests in time, tier by tier."""
        for tier in self._tiers.values():
            for lane in tier.lanes.values():
                yield from lane.in_order(hit_first=hit_first)

    def next_up(
        self,
        now_s: float,
        *,
        hit_first: bool = False,
        is_late: IsLate[T] | None = None,
        urgent: bool = False,
        begun: bool = False,
    ) -> QueuedRequest[T] | None:
        """Return the request to be served next; see `Lane.next_up`.

        An ``urgent`` one is of the system tier, or of premium while its debt is below that of a burst: beyond its share it waits
        its turn, if a request of another tier waits as well. With ``begun`` a begun stream of any tier may go, where none is urgent.
        """
        tier = self._urgent_tier() if urgent else self._next_tier(now_s)
        if tier is None:
            return self._oldest_begun() if begun else None
        return self._tiers[tier].next_lane().next_up(now_s, hit_first=hit_first, is_late=is_late)

    def _count(self, rank: int, tokens: int) -> None:
        for higher in range(rank):
            self._lower_tokens[higher] += tokens

    def _urgent_tier(self) -> Tier | None:
        if self._tiers[Tier.SYSTEM].lanes:
            return Tier.SYSTEM
        waiting = self._waiting()
        if Tier.PREMIUM not in waiting:
            return None
        if len(waiting) == 1 and self._credits[Tier.PREMIUM] <= 0:
            self._replenish(waiting)
        least = (1 - BURST_ROUNDS) * quantum(self._settings, Tier.PREMIUM)
        return Tier.PREMIUM if self._credits[Tier.PREMIUM] > least else None

    def _oldest_begun(self) -> QueuedRequest[T] | None:
        lanes = (lane for tier in self._tiers.values() for lane in tier.lanes.values())
        firsts = [next(iter(lane.begun.values())) for lane in lanes if lane.begun]
        return min(firsts, key=lambda queued: queued.since_s, default=None)

    def _waiting(self) -> list[Tier]:
        return [tier for tier in SHARED if self._tiers[tier].lanes and tier not in self.held]

    def _next_tier(self, now_s: float) -> Tier | None:
        if self._tiers[Tier.SYSTEM].lanes:
            return Tier.SYSTEM
        waiting = self._waiting()
        if not waiting:
            return None
        if all(self._credits[tier] <= 0 for tier in waiting):
            self._replenish(waiting)

        def order(tier: Tier) -> tuple[float, float]:
            since_s = self._tiers[tier].oldest_s
            return effective_priority(self._settings, tier, now_s - since_s), since_s

        return min((tier for tier in waiting if self._credits[tier] > 0), key=order)

    def _replenish(self, waiting: list[Tier]) -> None:
        quanta = {tier: quantum(self._settings, tier) for tier in SHARED}
        rounds = min(floor(-self._credits[tier] / quanta[tier]) + 1 for tier in waiting)
        for tier, most in quanta.items():
            self._credits[tier] = min(most, self._credits[tier] + rounds * most)


class _TenantLanes(Generic[T]):
    """A tier's lanes by tenant, none of them empty; the tenant that was served least is next."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane[T]] = {}
        # Tokens served, where a tenant that comes back starts level with those being served.
        self._tags: dict[str, float] = {}
        self._now = 0.0

    @property
    def oldest_s(self) -> float:
        return min(since_s for lane in self.lanes.values() if (since_s := lane.oldest_s) is not None)

    def lane(self, tenant: str) -> Lane[T]:
        lane = self.lanes.get(tenant)
        if not self.lanes:
            # The queue was empty: there is no tenant to be level with, and nothing to remember of those that left.
            self._tags.clear()
            self._now = 0.0
        if lane is None:
            lane = self.lanes[tenant] = Lane()
            self._tags[tenant] = max(self._now, self._tags.get(tenant, 0.0))
        return lane

    def pull(self, queued: QueuedRequest[T]) -> None:
        tenant = queued.arrival.tenant
        lane = self.lanes[tenant]
        lane.pull(queued)
        if not lane:
            del self.lanes[tenant]

    def charge(self, queued: QueuedRequest[T], tokens: int) -> None:
        tenant = queued.arrival.tenant
        if tenant in self.lanes:
            self.lanes[tenant].charge(queued)
        served = self._tags.get(tenant, self._now)
        self._now = max(self._now, served)
        self._tags[tenant] = served + tokens

    def next_lane(self) -> Lane[T]:
        """Ties go to the tenant that came first."""
        return self.lanes[min(self.lanes, key=self._tags.__getitem__)]
