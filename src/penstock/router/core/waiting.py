"""How long requests may wait, how long workers take to come, and how many requests got none recently. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from penstock.api import QueueOrder, Tier, TiersConfig
from penstock.router.core.limits import MAX_WORKER_WAIT_S, QUEUE_WAIT, TIER_TARGET, Limit
from penstock.router.policy.tiers import slo_of

_RESERVED_SLOTS = 1 / 8
"""Chosen: of a worker's request limit, for system and premium. Of 96 slots that requests keep for 10 s one is free again every
0.1 s, yet without any kept free premium's p99 is 0.5 to 1.2 s at twice the load, where it is 0.2 s with 12 and without a limit."""


class Headroom(IntEnum):
    """Who may be sent to a worker now."""

    NONE = 0
    URGENT = 1
    """System and premium requests alone, which overtake there what they would wait for here."""
    ANY = 2


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """How queues behave, whatever the policy.

    Attributes:
        slot_tokens: Uncached tokens dispatched to one worker at a time, with tiers those of premium and system beyond it;
            None is unbounded. An idle worker always takes one request, however long.
        slot_requests: Requests dispatched to one worker at a time; None is unbounded.
        worker_requests: Requests that a worker has room for, answers under way included; None is unbounded.
        max_requests: Most waiting requests; None is unbounded.
        max_wait_s: Longest wait, simulated seconds; None is unbounded.
        max_wake_s: Longest wait while a stage has no worker that may be chosen, but never below `max_wait_s`, which counts
            from when all have one; less once `WakeTimes` knows how long workers take. Simulated seconds; None:
            `max_wait_s` alone, whatever the workers.
        wait_limit: The limit that `max_wait_s` and `max_wake_s` are.
        begun_wait_s: Longest wait of a begun stream that `wait_limit` does not bind, simulated seconds.
        order: Who is next in a worker's queue; the central queue is first in, first out.
        slo_s: TTFT that rebalancing and the deadline-aware order aim for, simulated seconds.
        tiers: How tiers share; None: requests are ordered as if all were of one tier.
    """

    slot_tokens: int | None = None
    slot_requests: int | None = None
    worker_requests: int | None = None
    max_requests: int | None = None
    max_wait_s: float | None = None
    max_wake_s: float | None = None
    wait_limit: Limit = QUEUE_WAIT
    begun_wait_s: float = MAX_WORKER_WAIT_S
    order: QueueOrder = QueueOrder.ARRIVAL
    slo_s: float = 5.0
    tiers: TiersConfig | None = None

    def headroom(self, running: int, tokens: int, inflight: int) -> Headroom:
        """Return who may be sent to a worker.

        Args:
            running: Requests that it was given and has not computed.
            tokens: Their uncached tokens.
            inflight: Requests under way there, answers included.
        """
        bound, most = self.worker_requests, self.slot_requests
        if (bound is not None and inflight >= bound) or (most is not None and running >= most):
            return Headroom.NONE
        if bound is not None and self.tiers is not None and inflight >= bound - int(bound * _RESERVED_SLOTS):
            return Headroom.URGENT
        if tokens == 0 or self.slot_tokens is None or tokens < self.slot_tokens:
            return Headroom.ANY
        return Headroom.NONE if self.tiers is None else Headroom.URGENT

    def ttft_slo_s(self, tier: Tier) -> float | None:
        """Return the TTFT that the deadline-aware order aims for; None: any is in time."""
        return self.slo_s if self.tiers is None else slo_of(self.tiers, tier).ttft_seconds

    def longest_wait_s(self, tier: Tier, *, begun: bool = False) -> float:
        """Return how long a request, or a begun stream, may wait for workers that serve.

        After its tier's end-to-end target waiting on is of no use to a request without an answer.
        """
        if not self.wait_limit.binds(begun=begun):
            return self.begun_wait_s
        return min(self._most_s, self._useful_s(tier, begun=begun))

    def deadline_s(
        self,
        tier: Tier,
        since_s: float,
        *,
        begun: bool = False,
        served_s: float = -inf,
        hold_s: float = inf,
    ) -> float:
        """Return until when a request may wait, simulated seconds.

        Args:
            tier: Of the request.
            since_s: When it began to wait.
            begun: It is a begun stream.
            served_s: Since when every stage has had a worker that may be chosen; inf: one has none now.
            hold_s: Longest wait for workers that is worth it, as far as `max_wake_s` allows; see `WakeTimes`.
        """
        if not self.wait_limit.binds(begun=begun):
            return since_s + self.begun_wait_s
        if self.max_wake_s is None:
            own_s = since_s + self._most_s
        elif served_s == inf:
            own_s = since_s + max(min(hold_s, self.max_wake_s), self._most_s)
        else:
            own_s = max(since_s, served_s) + self._most_s
        return min(own_s, since_s + self._useful_s(tier, begun=begun))

    @property
    def _most_s(self) -> float:
        return inf if self.max_wait_s is None else self.max_wait_s

    def _useful_s(self, tier: Tier, *, begun: bool) -> float:
        if not TIER_TARGET.binds(begun=begun):
            return inf
        e2e_s = None if self.tiers is None else slo_of(self.tiers, tier).end_to_end_seconds
        return inf if e2e_s is None else e2e_s


LATELY_S = 15.0
"""Chosen: the time between two syncs of a HorizontalPodAutoscaler, so that each sees what was turned away since the last."""


class RejectionCounter:
    """Counts the requests of one stage that were rejected, shed, refused by a full queue, or timed out: ``total`` so far."""

    def __init__(self) -> None:
        self.total = 0
        self._at_s: deque[float] = deque()

    def add(self, now_s: float) -> None:
        """Count a request."""
        self.total += 1
        self._at_s.append(now_s)
        self.lately(now_s)

    def lately(self, now_s: float) -> int:
        """Return how many were turned away within `LATELY_S` before now."""
        while self._at_s and self._at_s[0] <= now_s - LATELY_S:
            self._at_s.popleft()
        return len(self._at_s)


KEPT = 8
"""Wake-ups remembered. Chosen: a slow image pull counts for a while, and not for ever."""

LEARNT_FROM = 3
"""Wake-ups seen before they bound the wait. Chosen: a replica that was lost and not scaled to zero may be half started
when the first request comes; one such short time must not refuse requests."""

HOLD_FACTOR = 2.0
"""Chosen: starts vary with image caches and nodes. A wait that is too long costs only requests that are lost anyway, one
that is too short loses requests that would have been served."""


class WakeTimes:
    """The wake-ups of one router; ``max_s`` is the longest wait that is configured, simulated seconds > 0."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._took_s: deque[float] = deque(maxlen=KEPT)
        self._begun_s: float | None = None
        self._was_served = False

    @property
    def slowest_s(self) -> float | None:
        """The slowest remembered wake-up, simulated seconds; None: too few were seen."""
        return max(self._took_s) if len(self._took_s) >= LEARNT_FROM else None

    @property
    def hold_s(self) -> float:
        """How long a request waits for a worker, simulated seconds: the configured bound until enough is learnt."""
        slowest_s = self.slowest_s
        return self._max_s if slowest_s is None else min(self._max_s, HOLD_FACTOR * slowest_s)

    def asked(self, now_s: float) -> None:
        """Record a request that finds no worker of any stage.

        Before workers have served once they may have begun to start long ago: that teaches nothing.
        """
        if self._begun_s is None and self._was_served:
            self._begun_s = now_s

    def served(self, now_s: float) -> None:
        """Record that every stage has a worker."""
        self._was_served = True
        if self._begun_s is not None:
            self._took_s.append(now_s - self._begun_s)
            self._begun_s = None

    def left_s(self, now_s: float) -> float | None:
        """Return how long workers are expected to take still, simulated seconds; None: none is being waited for.

        A wake-up that already takes longer than any remembered one, or than nothing, is expected to take as long again.
        """
        if self._begun_s is None:
            return None
        past_s, slowest_s = now_s - self._begun_s, self.slowest_s
        return slowest_s - past_s if slowest_s is not None and past_s < slowest_s else past_s

    def least_left_s(self, now_s: float) -> float:
        """Return the least time that workers take still, as the fastest remembered wake-up did; 0: any may be next."""
        if self._begun_s is None or len(self._took_s) < LEARNT_FROM:
            return 0.0
        return max(0.0, min(self._took_s) - (now_s - self._begun_s))
