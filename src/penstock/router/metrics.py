"""What the request path counts; all durations are simulated seconds.

prometheus_client's counters lock on every increment, and the relay observes tens of thousands of gaps a
second, so these are plain numbers, turned into text by `metrics_page` when scraped.
"""

from __future__ import annotations

from collections import Counter

from penstock.core.clock import LagTracker
from penstock.core.histogram import (
    REQUEST_BOUNDS_S,
    ROUTER_ITL_BOUNDS_S,
    ROUTER_TTFT_BOUNDS_S,
    BucketCounts,
)


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
