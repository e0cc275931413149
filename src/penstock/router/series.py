"""The router's metrics: one table of names, help texts, types and labels; `metrics_page` fills it. Names contain their units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from penstock.core import metric_names as names
from penstock.router.core.waiting import RECENT_S


class RouterSeries(NamedTuple):
    """Description of one metric on the metrics page.

    Attributes:
        family: Prometheus type of the metric.
        text: Help text.
        labels: Names of its labels.
    """

    family: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    text: str
    labels: tuple[str, ...]


def _gauge(text: str, *labels: str) -> RouterSeries:
    return RouterSeries(GaugeMetricFamily, text, labels)


def _counter(text: str, *labels: str) -> RouterSeries:
    return RouterSeries(CounterMetricFamily, text, labels)


def _histogram(text: str, *labels: str) -> RouterSeries:
    return RouterSeries(HistogramMetricFamily, text, labels)


SERIES: Final[Mapping[str, RouterSeries]] = {
    names.ROUTER_QUEUE_REQUESTS: _gauge("Requests waiting for a prefill worker.", "model_name"),
    names.ROUTER_QUEUE_TOKENS: _gauge("Prompt tokens waiting for a prefill worker.", "model_name"),
    names.ROUTER_QUEUE_UNCACHED_TOKENS: _gauge(
        "Prompt tokens waiting for a prefill worker, without those expected in a worker's cache.",
        "model_name",
    ),
    names.ROUTER_QUEUE_OLDEST: _gauge(
        "Longest wait so far in the prefill queue; simulated seconds.", "model_name"
    ),
    names.ROUTER_DECODE_QUEUE_REQUESTS: _gauge(
        "Requests waiting for a decode worker, while no circuit lets them pass.", "model_name"
    ),
    names.ROUTER_UNSERVED: _gauge(
        f"Requests that wait for a worker of the role, and those rejected in the last {RECENT_S:g} s.",
        "model_name",
        "role",
    ),
    names.ROUTER_TURNED_AWAY: _counter(
        "Requests rejected, shed, refused by a full queue or timed out for lack of workers of the role.",
        "model_name",
        "role",
    ),
    names.ROUTER_DEFLECTED_PREFILLS: _counter(
        "Prompts that decode workers computed because all prefill workers were behind.", "model_name"
    ),
    names.ROUTER_ARRIVALS: _counter("Completion requests that arrived, refused ones included.", "model_name"),
    names.ROUTER_ARRIVED_TOKENS: _counter("Prompt tokens of the arrivals.", "model_name"),
    names.ROUTER_REFUSED: _counter("Arrivals refused with 429 or 503 before any worker.", "model_name"),
    names.ROUTER_QUEUE_TIMEOUTS: _counter("Arrivals that left the queue at its limit.", "model_name"),
    names.ROUTER_COMPLETED: _counter("Arrivals answered in full.", "model_name"),
    names.ROUTER_COMPLETED_TOKENS: _counter("Output tokens of the arrivals answered in full.", "model_name"),
    names.ROUTER_ROUTED_TOKENS: _counter("Prompt tokens of admitted requests.", "model_name"),
    names.ROUTER_ROUTED_UNCACHED_TOKENS: _counter(
        "Prompt tokens of admitted requests, without those expected in a worker's cache.", "model_name"
    ),
    names.ROUTER_COMPUTED_TOKENS: _counter(
        "Expected uncached prompt tokens of the requests whose prompts were computed.", "model_name"
    ),
    names.ROUTER_PROMPT_TOKENS: _counter("Prompt tokens of answered requests.", "model_name"),
    names.ROUTER_GENERATION_TOKENS: _counter("Tokens sent to clients.", "model_name"),
    names.ROUTER_CACHED_TOKENS: _counter("Prompt tokens that prefill found in its cache.", "model_name"),
    names.ROUTER_READY_WORKERS: _gauge("Workers that requests are sent to, by role.", "role"),
    names.ROUTER_WORKER_READY: _gauge("1 if requests are sent there.", "worker", "role"),
    names.ROUTER_WORKER_INFLIGHT_REQUESTS: _gauge("Requests under way.", "worker", "role"),
    names.ROUTER_WORKER_INFLIGHT_TOKENS: _gauge("Tokens under way.", "worker", "role"),
    names.ROUTER_WORKER_KV_USAGE: _gauge(
        "KV blocks in use as last scraped, 0-1; absent if unknown.", "worker", "role"
    ),
    names.ROUTER_WORKER_WAITING: _gauge(
        "Requests that wait in the worker for room, as last scraped; absent if unknown.", "worker", "role"
    ),
    names.ROUTER_WORKER_PENDING_TOKENS: _gauge(
        "Uncached prompt tokens dispatched to the worker and not computed yet.", "worker", "role"
    ),
    names.ROUTER_WORKER_METRICS_AGE: _gauge(
        "Age of the worker's metrics; simulated seconds.", "worker", "role"
    ),
    # Names and meanings of NVIDIA Dynamo's document "Request Rejection", under Penstock's prefix.
    names.ROUTER_WORKER_ACTIVE_DECODE_BLOCKS: _gauge("KV blocks in use, as last scraped.", "worker", "role"),
    names.ROUTER_WORKER_KV_TOTAL_BLOCKS: _gauge(
        "KV blocks of the worker, all ranks together.", "worker", "role"
    ),
    names.ROUTER_WORKER_ACTIVE_PREFILL_TOKENS: _gauge(
        "Uncached prompt tokens that wait for the worker or are being computed there.", "worker", "role"
    ),
    names.ROUTER_WORKER_FAILURES: _counter(
        "Failed requests of the worker, those that failed on others too included.", "worker", "role"
    ),
    names.ROUTER_WORKER_EJECTIONS: _counter("Times that the worker's circuit has opened.", "worker", "role"),
    names.ROUTER_WORKER_PREFIX_BLOCKS: _gauge("Prefix blocks expected in the worker's cache.", "worker"),
    names.ROUTER_REQUESTS: _counter(
        "Answers by endpoint and status code; 499: the client left.", "endpoint", "code"
    ),
    names.ROUTER_ERRORS: _counter("Requests that failed, by reason.", "reason"),
    names.ROUTER_RETRIES: _counter("Retries, by the reason of the failure before.", "reason"),
    names.ROUTER_CONTINUATIONS: _counter(
        "Broken streams that continued on another worker, by the reason of the failure before.", "reason"
    ),
    names.ROUTER_LOST_STREAMS: _counter(
        "Broken streams that ended in an error, by why: request or response, which cannot be continued; worker_refusal; or the limit, "
        "continuations, worker_wait, request_time or query_of_death.",
        "why",
    ),
    names.ROUTER_FAILED_JOBS: _counter(
        "Failures of the jobs that a router does ten times a second, by job; the others run all the same.",
        "job",
    ),
    names.ROUTER_PICKS: _counter(
        "Assignments to workers that another router has picked, and requests that this one assigned alone for lack of a picker.",
        "by",
    ),
    names.ROUTER_KV_RELEASES: _counter(
        "Prompts prefilled for requests that no decode worker was asked to serve, by whether their KV was released.",
        "outcome",
    ),
    names.ROUTER_KV_TRANSFERS: _counter(
        "Prompts prefilled for decode, by what became of their KV: done; none, prefill kept none; lost, not in time.",
        "result",
    ),
    names.ROUTER_REJECTIONS: _counter(
        "Requests rejected with 503 to protect those under way.", "model", "endpoint", "reason"
    ),
    names.ROUTER_TTFT: _histogram("Arrival to first token of streams; simulated seconds.", "model_name"),
    names.ROUTER_DISPATCHED_TTFT: _histogram(
        "Dispatch to the worker that computes the prompt, by the last try, to first token of streams; simulated seconds.",
        "model_name",
    ),
    names.ROUTER_PROMPT_ESTIMATE_RATIO: _histogram(
        "Prompt tokens as estimated at arrival, divided by those that the worker counted.", "model_name"
    ),
    names.ROUTER_ITL: _histogram("Gaps between tokens of streams; simulated seconds.", "model_name"),
    names.ROUTER_E2E: _histogram("Arrival to last byte; simulated seconds.", "model_name"),
    names.ROUTER_QUEUE_TIME: _histogram("Waits for the first stage; simulated seconds.", "model_name"),
    names.ROUTER_WAKE_HOLD: _gauge(
        "How long a request waits for workers that are started for it; simulated seconds."
    ),
    names.ROUTER_WAKE_SLOWEST: _gauge(
        "The slowest of the last starts from no worker at all; simulated seconds; absent until learnt."
    ),
    names.ROUTER_KV_EVENT_BATCHES: _counter("Batches of workers' KV events applied."),
    names.ROUTER_KV_EVENT_GAPS: _counter("Times that a worker's cache was forgotten for lost batches."),
    names.ROUTER_KV_EVENTS_MALFORMED: _counter("KV events and messages not understood."),
    names.ROUTER_IS_PICKER: _gauge("1 if this router picks the workers for all routers of the graph."),
    names.ROUTER_DISCOVERY_CURRENT: _gauge(
        "1 if the view of the workers is up to date, 0 if it is the last good one."
    ),
    names.SCHEDULE_LAG_P99: _gauge("How late the router's timer runs, p99; simulated seconds."),
    names.SCHEDULE_LAG_SAMPLES: _counter("Timer ticks measured for lateness."),
    names.ROUTER_TIER_ARRIVALS: _counter("Requests that arrived.", "tier"),
    names.ROUTER_TIER_REJECTED: _counter(
        "Arrivals for which there was no room, no worker or no time.", "tier"
    ),
    names.ROUTER_TIER_SHED: _counter("Arrivals refused so that higher tiers keep their SLO.", "tier"),
    names.ROUTER_TIER_DOWNGRADED: _counter(
        "Requests that asked for this tier without a key that allows it.", "tier"
    ),
    names.ROUTER_TIER_WAITING: _gauge("Requests that wait for the first stage.", "tier"),
    names.ROUTER_TIER_COMPLIANCE: _gauge(
        "Share of the requests of the window that kept all targets of their tier, 0-1; absent if none ended.",
        "tier",
    ),
    names.ROUTER_TIER_SHARE_DEVIATION: _gauge(
        "Part of the prompt tokens computed in the last minute that was the tier's, less its share, -1 to 1; absent if none was.",
        "tier",
    ),
    names.ROUTER_TIER_SHED_FRACTION: _gauge("Share of the arrivals that is shed now, 0-1.", "tier"),
    names.ROUTER_TIER_TTFT: _histogram("Arrival to first token of streams; simulated seconds.", "tier"),
    names.ROUTER_TIER_E2E: _histogram("Arrival to last byte; simulated seconds.", "tier"),
    names.ROUTER_TIER_QUEUE_TIME: _histogram("Waits for the first stage; simulated seconds.", "tier"),
}
"""All metrics of the router, by name."""
