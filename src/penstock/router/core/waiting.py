"""Queue limits, the startup times of workers that were scaled to zero, and a count of recently rejected requests. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from penstock.api import QueueOrder, Tier, TiersConfig
from penstock.router.core.limits import MAX_WORKER_WAIT_S, QUEUE_WAIT, TIER_TARGET, Limit
from penstock.router.policy.tiers import slo_of

_RESERVED_SLOTS = 1 / 8
"""Fraction of a worker's request limit that is reserved for system and premium requests. Chosen: if requests occupy 96 slots for 10
s each, one becomes free every 0.1 s; yet without reserved slots, premium's p99 is 0.5 to 1.2 s at twice the load, while it is 0.2 s
with 12 reserved slots and without a limit."""


class Headroom(IntEnum):
    """Which requests a worker can be sent now.

    Attributes:
        NONE: No request.
        URGENT: Only requests of the system and premium tiers.
        ANY: Every request.
    """

    NONE = 0
    URGENT = 1
    """Only system and premium requests: in the worker's engine they overtake requests that they would have to wait for in the
    queue."""
    ANY = 2


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Settings of a queue, independent of the routing policy.

    Attributes:
        slot_tokens: Maximum uncached prompt tokens dispatched to one worker at a time; None is unlimited. With tiers,
            system and premium requests may exceed it. An idle worker always takes one request, however long.
        slot_requests: Maximum requests dispatched to one worker whose prompts are not computed yet; None is unlimited.
        worker_requests: Maximum requests in a worker, including those that decode; None is unlimited.
        max_requests: Maximum number of waiting requests; None is unlimited.
        max_wait_s: Maximum wait in simulated seconds; None is unlimited.
        max_wake_s: Maximum wait, in simulated seconds, while a stage has no worker that can be routed to, for example after
            scale to zero. The wait is never limited to less than `max_wait_s`, which counts from the time at which all
            stages have a worker. The limit is shortened when the startup times of workers are known (`WakeTimes`). None
            applies `max_wait_s` alone, whether there are workers or not.
        wait_limit: Limit that `max_wait_s` and `max_wake_s` configure; its field `for_interrupted` determines whether the two apply
            to interrupted streams.
        resume_wait_s: Maximum wait of an interrupted stream to which `wait_limit` does not apply, in simulated seconds.
        order: Order of the requests in a worker's own queue; the central queue is first in, first out.
        slo_s: TTFT target, in simulated seconds. Rebalancing moves requests that would miss it, and the deadline-aware
            order puts them last.
        tiers: Shares and targets of the tiers; None treats all requests as one tier.
    """

    slot_tokens: int | None = None
    slot_requests: int | None = None
    worker_requests: int | None = None
    max_requests: int | None = None
    max_wait_s: float | None = None
    max_wake_s: float | None = None
    wait_limit: Limit = QUEUE_WAIT
    resume_wait_s: float = MAX_WORKER_WAIT_S
    order: QueueOrder = QueueOrder.ARRIVAL
    slo_s: float = 5.0
    tiers: TiersConfig | None = None

    def headroom(self, running: int, tokens: int, inflight: int) -> Headroom:
        """Return which requests can be sent to a worker now without exceeding the limits on its work.

        Args:
            running: Number of requests dispatched to the worker whose prompts are not computed yet.
            tokens: Uncached prompt tokens of those requests.
            inflight: Number of requests in the worker, including those that decode.
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
        """Return a tier's TTFT target by which the deadline-aware order sorts, in simulated seconds; None if the tier has no target."""
        return self.slo_s if self.tiers is None else slo_of(self.tiers, tier).ttft_seconds

    def longest_wait_s(self, tier: Tier, *, is_interrupted: bool = False) -> float:
        """Return the maximum wait while workers serve, in simulated seconds; inf if nothing limits it.

        The limit is that of an interrupted stream that is to be resumed (``is_interrupted=True``) or of a new request. A new request
        does not wait longer than its tier's end-to-end target, because its response would be too late anyway.
        """
        if not self.wait_limit.applies(is_interrupted=is_interrupted):
            return self.resume_wait_s
        return min(self._max_wait_s, self._useful_s(tier, is_interrupted=is_interrupted))

    def deadline_s(
        self,
        tier: Tier,
        since_s: float,
        *,
        is_interrupted: bool = False,
        served_s: float = -inf,
        max_startup_wait_s: float = inf,
    ) -> float:
        """Return the time until which a request may wait, in simulated seconds on the caller's clock.

        Args:
            tier: Tier of the request.
            since_s: Time at which the request began to wait.
            is_interrupted: Whether the request resumes an interrupted stream.
            served_s: Time since which every stage has had a worker that can be routed to; inf if a stage has none now, so
                that the limit for starting workers applies.
            max_startup_wait_s: Maximum wait for workers that are starting, in simulated seconds, derived from measured
                startup times; inf applies the configured `max_wake_s`.
        """
        if not self.wait_limit.applies(is_interrupted=is_interrupted):
            return since_s + self.resume_wait_s
        if self.max_wake_s is None:
            own_s = since_s + self._max_wait_s
        elif served_s == inf:
            own_s = since_s + max(min(max_startup_wait_s, self.max_wake_s), self._max_wait_s)
        else:
            own_s = max(since_s, served_s) + self._max_wait_s
        return min(own_s, since_s + self._useful_s(tier, is_interrupted=is_interrupted))

    @property
    def _max_wait_s(self) -> float:
        return inf if self.max_wait_s is None else self.max_wait_s

    def _useful_s(self, tier: Tier, *, is_interrupted: bool) -> float:
        if not TIER_TARGET.applies(is_interrupted=is_interrupted):
            return inf
        e2e_s = None if self.tiers is None else slo_of(self.tiers, tier).end_to_end_seconds
        return inf if e2e_s is None else e2e_s


RECENT_S = 15.0
"""Length of the window for recently rejected requests, in simulated seconds. Chosen: the time between two syncs of a
HorizontalPodAutoscaler, so that each sync sees the rejections since the last one."""


class RejectionCounter:
    """Counts the rejected requests of one stage: shed, refused by a full queue, without a worker, or timed out in the queue.

    Attributes:
        total: Number of rejected requests since the counter was created.
    """

    def __init__(self) -> None:
        self.total = 0
        self._at_s: deque[float] = deque()

    def add(self, now_s: float) -> None:
        """Count one rejected request at ``now_s``, in simulated seconds."""
        self.total += 1
        self._at_s.append(now_s)
        self.recent(now_s)

    def recent(self, now_s: float) -> int:
        """Return the number of requests rejected within the last 15 simulated seconds (`RECENT_S`)."""
        while self._at_s and self._at_s[0] <= now_s - RECENT_S:
            self._at_s.popleft()
        return len(self._at_s)


MAX_WAKE_SAMPLES = 8
"""Number of wake-ups (scale-ups from zero) whose durations are remembered. Chosen: a slow image pull counts for several wake-ups,
and not for ever."""

MIN_WAKE_SAMPLES = 3
"""Number of observed wake-ups from which on they limit the wait. Chosen: a replica that was lost, and not scaled to zero, may have
half started when the first request arrives; one such short duration must not cause rejections."""

STARTUP_WAIT_FACTOR = 2.0
"""Factor on the slowest observed wake-up that gives the maximum wait. Chosen: startup times vary with image caches and nodes. A
wait that is too long costs only requests that are lost anyway; one that is too short loses requests that would have been served."""


class WakeTimes:
    """Measures how long workers take to become ready when a request arrives and none is available (a wake-up).

    From this it calculates how long requests may wait for starting workers, and when such workers are expected to be ready.
    ``max_s`` is the configured maximum wait (`QueueSettings.max_wake_s`), in simulated seconds, > 0.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._took_s: deque[float] = deque(maxlen=MAX_WAKE_SAMPLES)
        self._wake_started_s: float | None = None
        self._was_served = False

    @property
    def slowest_s(self) -> float | None:
        """Duration of the slowest of the last 8 observed startups of workers for a waiting request, in simulated seconds.

        None until 3 startups (`MIN_WAKE_SAMPLES`) were observed.
        """
        return max(self._took_s) if len(self._took_s) >= MIN_WAKE_SAMPLES else None

    @property
    def max_startup_wait_s(self) -> float:
        """Maximum time that a request waits for starting workers, in simulated seconds.

        It is twice `slowest_s` (`STARTUP_WAIT_FACTOR`), at most the configured maximum. While `slowest_s` is None, it is
        the configured maximum.
        """
        slowest_s = self.slowest_s
        return self._max_s if slowest_s is None else min(self._max_s, STARTUP_WAIT_FACTOR * slowest_s)

    def requested(self, now_s: float) -> None:
        """Record that a request has arrived while a stage has no worker; this starts the measurement of a startup (wake-up).

        Does nothing if a wake-up is already being measured, or if workers have not been available since the router
        started: they may then have started long ago, so that the duration would be too short.
        """
        if self._wake_started_s is None and self._was_served:
            self._wake_started_s = now_s

    def served(self, now_s: float) -> None:
        """Record that every stage has a worker; if a startup (wake-up) is being measured, its duration is stored.

        ``now_s`` is the current time in simulated seconds.
        """
        self._was_served = True
        if self._wake_started_s is not None:
            self._took_s.append(now_s - self._wake_started_s)
            self._wake_started_s = None

    def remaining_s(self, now_s: float) -> float | None:
        """Return the expected simulated seconds until workers are ready for waiting requests; None if no startup is under way.

        They are the duration of the slowest of the last 8 observed startups (wake-ups), minus the time that the present one
        has taken so far. If that is longer already, or if fewer than 3 were observed, the present one is expected to take as
        long again as it has taken so far.
        """
        if self._wake_started_s is None:
            return None
        past_s, slowest_s = now_s - self._wake_started_s, self.slowest_s
        return slowest_s - past_s if slowest_s is not None and past_s < slowest_s else past_s

    def min_remaining_s(self, now_s: float) -> float:
        """Return the minimum simulated seconds until workers are ready, assuming the fastest of the last 8 observed startups.

        A startup (wake-up) is the time from a request without a worker until every stage has a worker. Returns 0 if no
        startup (wake-up) is under way, if fewer than 3 were observed, or if the present startup already takes longer than the
        fastest one.
        """
        if self._wake_started_s is None or len(self._took_s) < MIN_WAKE_SAMPLES:
            return 0.0
        return max(0.0, min(self._took_s) - (now_s - self._wake_started_s))
