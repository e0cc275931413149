"""What the request path counts, and what came in the last minute; all durations are simulated seconds.

prometheus_client's counters lock on every increment, and the relay observes tens of thousands of gaps a
second, so these are plain numbers, turned into text by `metrics_page` when scraped.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.clock import LagTracker
from penstock.core.histogram import (
    REQUEST_BOUNDS_S,
    ROUTER_ITL_BOUNDS_S,
    ROUTER_TTFT_BOUNDS_S,
    BucketCounts,
    quantile,
)

WINDOW_S: Final = 60.0
"""Simulated seconds looked back. Chosen: an overload that began half a minute ago shows, one of an hour ago does not."""

_STEP_S: Final = 5.0
"""Simulated seconds between two marks. Chosen: a dozen marks for a window."""


class RouterMetrics:
    """What the request path counts.

    Attributes:
        arrivals: Requests with a readable body that reached the frontend, whatever became of them.
        arrived_tokens: Their prompt tokens, estimated or counted.
        refused: Of those, the ones that were refused without having been given to a worker (429, 503).
        queue_timeouts: Of those, the ones that left the queue at its time limit.
        completed: Of those, the ones that were answered in full.
        completed_tokens: Output tokens of the completed.
        requests: Answers by (endpoint, status code); 499 when the client left first.
        errors: Failures by reason (see ``proxy.failures``).
        retries: Retries by reason.
        picks: Requests of several routers that this one did not pick for as the picker: another one did, or this one
            did alone because none answered.
        kv_releases: Prompts given back that no decode worker was asked for, by outcome.
        rejections: Requests turned away to protect others, by (endpoint, reason); they are among the refused.
        prompt_tokens: Prompt tokens of answered requests.
        generation_tokens: Tokens sent to clients.
        cached_tokens: Prompt tokens that prefill found in its cache.
        ttft: Arrival to first token, streams only.
        itl: Gaps between tokens, streams only; tokens of one read share its gap.
        e2e: Arrival to last byte, answered requests only.
        queue_time: Waits for the first stage, zero ones included.
        lag: Lateness of the router's own timer.
    """

    def __init__(self) -> None:
        self.arrivals = 0
        self.arrived_tokens = 0
        self.refused = 0
        self.queue_timeouts = 0
        self.completed = 0
        self.completed_tokens = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        self.errors: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.picks: Counter[str] = Counter()
        self.kv_releases: Counter[str] = Counter()
        self.rejections: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.ttft = BucketCounts(ROUTER_TTFT_BOUNDS_S)
        self.itl = BucketCounts(ROUTER_ITL_BOUNDS_S)
        self.e2e = BucketCounts(REQUEST_BOUNDS_S)
        self.queue_time = BucketCounts(REQUEST_BOUNDS_S)
        self.lag = LagTracker()


@dataclass(frozen=True, slots=True)
class _Mark:
    """The counters at one moment, simulated seconds; ``ttft`` cumulative by bound."""

    at_s: float
    arrivals: int
    rejected: int
    ttft: tuple[int, ...]


class RecentTraffic:
    """Compares a router's counters with what they were a minute ago."""

    def __init__(self, metrics: RouterMetrics, now_s: float, *, ttft_slo_s: float) -> None:
        """Begin to compare; before a minute has passed, with the counters at ``now_s``.

        Args:
            metrics: The counters.
            now_s: Simulated seconds.
            ttft_slo_s: TTFT that the graph aims for, simulated seconds; shown beside what was measured.
        """
        self._metrics = metrics
        self._ttft_slo_s = ttft_slo_s
        self._marks = deque([self._mark(now_s)])

    def tick(self, now_s: float) -> None:
        """Mark the counters from time to time; called again and again."""
        if now_s - self._marks[-1].at_s >= _STEP_S:
            self._marks.append(self._mark(now_s))
            while self._marks[1].at_s <= now_s - WINDOW_S:
                self._marks.popleft()

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Return ``{"period_s", "arrivals", "rejected", "ttft_p50_s", "ttft_p99_s", "ttft_slo_s"}``.

        Only streams have a TTFT; without any it is null.
        """
        then, now = self._marks[0], self._mark(now_s)
        counts = (float(after - before) for before, after in zip(then.ttft, now.ttft, strict=True))
        buckets = tuple(zip((*self._metrics.ttft.bounds, float("inf")), counts, strict=True))
        return {
            "period_s": now.at_s - then.at_s,
            "arrivals": now.arrivals - then.arrivals,
            "rejected": now.rejected - then.rejected,
            "ttft_p50_s": quantile(buckets, 0.5),
            "ttft_p99_s": quantile(buckets, 0.99),
            "ttft_slo_s": self._ttft_slo_s,
        }

    def _mark(self, now_s: float) -> _Mark:
        metrics = self._metrics
        rejected = metrics.refused + metrics.queue_timeouts
        return _Mark(now_s, metrics.arrivals, rejected, tuple(metrics.ttft.cumulative()))
