"""How a dispatch queue behaves, whatever the policy. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from penstock.api import QueueOrder, Tier
from penstock.router.policy.tiers import TierSettings

CACHE_BLOCKS = 8192
"""Keys remembered per worker where nothing else is said. Chosen: 4M tokens of 512-token blocks, or 500,000 of
prompts so short that their first block's sub-block keys are all they have; 90 KiB of memory where prompts bring 24 new
keys, at most 512."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """How queues behave, whatever the policy.

    Attributes:
        slot_tokens: Uncached tokens dispatched to one worker at a time; None is unbounded. An idle worker always
            takes one request, however long.
        slot_requests: Requests dispatched to one worker at a time; None is unbounded.
        worker_requests: Requests that a worker has room for, answers under way included; None is unbounded.
        max_requests: Most waiting requests; None is unbounded.
        max_wait_s: Longest wait, simulated seconds; None is unbounded.
        max_wake_s: Longest wait while a stage has no worker that may be chosen, but never below `max_wait_s`, which counts
            from when all have one; less once `WakeTimes` knows how long workers take. Simulated seconds; None:
            `max_wait_s` alone, whatever the workers.
        order: Who is next in a worker's queue; the central queue is first in, first out.
        cache_blocks: Prefix blocks that one worker's cache holds.
        slo_s: TTFT that rebalancing and the deadline-aware order aim for, simulated seconds.
        tokens_per_s: Prefill throughput assumed until one is measured; None: none.
        tiers: How tiers share; None: requests are ordered as if all were of one tier.
    """

    slot_tokens: int | None = None
    slot_requests: int | None = None
    worker_requests: int | None = None
    max_requests: int | None = None
    max_wait_s: float | None = None
    max_wake_s: float | None = None
    order: QueueOrder = QueueOrder.ARRIVAL
    cache_blocks: int = CACHE_BLOCKS
    slo_s: float = 5.0
    tokens_per_s: float | None = None
    tiers: TierSettings | None = None

    @property
    def has_slots(self) -> bool:
        """Whether a worker may have no room for another request."""
        bounds = (self.slot_tokens, self.slot_requests, self.worker_requests)
        return any(bound is not None for bound in bounds)

    def ttft_slo_s(self, tier: Tier) -> float | None:
        """Return the TTFT that the deadline-aware order aims for; None: any is in time."""
        return self.slo_s if self.tiers is None else self.tiers.target(tier).ttft_s

    def longest_wait_s(self, tier: Tier) -> float:
        """Return how long a request may wait for workers that serve.

        After its tier's end-to-end target waiting on is of no use.
        """
        return min(self._most_s, self._useful_s(tier))

    def deadline_s(self, tier: Tier, since_s: float, *, served_s: float = -inf, hold_s: float = inf) -> float:
        """Return until when a request may wait, simulated seconds.

        Args:
            tier: Of the request.
            since_s: When it began to wait.
            served_s: Since when every stage has had a worker that may be chosen; inf: one has none now.
            hold_s: Longest wait for workers that is worth it, as far as `max_wake_s` allows; see `WakeTimes`.
        """
        if self.max_wake_s is None:
            own_s = since_s + self._most_s
        elif served_s == inf:
            own_s = since_s + max(min(hold_s, self.max_wake_s), self._most_s)
        else:
            own_s = max(since_s, served_s) + self._most_s
        return min(own_s, since_s + self._useful_s(tier))

    @property
    def _most_s(self) -> float:
        return inf if self.max_wait_s is None else self.max_wait_s

    def _useful_s(self, tier: Tier) -> float:
        e2e_s = None if self.tiers is None else self.tiers.target(tier).e2e_s
        return inf if e2e_s is None else e2e_s
