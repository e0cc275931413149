"""Counters of the request path; all durations are in simulated seconds. `penstock.router.series` describes each metric.

prometheus_client's counters lock on every increment, and the relay observes tens of thousands of gaps per second, so these
are plain numbers, which are converted to text when they are scraped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from penstock.core.clock import LagTracker
from penstock.core.histogram import (
    ESTIMATE_RATIO_BOUNDS,
    REQUEST_BOUNDS_S,
    ROUTER_ITL_BOUNDS_S,
    ROUTER_TTFT_BOUNDS_S,
    BucketCounts,
)


@dataclass(slots=True, eq=False)
class RouterMetrics:
    """Cumulative counters of the request path, since the router started.

    Attributes:
        arrivals: Number of completion requests that arrived.
        arrived_tokens: Number of their prompt tokens, as estimated at arrival.
        refused: Number of arrivals rejected with 429 or 503 before they were sent to a worker.
        queue_timeouts: Number of arrivals that waited longer than the queue's limit.
        completed: Number of arrivals answered completely.
        completed_tokens: Number of output tokens of the completely answered arrivals.
        prompt_tokens: Number of prompt tokens of answered requests.
        generation_tokens: Number of tokens sent to clients.
        cached_tokens: Number of prompt tokens that prefill found in its cache.
        requests: Number of responses by (endpoint, status code); status 499 if the client disconnected first.
        errors: Number of failed requests by reason, from a fixed set of values.
        retries: Number of retries by the reason of the preceding failure.
        continuations: Number of streams resumed on another worker, by the reason of the preceding failure.
        lost_streams: Number of streams that broke off and could not be resumed, by cause.
        failed_jobs: Number of failures of the jobs of the router's tick, by job.
        picks: Number of requests whose worker was not chosen by this router as the picker, by who chose it: ``other`` for
            another router, ``alone`` if there was no picker.
        kv_releases: Number of releases of unused KV, by outcome.
        kv_transfers: Number of prompts computed for decode, by the outcome of their KV transfer.
        rejections: Number of requests rejected to protect others, by (endpoint, reason); included in ``refused``.
        ttft: Times from arrival to first token; only streams.
        dispatched_ttft: Times, for the same streams, from the dispatch to the worker that computes the prompt (in the last
            try) to first token.
        prompt_estimate: Ratios of the prompt tokens estimated at arrival to those that the worker counted.
        itl: Gaps between tokens; only streams. Tokens of one read share its gap equally.
        e2e: Times from arrival to the last byte; only completely answered requests.
        queue_time: Waits in the first stage's queue, zero waits included.
        lag: Delays of the router's own timer, which show that the event loop was blocked.
    """

    arrivals: int = 0
    arrived_tokens: int = 0
    refused: int = 0
    queue_timeouts: int = 0
    completed: int = 0
    completed_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    continuations: Counter[str] = field(default_factory=Counter)
    lost_streams: Counter[str] = field(default_factory=Counter)
    failed_jobs: Counter[str] = field(default_factory=Counter)
    picks: Counter[str] = field(default_factory=Counter)
    kv_releases: Counter[str] = field(default_factory=Counter)
    kv_transfers: Counter[str] = field(default_factory=Counter)
    rejections: Counter[tuple[str, str]] = field(default_factory=Counter)
    ttft: BucketCounts = field(default_factory=partial(BucketCounts, ROUTER_TTFT_BOUNDS_S))
    dispatched_ttft: BucketCounts = field(default_factory=partial(BucketCounts, ROUTER_TTFT_BOUNDS_S))
    prompt_estimate: BucketCounts = field(default_factory=partial(BucketCounts, ESTIMATE_RATIO_BOUNDS))
    itl: BucketCounts = field(default_factory=partial(BucketCounts, ROUTER_ITL_BOUNDS_S))
    e2e: BucketCounts = field(default_factory=partial(BucketCounts, REQUEST_BOUNDS_S))
    queue_time: BucketCounts = field(default_factory=partial(BucketCounts, REQUEST_BOUNDS_S))
    lag: LagTracker = field(default_factory=LagTracker)
