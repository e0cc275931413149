"""Priority tiers, and which tier and tenant is served next: deficit round robin of tiers, fair queueing of tenants. Pure.

The unit is the uncached tokens of a request. The system tier is always served first. Each of the other tiers has a credit,
from which its served requests are paid. While a tier with waiting requests has credit left, the one with the highest
effective priority is served; if none has, all tiers get their shares of another round. So a tier that requests less than its
share is served as if it had strict priority over lower tiers, and a tier that requests more gets its share plus what other
tiers leave.

Premium requests within the tier's share are dispatched to workers at once, however many there are, and pay as well: the
tier's debt is at most `BURST_ROUNDS` rounds.

An idle tier saves at most one round's share: enough to serve its next request at once, and too little to starve another tier.
A request can cost more than its tier's credit, which is then negative and is paid back round by round, so that ``-(largest
request) < credit <= share of one round``. The first request of a tier waits while at most ``largest // share + 2`` rounds and
one request of each other tier are served, system requests aside.

Sources: Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin" (1995); for tenants: Goyal, Vin and Cheng,
"Start-time Fair Queuing" (1996).
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
"""Priority of each tier, from the highest tier to the lowest; as in vLLM's ``priority`` of a request, the lower value is served
first."""

SHARED: Final = (Tier.PREMIUM, Tier.STANDARD, Tier.BACKGROUND)
"""Tiers that share capacity, highest first; system is served before them and has no share."""

BURST_ROUNDS: Final = 8
"""Number of rounds whose share a tier may request at once without exceeding its share. Chosen: with 4, one in 200 requests of a
premium tier that requests 85% of its share finds its part of the thresholds full by chance alone; with 8, none of 1,800."""

_AGED_PRIORITY: Final = 0.5
"""Priority at which aging ends: before a new standard request, after any premium one."""

Slo: TypeAlias = PremiumSlo | StandardSlo | BackgroundSlo
_NO_SLO: Final = BackgroundSlo(end_to_end_seconds=None)


def slo_of(tiers: TiersConfig, tier: Tier) -> Slo:
    """Return the SLO targets that ``tiers`` sets for ``tier``; for the system tier all targets are None."""
    slo: Slo = getattr(tiers.slo, tier.value, _NO_SLO)
    return slo


def share_of(tiers: TiersConfig, tier: Tier) -> float:
    """Return the share of ``tier`` in the capacity of the workers as ``tiers`` sets it, in (0, 1]; all shares add up to 1.

    The tier is premium, standard or background; the system tier has no share.
    """
    share: float = getattr(tiers.shares, tier.value)
    return share


def quantum(tiers: TiersConfig, tier: Tier) -> float:
    """Return the number of uncached tokens that a tier may be served in one round of sharing a worker's capacity.

    The number is the tier's share of the tokens of one round; ``tiers`` sets both. The tier is premium, standard or
    background; the system tier is served before them and has no share.
    """
    return tiers.round_tokens * share_of(tiers, tier)


def effective_priority(tiers: TiersConfig, tier: Tier, waited_s: float) -> float:
    """Return the priority of a request of ``tier`` that has waited ``waited_s`` simulated seconds; lower values are served first.

    It falls with the wait (aging), so that requests of lower tiers are served in the end, as configured in ``tiers``.

    By default a background request reaches 1 (the priority of a new standard request) after 10 s, and 0.5 after 15 s; a
    standard request reaches 0.5 after 5 s. Aging stops there, so that no request is put before a new premium request.
    """
    base = PRIORITIES[tier]
    if base <= 0:
        return base
    return max(_AGED_PRIORITY, base - min(tiers.max_aging, tiers.aging_per_second * max(0.0, waited_s)))


T = TypeVar("T")


class TierQueue(Generic[T]):
    """The requests that wait for one worker, or in the central queue, in lanes by tier and tenant.

    It has the same methods as `Lane`, the queue without tiers. ``settings`` contains the tiers' shares, aging and targets.

    Late requests (which can no longer meet their TTFT target) let others of their tier and tenant go first. They nevertheless
    count as tokens to be computed: under overload almost all requests of a tier with a short target are late, and if they
    did not count, a worker that makes no progress would look empty and attract all new requests.

    Attributes:
        held: Tiers of which no request is returned by `next_up` now.
    """

    has_tiers = True
    late_tokens = 0

    def __init__(self, settings: TiersConfig) -> None:
        self._settings = settings
        self._tiers: dict[Tier, _TenantLanes[T]] = {tier: _TenantLanes() for tier in PRIORITIES}
        self._credits = {tier: quantum(settings, tier) for tier in SHARED}
        # Number of uncached tokens in the tiers below each tier, by its rank.
        self._lower_tokens = [0] * len(PRIORITIES)
        self.held: Collection[Tier] = ()

    def configure(self, settings: TiersConfig) -> None:
        """Replace shares, aging and targets by those of ``settings``; waiting requests stay where they are."""
        self._settings = settings
        self._credits = {tier: min(self._credits[tier], quantum(settings, tier)) for tier in SHARED}

    @property
    def queue(self) -> dict[T, QueuedRequest[T]]:
        """Waiting requests by the caller's identifier, except those already marked as too late for their TTFT target.

        They are in the order of their priority tiers: system, premium, standard, background.
        """
        return {queued.item: queued for queued in self.in_order(hit_first=False)}

    def lower_tokens(self, rank: int) -> int:
        """Return the number of uncached tokens of waiting requests of tiers lower than the one of ``rank`` (0 is the highest tier).

        A request of that tier is served before them, so that they do not count in its expected wait.
        """
        return self._lower_tokens[rank]

    def __bool__(self) -> bool:
        return any(tier.lanes for tier in self._tiers.values())

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        for tier in self._tiers.values():
            for lane in tier.lanes.values():
                yield from lane

    def credit(self, tier: Tier) -> float:
        """Return the uncached tokens that a tier (premium, standard or background) may still be served in this round of sharing.

        A negative value means that the tier was served more than its share.
        """
        return self._credits[tier]

    def put(self, queued: QueuedRequest[T], *, is_first: bool = False) -> None:
        """Add ``queued`` to the waiting requests, after all others of its tier and tenant, or before them if ``is_first``."""
        tier = queued.arrival.tier
        self._count(queued.arrival.rank, queued.uncached)
        self._tiers[tier].lane(queued.arrival.tenant).put(queued, is_first=is_first)

    def pull(self, queued: QueuedRequest[T]) -> None:
        """Remove ``queued`` from the waiting requests, because it is dispatched, cancelled or moved.

        Raises:
            KeyError: the request does not wait here.
        """
        self._count(queued.arrival.rank, -queued.uncached)
        self._tiers[queued.arrival.tier].pull(queued)

    def charge(self, queued: QueuedRequest[T]) -> None:
        """Record that ``queued`` was dispatched: its uncached tokens (at least 1) use up its tier's share of this round.

        They are also added to the tokens that its tenant was served, because within a tier the tenant with the fewest is next.
        The caller removes the request itself, by `pull`.
        """
        tier, tokens = queued.arrival.tier, max(1, queued.uncached)
        if tier in self._credits:
            self._credits[tier] -= tokens
        self._tiers[tier].charge(queued, tokens)

    def in_order(self, *, hit_first: bool) -> Iterator[QueuedRequest[T]]:
        """Iterate over the waiting requests, tier by tier from the highest, and tenant by tenant within a tier.

        Requests that can no longer meet their TTFT target (late ones) are left out. ``hit_first`` orders the requests of a
        tenant by the number of cached tokens, the largest first, and then by arrival; otherwise by arrival alone.
        """
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
        allow_resuming: bool = False,
    ) -> QueuedRequest[T] | None:
        """Return the waiting request to be served next, without removing it; None if no request may be served.

        Args:
            now_s: Current time in simulated seconds, for aging.
            hit_first: Whether the requests of a tenant are ordered by the number of cached tokens, the largest first, and
                then by arrival; otherwise by arrival alone.
            is_late: Returns whether a request can no longer meet its TTFT target. Such late requests are served after the
                others of their tier and tenant, except that every tenth turn is theirs. None treats no request as late.
            urgent: Whether only an urgent request may be returned: one of the system tier, or of the premium tier while
                that tier was served at most 8 rounds (`BURST_ROUNDS`) more than its share. Beyond that, premium waits its
                turn if a request of another tier waits as well.
            allow_resuming: Whether a stream to be resumed, of any tier, may be returned if no request is urgent.
        """
        tier = self._urgent_tier() if urgent else self._next_tier(now_s)
        if tier is None:
            return self._oldest_resuming() if allow_resuming else None
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

    def _oldest_resuming(self) -> QueuedRequest[T] | None:
        lanes = (lane for tier in self._tiers.values() for lane in tier.lanes.values())
        firsts = [next(iter(lane.resuming.values())) for lane in lanes if lane.resuming]
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
        # Number of tokens served per tenant; a tenant that returns starts at the level of those being served.
        self._tags: dict[str, float] = {}
        self._now = 0.0

    @property
    def oldest_s(self) -> float:
        return min(since_s for lane in self.lanes.values() if (since_s := lane.oldest_s) is not None)

    def lane(self, tenant: str) -> Lane[T]:
        lane = self.lanes.get(tenant)
        if not self.lanes:
            # The queue was empty, so there is no tenant to be level with, and the counts of former tenants are not needed.
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
        """Return the lane of the tenant that was served least; of equal ones, the tenant that arrived first."""
        return self.lanes[min(self.lanes, key=self._tags.__getitem__)]
