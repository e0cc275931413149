"""The router's handling of tiers: queue slots, admission, holding back, load shedding, and counters. Pure."""

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
    """Number of waiting requests by tier and by tenant, and whether another one fits into the queue.

    Each tier's share of the queue is reserved for it: lower tiers may fill only what the higher tiers' shares leave, so a
    queue full of background requests never rejects a premium request. System requests are always admitted. Requests without a
    tenant are limited by their tier alone. A tenant may occupy at most a fraction (``maxTenantShare``) of its own waiting
    requests plus its tier's free slots, so that a new tenant always finds a free slot, however many tenants flood the queue:
    with a fraction of a half, one tenant occupies 1/2, two 1/3 each, three 1/4 each.

    Attributes:
        tiers: Number of waiting requests by tier.
    """

    def __init__(self) -> None:
        self.tiers: Counter[Tier] = Counter()
        self._tenants: Counter[tuple[Tier, str]] = Counter()

    def enter(self, arrival: Arrival) -> None:
        """Add the request ``arrival``, which starts to wait, to the numbers of waiting requests of its tier and tenant."""
        self.tiers[arrival.tier] += 1
        self._tenants[arrival.tier, arrival.tenant] += 1

    def leave(self, arrival: Arrival) -> None:
        """Subtract the request ``arrival``, which `enter` has added, from these numbers, because it no longer waits."""
        self.tiers[arrival.tier] -= 1
        tenant = arrival.tier, arrival.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def admits(self, arrival: Arrival, tiers: TiersConfig, most: int) -> bool:
        """Return whether the new request ``arrival`` may wait in a queue of at most ``most`` requests.

        Its tier's share of the queue (as ``tiers`` sets it) and its tenant's part decide; system requests may always wait.
        """
        if arrival.tier is Tier.SYSTEM:
            return True
        free = most - self.tiers.total()
        for higher in SHARED[: SHARED.index(arrival.tier)]:
            free -= max(0, ceil(most * share_of(tiers, higher)) - self.tiers[higher])
        own = self._tenants[arrival.tier, arrival.tenant] if arrival.tenant else 0
        return free > 0 and (own == 0 or own < tiers.max_tenant_share * (own + free))


_TIERS: Final = tuple(Tier)

WINDOW_S: Final = 2.0
"""Window in simulated seconds. Chosen: at a decode worker, no more requests of a tier wait for their first token than have got
theirs within this window; the window's length is then about the wait of the next request. It is longer than most KV transfers
take."""
_MIN_REQUESTS: Final = 4
"""Chosen: at least this many requests of a tier may wait for their first token at a worker, so that a burst into idle workers is
dispatched at once."""


K = TypeVar("K", bound=Hashable)


class KeyedAmounts(Generic[K]):
    """Amounts of items, summed by key, for example the tokens of requests by worker.

    Attributes:
        sums: Sum of the amounts of the items that have entered and not left, by key.
    """

    def __init__(self) -> None:
        self._items: dict[Any, tuple[K, int]] = {}
        self.sums: Counter[K] = Counter()

    def enter(self, item: Any, key: K, amount: int = 1) -> None:
        """Add ``amount`` to the sum of ``key``, and remember both for ``item``, which must not be present already."""
        self._items[item] = key, amount
        self.sums[key] += amount

    def leave(self, item: Any) -> tuple[K, int] | None:
        """Remove an item and return its key and amount; return None, and do nothing, if it was not added."""
        found = self._items.pop(item, None)
        if found is not None:
            key, amount = found
            self.sums[key] -= amount
        return found

    def has_others(self, key: K) -> bool:
        """Return whether items with another key than ``key`` are present whose amounts are above 0."""
        return self.sums.total() > self.sums[key]


class AwaitingFirstToken(KeyedAmounts[tuple[str, int]]):
    """Requests that wait at decode workers for their first token, counted by worker and by rank of their tier (0 is the highest).

    They show whether decode workers are behind, so that prefill workers should compute no more prompts of a tier for now.

    All times are in simulated seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        # When the latest answers began.
        self._first_token_s: defaultdict[tuple[str, int], deque[float]] = defaultdict(deque)

    def got_first_token(self, item: Any, now_s: float) -> None:
        """Record that the first token of the request ``item`` has arrived at ``now_s``; does nothing if the request was not added."""
        found = self.leave(item)
        if found is not None:
            self._recent_s(found[0], now_s).append(now_s)

    def held(self, workers: Iterable[str], now_s: float) -> frozenset[Tier]:
        """Return the tiers whose new requests should not go to a prefill worker now, because the decode workers are behind with the tier.

        A tier is held back if two conditions hold at every decode worker named in ``workers``: at least 4 requests of that
        tier or a higher one wait there for their first token, and these are at least as many as the requests of those tiers
        that got their first token there within the last 2 s (`WINDOW_S`). The system tier is never held back. Returns an empty
        set if ``workers`` is empty.
        """
        lowest = max((self._full_rank(each, now_s) for each in workers), default=len(_TIERS))
        return frozenset(_TIERS[lowest:])

    def _full_rank(self, worker: str, now_s: float) -> int:
        for rank in range(1, len(_TIERS)):
            place = worker, rank
            if self.sums[place] >= max(_MIN_REQUESTS, len(self._recent_s(place, now_s))):
                return rank
        return len(_TIERS)

    def _recent_s(self, place: tuple[str, int], now_s: float) -> deque[float]:
        first_token_s = self._first_token_s[place]
        while first_token_s and now_s - first_token_s[0] > WINDOW_S:
            first_token_s.popleft()
        return first_token_s


class ShareExcess:
    """Number of prompt tokens by which each tier's requests exceed its share of what the workers could compute; never below 0.

    It grows with each request and shrinks with time, so that a tier that has requested too much recently is recognized.
    """

    def __init__(self) -> None:
        self._excess: dict[Tier, float] = dict.fromkeys(SHARED, 0.0)
        self._at_s = float("-inf")

    def add(self, tier: Tier, tokens: float, most: float) -> None:
        """Add requested prompt tokens to a tier's excess, but not beyond 2 * ``most`` tokens.

        ``most`` is the number of tokens that a tier may request at once beyond its share (a burst). The limit lets a tier
        that has requested far too much be back within its share soon.
        """
        if tier in self._excess:
            self._excess[tier] = min(2 * most, self._excess[tier] + tokens)

    def drain(self, tiers: TiersConfig, tokens_per_s: float, now_s: float) -> None:
        """Subtract, from each tier's excess, its share of the tokens that the workers could compute since the last call.

        Args:
            tiers: Shares of the tiers.
            tokens_per_s: Prefill throughput of all workers together, in tokens per simulated second.
            now_s: Current time in simulated seconds.
        """
        passed_s, self._at_s = now_s - self._at_s, max(now_s, self._at_s)
        for tier in SHARED:
            able = tokens_per_s * share_of(tiers, tier) * max(0.0, passed_s)
            self._excess[tier] = max(0.0, self._excess[tier] - able)

    def is_within(self, tier: Tier, most: float) -> bool:
        """Return whether a tier has requested at most ``most`` prompt tokens more than its share of the capacity recently."""
        return self._excess[tier] <= most


class FirstStage(NamedTuple):
    """Capacity of the workers of the first stage (prefill or aggregated workers).

    Attributes:
        workers: Number of workers that can be routed to.
        limit_tokens: Number of prompt tokens above which a worker is busy; 0 if the thresholds set no such number, None if
            there are no thresholds.
        tokens_per_s: Prefill throughput of one worker while it has work, in tokens/s; None if it was not measured yet.
    """

    workers: int
    limit_tokens: float | None = None
    tokens_per_s: float | None = None


SHARE_WINDOW_S: Final = 60.0
"""Window of the observed tier shares in simulated seconds. Chosen: four scrapes of Prometheus; about a hundred prompts of a busy
worker."""


class TierCounts:
    """Cumulative counters of one tier (priority class of requests).

    Attributes:
        arrivals: Number of requests that arrived, whatever became of them.
        rejected: Number of arrivals that found no queue slot or no worker, or waited too long.
        shed: Number of arrivals that were rejected to protect the SLO of higher tiers.
        ttft: Histogram of the times from arrival to first token, in simulated seconds.
        e2e: Histogram of the times from arrival to last token of complete responses, in simulated seconds.
        queue_time: Histogram of the waits for a worker of the first stage (prefill or aggregated), in simulated seconds.
    """

    def __init__(self) -> None:
        self.arrivals = 0
        self.rejected = 0
        self.shed = 0
        self.ttft = BucketCounts(ROUTER_TTFT_BOUNDS_S)
        self.e2e = BucketCounts(REQUEST_BOUNDS_S)
        self.queue_time = BucketCounts(REQUEST_BOUNDS_S)


class TierControl:
    """Decides by tier which requests are shed (rejected) or held back (not dispatched for now), and counts requests by tier.

    A stage is the set of workers of one role that requests pass: the first stage is prefill or aggregated, the second decode.
    ``tiers`` contains the tiers' targets and shares, and ``roles`` the roles of the stages. All times are in simulated seconds.

    Attributes:
        monitor: SLO attainment of the tiers; decides which tiers are shed.
        counts: Counters of each tier.
    """

    def __init__(self, tiers: TiersConfig, roles: Iterable[Role]) -> None:
        self.monitor = SloMonitor(tiers)
        self.counts = {tier: TierCounts() for tier in Tier}
        self._evaluated_s = float("-inf")
        # Tokens by tier: the expected uncached tokens of prompts that the first stage has to compute, and all prompt tokens
        # in each stage.
        self._uncomputed: KeyedAmounts[Tier] = KeyedAmounts()
        self._held: dict[Role, KeyedAmounts[Tier]] = {role: KeyedAmounts() for role in roles}
        self._awaiting_first = AwaitingFirstToken()
        self._computed = {tier: SlidingWindow(SHARE_WINDOW_S) for tier in Tier}
        # Excess over the tiers' shares, in expected uncached tokens: of all new requests, admitted or not, and of the
        # admitted ones.
        self._requested, self._admitted = ShareExcess(), ShareExcess()

    # ------------------------------------------------------------------ where requests are

    def entered(self, item: Any, role: Role, arrival: Arrival, *, uncomputed_tokens: int | None) -> None:
        """Record that a request has entered a stage: that it now waits for, or runs on, the workers of ``role``.

        Args:
            item: The request.
            role: Role of the workers of the stage.
            arrival: Tier and prompt tokens of the request.
            uncomputed_tokens: Prompt tokens to be computed in this stage; None if this stage computes no prompt.
        """
        self._held[role].enter(item, arrival.tier, arrival.tokens)
        if uncomputed_tokens is not None:
            self._admitted.add(arrival.tier, uncomputed_tokens, inf)
            self._uncomputed.enter(item, arrival.tier, uncomputed_tokens)

    def dispatched(self, queued: QueuedRequest[Any], queued_s: float, *, is_entry: bool) -> None:
        """Record that a request was sent to a worker.

        Args:
            queued: The request.
            queued_s: Time that it waited in the queue, in simulated seconds; added to the tier's histogram for the first
                stage only.
            is_entry: Whether the worker is one of the first stage (prefill or aggregated).
        """
        if is_entry:
            self.counts[queued.arrival.tier].queue_time.observe(queued_s)
        elif not queued.arrival.is_non_streaming:
            self._awaiting_first.enter(queued.item, (queued.worker, queued.arrival.rank))

    def computed(self, item: Any, now_s: float) -> None:
        """Record that a request's prompt was computed, or that its first token has arrived from a decode worker.

        Its prompt tokens then count as computed for its tier, instead of as waiting, and it no longer counts as waiting for a
        first token. Does nothing for a request that was not recorded. ``now_s`` is in simulated seconds.
        """
        found = self._uncomputed.leave(item)
        if found is not None:
            self._computed[found[0]].add(found[1], now_s)
        self._awaiting_first.got_first_token(item, now_s)

    def share_deviation(self, tier: Tier, now_s: float) -> float | None:
        """Return a tier's fraction of the prompt tokens computed in the last simulated minute, minus its configured share.

        Both are between 0 and 1; a positive result says that the tier got more than its share. Returns None if no
        tokens were computed, or if the tier has no share (system).
        """
        sums = {each: sum(window.values(now_s)) for each, window in self._computed.items()}
        total = sum(sums[each] for each in SHARED)
        return sums[tier] / total - share_of(self.monitor.tiers, tier) if total and tier in SHARED else None

    def left(self, item: Any, role: Role) -> None:
        """Record that a request has left a stage (the workers of ``role``); does nothing if it was not there."""
        self._uncomputed.leave(item)
        self._awaiting_first.leave(item)
        self._held[role].leave(item)

    def held_back(self, workers: Iterable[str], now_s: float) -> frozenset[Tier]:
        """Return the tiers whose requests must not be sent to prefill workers now, because decode workers are behind with them.

        ``workers`` are the names of the decode workers that can be routed to. They are behind with a tier if, at each of
        them, at least 4 requests of that tier or a higher one wait for their first token, and these are at least as many as
        the requests of those tiers that got their first token there within the last 2 simulated seconds.
        """
        return self._awaiting_first.held(workers, now_s)

    def count_requested(self, tier: Tier, tokens: float, stage: FirstStage, now_s: float) -> None:
        """Count the expected uncached prompt tokens of a new request, whether or not it will be admitted.

        `waits_its_turn` then compares what a tier has requested recently with its share of the capacity.

        Args:
            tier: Tier of the request.
            tokens: Expected uncached tokens of its prompt.
            stage: Capacity of the workers of the first stage (prefill or aggregated).
            now_s: Current time in simulated seconds.
        """
        if stage.tokens_per_s is not None:
            for each in (self._requested, self._admitted):
                each.drain(self.monitor.tiers, stage.tokens_per_s * stage.workers, now_s)
        self._requested.add(tier, tokens, self._burst_tokens(tier, stage))

    def waits_its_turn(
        self, tier: Tier, tokens: float, full: Role, stage: FirstStage, *, has_blocks: bool
    ) -> bool:
        """Return whether a new request may wait although all workers of a stage are busy, so that its tier gets its configured share.

        If this returns False, the caller rejects the request. It may wait while requests of other tiers occupy the stage, and
        one of two conditions holds: the waiting prompts of its own tier have fewer tokens than the tier's share of
        `FirstStage.limit_tokens` (the tokens at which a worker is busy) at each worker, or fewer of the tier's tokens were
        admitted recently than its share of the capacity. So requests of other tiers alone do not cause its rejection, and
        the tier's own requests wait no longer than the threshold allows. A tier that has requested no more than its share
        recently may have a burst of prompts waiting instead.

        Args:
            tier: Tier of the request; system requests may always wait.
            tokens: Expected uncached tokens of the request's prompt.
            full: Role of the stage whose workers are all busy.
            stage: Capacity of the first stage (prefill or aggregated workers).
            has_blocks: Whether the stage is full only because of prompts to be computed, so that some worker still has KV
                blocks.
        """
        if tier is Tier.SYSTEM:
            return True
        if not (self._uncomputed if has_blocks else self._held[full]).has_others(tier):
            return False
        own, burst = self._uncomputed.sums[tier], self._burst_tokens(tier, stage)
        if own >= burst or stage.limit_tokens is None or self._requested.is_within(tier, burst):
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
        """Count a new request; return the message for its client if it is shed (rejected to protect higher tiers), else None."""
        counts = self.counts[tier]
        counts.arrivals += 1
        if not self.monitor.sheds(tier):
            return None
        counts.shed += 1
        return f"requests of tier {tier} are shed so that higher tiers keep their SLO; retry later"

    def rejected(self, tier: Tier) -> None:
        """Count a request that found no queue slot or no worker and is rejected."""
        self.counts[tier].rejected += 1

    def timed_out(self, tier: Tier, now_s: float) -> None:
        """Count a request that was rejected because it waited too long in the queue; it counts as having missed the tier's SLO."""
        self.counts[tier].rejected += 1
        self.monitor.ended(tier, EndedRequest(is_failed=True), now_s)

    def first_token(self, tier: Tier, ttft_s: float, now_s: float) -> None:
        """Record the TTFT (``ttft_s``, in simulated seconds) of a request of a tier; called at the request's first token."""
        self.counts[tier].ttft.observe(ttft_s)
        self.monitor.first_token(tier, ttft_s, now_s)

    def ended(self, tier: Tier, request: EndedRequest, now_s: float) -> None:
        """Record that a request of ``tier`` that was sent to a worker has ended at ``now_s`` (simulated seconds).

        ``request`` contains its latencies, and whether it failed; they count for the tier's histograms and SLO.
        """
        if request.e2e_s is not None and not request.is_failed:
            self.counts[tier].e2e.observe(request.e2e_s)
        self.monitor.ended(tier, request, now_s)

    def tick(self, now_s: float, waiting: Callable[[], Iterable[QueuedRequest[Any]]]) -> None:
        """Evaluate the tiers' SLOs, and decide of which tiers new requests are shed (rejected) from now on.

        Does nothing if the last evaluation is less than one simulated second old. ``waiting`` returns the requests
        whose prompts are not computed yet, so that their waits count as well.
        """
        if now_s - self._evaluated_s >= EVALUATE_S:
            self._evaluated_s = now_s
            waits: dict[Tier, list[float]] = {tier: [] for tier in Tier}
            for queued in waiting():
                waits[queued.arrival.tier].append(now_s - queued.since_s)
            self.monitor.evaluate(now_s, waits)
