"""The next tier to serve, admission and holding back by tier, and each tier's requests by place. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from math import ceil
from typing import Any, Final, Generic, TypeVar

from penstock.api import SheddingConfig, Tier
from penstock.core.histogram import REQUEST_BOUNDS_S, ROUTER_TTFT_BOUNDS_S, BucketCounts
from penstock.router.policy.arrival import Arrival, QueuedRequest
from penstock.router.policy.slo_monitor import EVALUATE_S, EndedRequest, SloMonitor
from penstock.router.policy.tiers import SHARED, TierSettings


class QueueRoom:
    """Waiting requests by tier and by tenant.

    Each tier's share of the queue is kept for it: lower tiers may fill what the higher ones' shares leave, so a full
    background queue never refuses a premium request. System requests always enter. Requests without a tenant are bounded
    by their tier alone. A tenant has at most its share of its own requests plus its tier's free places, so that
    however many tenants flood, the next one finds room: with a part of a half one holds 1/2, two 1/3 each, three 1/4.

    Attributes:
        tiers: Waiting requests by tier.
    """

    def __init__(self) -> None:
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

    def has_room(self, arrival: Arrival, settings: TierSettings, most: int) -> bool:
        """Return whether one more request may enter a queue of ``most`` requests."""
        if arrival.tier is Tier.SYSTEM:
            return True
        free = most - self.tiers.total()
        total = sum(settings.shares.values())
        for higher in SHARED[: SHARED.index(arrival.tier)]:
            free -= max(0, ceil(most * settings.shares[higher] / total) - self.tiers[higher])
        own = self._tenants[arrival.tier, arrival.tenant] if arrival.tenant else 0
        return free > 0 and (own == 0 or own < settings.max_tenant_share * (own + free))


T = TypeVar("T")
_TIERS: Final = tuple(Tier)

WINDOW_S: Final = 2.0
"""Chosen: of a tier no more wait at a worker of the second stage than have begun there in so long, which is then what the
next one waits about. More than most transfers of KV take; simulated seconds."""
_LEAST: Final = 4
"""Chosen: requests of a tier that may wait there at least, so that a burst into idle workers goes on at once."""


class _Place(Generic[T]):
    """Requests of one tier at one worker."""

    def __init__(self) -> None:
        self.waiting: set[T] = set()
        # When the latest of them began to answer.
        self.begun_s: deque[float] = deque()

    def is_full(self, now_s: float) -> bool:
        begun_s = self.begun_s
        while begun_s and now_s - begun_s[0] > WINDOW_S:
            begun_s.popleft()
        return len(self.waiting) >= max(_LEAST, len(begun_s))


class HandedOver(Generic[T]):
    """Requests at workers of the second stage whose first token is still to come."""

    def __init__(self) -> None:
        self._of: dict[T, _Place[T]] = {}
        # By worker, and in it by rank of the tier.
        self._places: dict[str, list[_Place[T]]] = {}

    def enter(self, item: T, worker: str, rank: int) -> None:
        """Note that a request went to a worker."""
        places = self._places.get(worker)
        if places is None:
            places = self._places[worker] = [_Place() for _ in _TIERS]
        self._of[item] = places[rank]
        places[rank].waiting.add(item)

    def begun(self, item: T, now_s: float) -> None:
        """Note that an answer has begun; does nothing when its request is not within."""
        place = self._of.get(item)
        if place is not None:
            place.begun_s.append(now_s)
            place.is_full(now_s)
        self.leave(item)

    def leave(self, item: T) -> None:
        """Note that a request is gone; does nothing when it is not within."""
        place = self._of.pop(item, None)
        if place is not None:
            place.waiting.discard(item)

    def held(self, workers: Iterable[str], now_s: float) -> frozenset[Tier]:
        """Return the tiers to hold back: at every worker enough requests of them, or of a tier above, wait.

        The system tier is never among them.

        Args:
            workers: The eligible ones.
            now_s: Simulated seconds.
        """
        lowest = max((self._full_rank(each, now_s) for each in workers), default=len(_TIERS))
        return frozenset(_TIERS[lowest:])

    def _full_rank(self, worker: str, now_s: float) -> int:
        places = self._places.get(worker, ())
        full = (rank for rank, place in enumerate(places) if rank and place.is_full(now_s))
        return next(full, len(_TIERS))


_ROUNDS = 8
"""Chosen: of prompts that a worker may have to compute at least, all tiers together. With 4, of the requests of a premium
tier that asks for 85% of its share one in 200 finds its part full by chance alone, with 8 none of 1,800."""


class TierBacklog(Generic[T]):
    """Requests and their expected uncached tokens, by tier.

    Attributes:
        tokens: Of those within.
    """

    def __init__(self) -> None:
        self._items: dict[T, tuple[Tier, int]] = {}
        self.tokens: Counter[Tier] = Counter()

    def enter(self, item: T, tier: Tier, tokens: int) -> None:
        """Count a request in."""
        self._items[item] = (tier, tokens)
        self.tokens[tier] += tokens

    def leave(self, item: T) -> None:
        """Count a request out; does nothing when it is not within."""
        tier, tokens = self._items.pop(item, (Tier.SYSTEM, 0))
        self.tokens[tier] -= tokens

    def has_others(self, tier: Tier) -> bool:
        """Return whether requests of another tier are within."""
        return self.tokens.total() > self.tokens[tier]


def line_tokens(settings: TierSettings, tier: Tier, limit_tokens: float) -> float:
    """Return the prompt tokens that a tier may have at each worker of the first stage, however busy that is.

    It is the tier's share of the threshold: what lower tiers have there is no reason to reject the tier's requests. So a
    worker has at most twice its threshold to compute, and a request of each tier.

    Args:
        settings: Shares and round.
        tier: Not system, which has no bound.
        limit_tokens: Prompt tokens above which a worker is busy; 0 where none are.
    """
    return max(limit_tokens, _ROUNDS * settings.round_tokens) * settings.quantum(tier) / settings.round_tokens


class TierCounts:
    """Counters of one tier.

    Attributes:
        arrivals: Requests that came, whatever became of them.
        rejected: Of those, the ones that found no room or no worker, or waited too long.
        shed: Of those, the ones that were refused for the SLO of higher tiers.
        ttft: Arrival to first token.
        e2e: Arrival to last token, of those answered in full.
        queue_time: Waits for the first stage.
    """

    def __init__(self) -> None:
        self.arrivals = 0
        self.rejected = 0
        self.shed = 0
        self.ttft = BucketCounts(ROUTER_TTFT_BOUNDS_S)
        self.e2e = BucketCounts(REQUEST_BOUNDS_S)
        self.queue_time = BucketCounts(REQUEST_BOUNDS_S)


class TierControl:
    """Sheds, and keeps the counters.

    Attributes:
        settings: Shares and targets.
        monitor: Decides what is shed.
        counts: By tier.
    """

    def __init__(self, settings: TierSettings, shedding: SheddingConfig) -> None:
        self.settings = settings
        self.monitor = SloMonitor(settings, shedding)
        self.counts = {tier: TierCounts() for tier in Tier}
        self._evaluated_s = float("-inf")

    def configure(self, settings: TierSettings, shedding: SheddingConfig) -> None:
        """Replace the settings; measurements stay."""
        self.settings = settings
        self.monitor.configure(settings, shedding)

    def arrived(self, tier: Tier) -> str | None:
        """Count an arrival; return why it is shed, or None."""
        counts = self.counts[tier]
        counts.arrivals += 1
        if not self.monitor.sheds(tier):
            return None
        counts.shed += 1
        return f"requests of tier {tier} are shed so that higher tiers keep their SLO; retry later"

    def rejected(self, tier: Tier) -> None:
        """Count an arrival that was not taken."""
        self.counts[tier].rejected += 1

    def timed_out(self, tier: Tier, now_s: float) -> None:
        """Count a request that waited too long."""
        self.counts[tier].rejected += 1
        self.monitor.ended(tier, EndedRequest(is_failed=True), now_s)

    def dispatched(self, tier: Tier, queued_s: float) -> None:
        """Count a wait for the first stage."""
        self.counts[tier].queue_time.observe(queued_s)

    def first_token(self, tier: Tier, ttft_s: float, now_s: float) -> None:
        """Record a first token."""
        self.counts[tier].ttft.observe(ttft_s)
        self.monitor.first_token(tier, ttft_s, now_s)

    def ended(self, tier: Tier, request: EndedRequest, now_s: float) -> None:
        """Record the end of a request that was dispatched."""
        if request.e2e_s is not None and not request.is_failed:
            self.counts[tier].e2e.observe(request.e2e_s)
        self.monitor.ended(tier, request, now_s)

    def tick(self, now_s: float, waiting: Callable[[], Iterable[QueuedRequest[Any]]]) -> None:
        """Evaluate the SLOs once a second; ``waiting`` returns the requests that wait for the first stage."""
        if now_s - self._evaluated_s >= EVALUATE_S:
            self._evaluated_s = now_s
            waits: dict[Tier, list[float]] = {tier: [] for tier in Tier}
            for queued in waiting():
                waits[queued.arrival.tier].append(now_s - queued.since_s)
            self.monitor.evaluate(now_s, waits)
