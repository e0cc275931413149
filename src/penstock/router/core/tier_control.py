"""The tiers of one router: what admission sheds, and what each tier got; the live and the virtual router's. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.api import SheddingConfig, Tier
from penstock.core.histogram import REQUEST_BOUNDS_S, ROUTER_TTFT_BOUNDS_S, BucketCounts
from penstock.router.policy.queued_request import QueuedRequest
from penstock.router.policy.slo_monitor import EVALUATE_S, EndedRequest, SloMonitor
from penstock.router.policy.tiers import TierSettings


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

    __slots__ = ("arrivals", "e2e", "queue_time", "rejected", "shed", "ttft")

    def __init__(self) -> None:
        """Begin at zero."""
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

    __slots__ = ("_evaluated_s", "counts", "monitor", "settings")

    def __init__(self, settings: TierSettings, shedding: SheddingConfig) -> None:
        """Begin with nothing measured."""
        self.settings = settings
        self.monitor = SloMonitor(settings, shedding)
        self.counts = {tier: TierCounts() for tier in Tier}
        self._evaluated_s = float("-inf")

    def configure(self, settings: TierSettings, shedding: SheddingConfig) -> None:
        """Take other settings from now on; what was measured stays."""
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
        """Take note of a first token."""
        self.counts[tier].ttft.observe(ttft_s)
        self.monitor.first_token(tier, ttft_s, now_s)

    def ended(self, tier: Tier, request: EndedRequest, now_s: float) -> None:
        """Take note of the end of a request that was dispatched."""
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
