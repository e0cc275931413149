"""What the router does by tier: room in its queue, admission and holding back, shedding, and counters. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from math import ceil, inf
from typing import Any, Final, Generic, NamedTuple, TypeVar

from penstock.api import Role, Tier, TiersConfig
from penstock.core.histogram import REQUEST_BOUNDS_S, ROUTER_TTFT_BOUNDS_S, BucketCounts
from penstock.router.policy.arrival import Arrival, QueuedRequest
from penstock.router.policy.slo_monitor import EVALUATE_S, EndedRequest, SlidingWindow, SloMonitor
from penstock.router.policy.tiers import BURST_ROUNDS, SHARED, share_of


class QueueOccupancy:
    """Waiting requests by tier and by tenant.

    Each tier's share of the queue is kept for it: lower tiers may fill what the higher ones' shares leave, so a full
    background queue never refuses a premium request. System requests always enter. Requests without a tenant are bounded
    by their tier alone. A tenant has at most its share of its own requests plus its tier's free places, so that
    however many tenants flood, the next one finds room: with a part of a half one holds 1/2, two 1/3 each, three 1/4.
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

    def admits(self, arrival: Arrival, tiers: TiersConfig, most: int) -> bool:
        """Return whether one more request may enter a queue of ``most`` requests."""
        if arrival.tier is Tier.SYSTEM:
            return True
        free = most - self.tiers.total()
        for higher in SHARED[: SHARED.index(arrival.tier)]:
            free -= max(0, ceil(most * share_of(tiers, higher)) - self.tiers[higher])
        own = self._tenants[arrival.tier, arrival.tenant] if arrival.tenant else 0
        return free > 0 and (own == 0 or own < tiers.max_tenant_share * (own + free))


_TIERS: Final = tuple(Tier)

WINDOW_S: Final = 2.0
"""Chosen: of a tier no more wait at a worker of the second stage than have begun there in this long, which is then what the
next one waits about. More than most transfers of KV take; simulated seconds."""
_LEAST: Final = 4
"""Chosen: requests of a tier that may wait there at least, so that a burst into idle workers continues at once."""


K = TypeVar("K", bound=Hashable)


class KeyedAmounts(Generic[K]):
    """Amounts of items, summed by key: ``sums``."""

    def __init__(self) -> None:
        self._items: dict[Any, tuple[K, int]] = {}
        self.sums: Counter[K] = Counter()

    def enter(self, item: Any, key: K, amount: int = 1) -> None:
        """Count an item in."""
        self._items[item] = key, amount
        self.sums[key] += amount

    def leave(self, item: Any) -> tuple[K, int] | None:
        """Count an item out and return its key and amount; None, and nothing done, when it is not within."""
        found = self._items.pop(item, None)
        if found is not None:
            key, amount = found
            self.sums[key] -= amount
        return found

    def has_others(self, key: K) -> bool:
        """Return whether items of another key are within."""
        return self.sums.total() > self.sums[key]


class AwaitingFirstToken(KeyedAmounts[tuple[str, int]]):
    """Requests at workers of the second stage whose first token is still to come, by worker and rank of their tier."""

    def __init__(self) -> None:
        super().__init__()
        # When the latest answers began.
        self._begun_s: defaultdict[tuple[str, int], deque[float]] = defaultdict(deque)

    def begun(self, item: Any, now_s: float) -> None:
        """Record that an answer has begun; does nothing when its request is not within."""
        found = self.leave(item)
        if found is not None:
            self._lately_s(found[0], now_s).append(now_s)

    def held(self, workers: Iterable[str], now_s: float) -> frozenset[Tier]:
        """Return the tiers to hold back: at every eligible worker enough requests of them, or of a tier above, wait.

        The system tier is never among them.
        """
        lowest = max((self._full_rank(each, now_s) for each in workers), default=len(_TIERS))
        return frozenset(_TIERS[lowest:])

    def _full_rank(self, worker: str, now_s: float) -> int:
        for rank in range(1, len(_TIERS)):
            place = worker, rank
            if self.sums[place] >= max(_LEAST, len(self._lately_s(place, now_s))):
                return rank
        return len(_TIERS)

    def _lately_s(self, place: tuple[str, int], now_s: float) -> deque[float]:
        begun_s = self._begun_s[place]
        while begun_s and now_s - begun_s[0] > WINDOW_S:
            begun_s.popleft()
        return begun_s


class AheadOfShare:
    """How many prompt tokens each tier is ahead of its share of what the workers have been able to compute."""

    def __init__(self) -> None:
        self._ahead: dict[Tier, float] = dict.fromkeys(SHARED, 0.0)
        self._at_s = float("-inf")

    def add(self, tier: Tier, tokens: float, most: float) -> None:
        """Count tokens of a tier; it is never ahead by more than twice ``most``, so that it comes back soon."""
        if tier in self._ahead:
            self._ahead[tier] = min(2 * most, self._ahead[tier] + tokens)

    def drain(self, tiers: TiersConfig, tokens_per_s: float, now_s: float) -> None:
        """Take off each tier's share of what all workers have been able to compute meanwhile, tokens/s."""
        passed_s, self._at_s = now_s - self._at_s, max(now_s, self._at_s)
        for tier in SHARED:
            able = tokens_per_s * share_of(tiers, tier) * max(0.0, passed_s)
            self._ahead[tier] = max(0.0, self._ahead[tier] - able)

    def is_within(self, tier: Tier, most: float) -> bool:
        """Return whether a tier has no more than its share, except for a burst of ``most`` tokens."""
        return self._ahead[tier] <= most


class FirstStage(NamedTuple):
    """What the workers of the first stage take.

    Attributes:
        workers: How many may be chosen.
        limit_tokens: Prompt tokens above which one is busy, 0 where the thresholds name none; None: there are no thresholds.
        tokens_per_s: That one computes while it is at work; None: not measured yet.
    """

    workers: int
    limit_tokens: float | None = None
    tokens_per_s: float | None = None


SHARE_WINDOW_S: Final = 60.0
"""Chosen: four scrapes of Prometheus; some hundred prompts of a busy worker. Simulated seconds."""


class TierCounts:
    """Counters of one tier.

    Attributes:
        arrivals: Requests that came, whatever became of them.
        rejected: Arrivals that found no room or no worker, or waited too long.
        shed: Arrivals that were refused for the SLO of higher tiers.
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
    """Sheds and holds back by tier, and keeps the counters.

    Attributes:
        monitor: Decides what is shed.
    """

    def __init__(self, tiers: TiersConfig, roles: Iterable[Role]) -> None:
        self.monitor = SloMonitor(tiers)
        self.counts = {tier: TierCounts() for tier in Tier}
        self._evaluated_s = float("-inf")
        # Tokens by tier: expected uncached ones of prompts that the first stage has to compute, and all of each stage.
        self._uncomputed: KeyedAmounts[Tier] = KeyedAmounts()
        self._held: dict[Role, KeyedAmounts[Tier]] = {role: KeyedAmounts() for role in roles}
        self._awaiting_first = AwaitingFirstToken()
        self._computed = {tier: SlidingWindow(SHARE_WINDOW_S) for tier in Tier}
        # Expected uncached tokens of new requests, whatever became of them, and of those that were admitted.
        self._asked, self._admitted = AheadOfShare(), AheadOfShare()

    # ------------------------------------------------------------------ where requests are

    def entered(self, item: Any, role: Role, arrival: Arrival, *, uncomputed_tokens: int | None) -> None:
        """Record that a request is in a stage; ``uncomputed_tokens`` are to be computed there, None: none in this stage."""
        self._held[role].enter(item, arrival.tier, arrival.tokens)
        if uncomputed_tokens is not None:
            self._admitted.add(arrival.tier, uncomputed_tokens, inf)
            self._uncomputed.enter(item, arrival.tier, uncomputed_tokens)

    def dispatched(self, queued: QueuedRequest[Any], queued_s: float, *, is_entry: bool) -> None:
        """Record that a request went to a worker, and its wait for the first stage."""
        if is_entry:
            self.counts[queued.arrival.tier].queue_time.observe(queued_s)
        elif not queued.arrival.is_non_streaming:
            self._awaiting_first.enter(queued.item, (queued.worker, queued.arrival.rank))

    def computed(self, item: Any, now_s: float) -> None:
        """Record that a prompt was computed, or that a worker of the second stage began to answer."""
        found = self._uncomputed.leave(item)
        if found is not None:
            self._computed[found[0]].add(found[1], now_s)
        self._awaiting_first.begun(item, now_s)

    def share_deviation(self, tier: Tier, now_s: float) -> float | None:
        """Return the part of the prompt tokens computed within the window that was a tier's, less its share; None: none was."""
        sums = {each: sum(window.values(now_s)) for each, window in self._computed.items()}
        total = sum(sums[each] for each in SHARED)
        return sums[tier] / total - share_of(self.monitor.tiers, tier) if total and tier in SHARED else None

    def left(self, item: Any, role: Role) -> None:
        """Record that a request has left a stage."""
        self._uncomputed.leave(item)
        self._awaiting_first.leave(item)
        self._held[role].leave(item)

    def held_back(self, workers: Iterable[str], now_s: float) -> frozenset[Tier]:
        """Return the tiers that wait in the second stage already, given its eligible workers."""
        return self._awaiting_first.held(workers, now_s)

    def asked(self, tier: Tier, tokens: float, stage: FirstStage, now_s: float) -> None:
        """Count the prompt tokens that a new request would have the first stage compute, whatever becomes of it."""
        if stage.tokens_per_s is not None:
            for each in (self._asked, self._admitted):
                each.drain(self.monitor.tiers, stage.tokens_per_s * stage.workers, now_s)
        self._asked.add(tier, tokens, self._burst_tokens(tier, stage))

    def waits_its_turn(
        self, tier: Tier, tokens: float, full: Role, stage: FirstStage, *, has_blocks: bool
    ) -> bool:
        """Return whether a new request may wait for a stage that is full now, so that its tier gets its share.

        That is while others are what fills it, and its own tier has less than its share of the threshold to compute at each
        worker, or a prompt, or was admitted less than its share recently: what lower tiers have there is no reason to reject
        the tier's requests. So what waits takes no longer than the threshold allows. A tier that asks for no more than its
        share has its bursts besides, which end by themselves.

        Args:
            tier: Of the request; system has no bound.
            tokens: Its own to compute, as expected.
            full: The stage.
            stage: The first one.
            has_blocks: Prompts to be computed are all that fills the full stage.
        """
        if tier is Tier.SYSTEM:
            return True
        if not (self._uncomputed if has_blocks else self._held[full]).has_others(tier):
            return False
        own, burst = self._uncomputed.sums[tier], self._burst_tokens(tier, stage)
        if own >= burst or stage.limit_tokens is None or self._asked.is_within(tier, burst):
            return own < burst
        most = max(stage.limit_tokens * share_of(self.monitor.tiers, tier), tokens) * stage.workers
        return own < most or self._admitted.is_within(tier, most)

    def _burst_tokens(self, tier: Tier, stage: FirstStage) -> float:
        tiers = self.monitor.tiers
        if tier is Tier.SYSTEM:
            return inf
        most = max(stage.limit_tokens or 0.0, BURST_ROUNDS * tiers.round_tokens)
        return most * share_of(tiers, tier) * stage.workers

    # ------------------------------------------------------------------ what is counted

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
        """Count an arrival that waited too long."""
        self.counts[tier].rejected += 1
        self.monitor.ended(tier, EndedRequest(is_failed=True), now_s)

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
        """Evaluate the SLOs once a second; ``waiting`` returns the requests whose prompts are still to be computed."""
        if now_s - self._evaluated_s >= EVALUATE_S:
            self._evaluated_s = now_s
            waits: dict[Tier, list[float]] = {tier: [] for tier in Tier}
            for queued in waiting():
                waits[queued.arrival.tier].append(now_s - queued.since_s)
            self.monitor.evaluate(now_s, waits)
