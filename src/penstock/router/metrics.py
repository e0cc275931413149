"""What the request path counts; all durations are simulated seconds. `metrics_page` says what each is.

prometheus_client's counters lock on every increment, and the relay observes tens of thousands of gaps a
second, so these are plain numbers, turned into text when scraped.
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
    """What the request path counts.

    Attributes:
        requests: Answers by (endpoint, status code); 499 when the client left first.
        errors: Failures by reason (see ``proxy.failures``).
        retries: By the reason of the failure before.
        continuations: Of streams at another worker, likewise.
        lost_streams: That broke off and continued nowhere, by why.
        failed_jobs: Of the router's tick, by name.
        rejections: Requests turned away to protect others, by (endpoint, reason); they are among the refused.
        ttft: Streams only, as are ``itl``, in which tokens of one read share its gap.
        dispatched_ttft: Of the same streams, from the dispatch to the worker that computes the prompt, by the last try.
        prompt_estimate: Prompt tokens as they were estimated at arrival, divided by those that the worker counted.
        e2e: Answered requests only.
        queue_time: Waits for the first stage, zero ones included.
        lag: Lateness of the router's own timer.
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
