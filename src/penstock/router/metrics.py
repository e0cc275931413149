"""The router's own numbers: plain counters bumped on the request path, turned into text only when scraped.

prometheus_client's counters lock on every increment, and the relay observes tens of thousands of gaps a
second, so one custom collector exports everything. All durations are simulated seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from penstock.api import Role
from penstock.core import metric_names as names
from penstock.core.histogram import (
    REQUEST_BOUNDS_S,
    ROUTER_ITL_BOUNDS_S,
    ROUTER_TTFT_BOUNDS_S,
    BucketCounts,
)
from penstock.core.lag import LagTracker
from penstock.router.core.turned_away import LATELY_S, TurnedAway
from penstock.router.core.wake import WakeTimes
from penstock.router.core.worker import Worker, WorkerState
from penstock.router.core.worker_pool import WorkerPool
from penstock.router.load_metrics import rejection_family, worker_load_families
from penstock.router.policy.prompt_tokens import PromptTokenCounts


class RouterMetrics:
    """What the request path counts.

    Attributes:
        arrivals: Requests with a readable body that reached the door, whatever became of them.
        arrived_tokens: Their prompt tokens, estimated or counted.
        refused: Of those, the ones that were refused without having been given to a worker (429, 503).
        queue_timeouts: Of those, the ones that left the queue at its time limit.
        completed: Of those, the ones that were answered in full.
        completed_tokens: Output tokens of the completed.
        requests: Answers by (endpoint, status code); 499 when the client left first.
        errors: Failures by reason (see ``proxy.failures``).
        retries: Retries by reason.
        forwarded: Requests that another router decides about, by what became of them: answered there, broken
            off there too late to be decided here, or fell back here.
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
        self.forwarded: Counter[str] = Counter()
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
class QueueGauges:
    """The prefill queue as others are shown it.

    Attributes:
        requests: Waiting requests.
        tokens: Their prompt tokens.
        oldest_s: Longest wait so far, simulated seconds; 0 when nothing waits.
        prompt_tokens: On their way through the first stage.
    """

    requests: int
    tokens: int
    oldest_s: float
    prompt_tokens: PromptTokenCounts


class KvEventCounts(Protocol):
    """What following the workers' KV events counts."""

    batches: int
    gaps: int
    malformed: int

    def blocks(self) -> Mapping[str, int]:
        """Return the prefix blocks that each worker is believed to hold."""


class RouterCollector:
    """Builds the metric families at scrape time."""

    def __init__(
        self,
        metrics: RouterMetrics,
        pool: WorkerPool,
        queue: Callable[[], QueueGauges],
        *,
        active_prefill_tokens: Callable[[Worker], int],
        decode_waiting: Callable[[], int | None],
        discovery_problem: Callable[[], str | None],
        model: str,
        roles: Sequence[Role],
        now_s: Callable[[], float],
        kv_events: KvEventCounts | None = None,
        tiers: Callable[[], Iterator[Metric]] | None = None,
        wake: WakeTimes | None = None,
        turned_away: Mapping[Role, TurnedAway] | None = None,
    ) -> None:
        self._metrics = metrics
        self._pool = pool
        self._queue = queue
        self._active_prefill_tokens = active_prefill_tokens
        self._decode_waiting = decode_waiting
        self._discovery_problem = discovery_problem
        self._model = model
        self._roles = roles
        self._now_s = now_s
        self._kv_events = kv_events
        self._tiers = tiers
        self._wake = wake
        self._turned_away = turned_away or {}

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        queue = self._queue()
        yield from self._queue_families(queue)
        yield from self._door_families(queue.prompt_tokens)
        yield from self._worker_families(queue.prompt_tokens.pending)
        yield from self._request_families()
        if self._wake is not None:
            yield from _wake_families(self._wake)
        if self._kv_events is not None:
            yield from _kv_event_families(self._kv_events)
        if self._tiers is not None:
            yield from self._tiers()
        discovery = GaugeMetricFamily(
            names.ROUTER_DISCOVERY_CURRENT,
            "1 if the view of the workers is up to date, 0 if it is the last good one.",
        )
        discovery.add_metric([], self._discovery_problem() is None)
        yield discovery
        lag_s = self._metrics.lag.p99_s()
        lag = GaugeMetricFamily(
            names.SCHEDULE_LAG_P99, "How late the router's timer runs, p99; simulated seconds."
        )
        if lag_s is not None:
            lag.add_metric([], lag_s)
        yield lag
        yield _counter(
            names.SCHEDULE_LAG_SAMPLES,
            "Timer ticks measured for lateness.",
            [],
            [((), self._metrics.lag.total)],
        )

    def _door_families(self, tokens: PromptTokenCounts) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, total in (
            (
                names.ROUTER_ARRIVALS,
                "Completion requests that arrived, refused ones included.",
                metrics.arrivals,
            ),
            (names.ROUTER_ARRIVED_TOKENS, "Prompt tokens of the arrivals.", metrics.arrived_tokens),
            (names.ROUTER_REFUSED, "Arrivals refused with 429 or 503 before any worker.", metrics.refused),
            (
                names.ROUTER_QUEUE_TIMEOUTS,
                "Arrivals that left the queue at its limit.",
                metrics.queue_timeouts,
            ),
            (names.ROUTER_COMPLETED, "Arrivals answered in full.", metrics.completed),
            (names.ROUTER_COMPLETED_TOKENS, "Output tokens of those.", metrics.completed_tokens),
            (names.ROUTER_ROUTED_TOKENS, "Prompt tokens of admitted requests.", tokens.routed),
            (
                names.ROUTER_ROUTED_UNCACHED_TOKENS,
                "Prompt tokens of admitted requests that no cache was believed to hold.",
                tokens.admitted,
            ),
            (names.ROUTER_COMPUTED_TOKENS, "Those whose prompts were computed.", tokens.computed),
        ):
            yield _counter(name, text, ["model_name"], [((self._model,), total)])

    def _queue_families(self, queue: QueueGauges) -> Iterator[Metric]:
        model = [self._model]
        for name, text, value in (
            (names.ROUTER_QUEUE_REQUESTS, "Requests waiting for a prefill worker.", queue.requests),
            (names.ROUTER_QUEUE_TOKENS, "Prompt tokens waiting for a prefill worker.", queue.tokens),
            (
                names.ROUTER_QUEUE_UNCACHED_TOKENS,
                "Prompt tokens waiting for a prefill worker that no cache is believed to hold.",
                queue.prompt_tokens.waiting,
            ),
            (
                names.ROUTER_QUEUE_OLDEST,
                "Longest wait so far in the prefill queue; simulated seconds.",
                queue.oldest_s,
            ),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric(model, value)
            yield family
        decode_waiting = self._decode_waiting()
        if decode_waiting is not None:
            family = GaugeMetricFamily(
                names.ROUTER_DECODE_QUEUE_REQUESTS,
                "Requests waiting for a decode worker; they wait only while no circuit lets them pass.",
                labels=["model_name"],
            )
            family.add_metric(model, decode_waiting)
            yield family
        yield from self._unserved_families(queue.requests, decode_waiting or 0)

    def _unserved_families(self, entry_waiting: int, decode_waiting: int) -> Iterator[Metric]:
        now_s, labels = self._now_s(), ["model_name", "role"]
        turned_away = CounterMetricFamily(
            names.ROUTER_TURNED_AWAY,
            "Requests rejected, shed, refused by a full queue or timed out for want of workers of the role.",
            labels=labels,
        )
        unserved = GaugeMetricFamily(
            names.ROUTER_UNSERVED,
            f"Requests that wait for a worker of the role, and those turned away in the last {LATELY_S:g} s.",
            labels=labels,
        )
        for role, counts in self._turned_away.items():
            waiting = decode_waiting if role is Role.DECODE else entry_waiting
            turned_away.add_metric([self._model, role.value], counts.total)
            unserved.add_metric([self._model, role.value], waiting + counts.lately(now_s))
        yield turned_away
        yield unserved

    def _worker_families(self, pending_tokens: Mapping[str, int]) -> Iterator[Metric]:
        now_s, labels = self._now_s(), ["worker", "role"]
        ready = GaugeMetricFamily(names.ROUTER_WORKER_READY, "1 if requests are sent there.", labels=labels)
        requests = GaugeMetricFamily(
            names.ROUTER_WORKER_INFLIGHT_REQUESTS, "Requests under way.", labels=labels
        )
        tokens = GaugeMetricFamily(names.ROUTER_WORKER_INFLIGHT_TOKENS, "Tokens under way.", labels=labels)
        usage = GaugeMetricFamily(
            names.ROUTER_WORKER_KV_USAGE,
            "KV blocks in use as last scraped, 0-1; absent if unknown.",
            labels=labels,
        )
        waiting = GaugeMetricFamily(
            names.ROUTER_WORKER_WAITING,
            "Requests that wait in the worker for room, as last scraped; absent if unknown.",
            labels=labels,
        )
        pending = GaugeMetricFamily(
            names.ROUTER_WORKER_PENDING_TOKENS,
            "Uncached prompt tokens given to the worker and not computed yet.",
            labels=labels,
        )
        age = GaugeMetricFamily(
            names.ROUTER_WORKER_METRICS_AGE, "Age of the worker's metrics; simulated seconds.", labels=labels
        )
        for worker in self._pool:
            key = [worker.name, worker.spec.role.value]
            ready.add_metric(key, worker.state(now_s)[0] is WorkerState.READY)
            requests.add_metric(key, worker.inflight_requests)
            tokens.add_metric(key, worker.inflight_tokens)
            if worker.kv_usage_fraction is not None:
                usage.add_metric(key, worker.kv_usage_fraction)
            pending.add_metric(key, pending_tokens.get(worker.name, 0))
            if worker.waiting_requests is not None:
                waiting.add_metric(key, worker.waiting_requests)
            age_s = worker.metrics_age_s(now_s)
            if age_s is not None:
                age.add_metric(key, age_s)
        yield from (ready, requests, tokens, usage, waiting, pending, age)
        yield from worker_load_families(self._pool, self._active_prefill_tokens)
        yield self._ready_workers(now_s)
        yield from self._failure_families()

    def _ready_workers(self, now_s: float) -> Metric:
        # A role without any worker has a zero: a series that vanishes alarms no one.
        counts = dict.fromkeys(self._roles, 0)
        for worker in self._pool:
            is_ready = worker.state(now_s)[0] is WorkerState.READY
            counts[worker.spec.role] = counts.get(worker.spec.role, 0) + is_ready
        by_role = GaugeMetricFamily(
            names.ROUTER_READY_WORKERS, "Workers that requests are sent to, by role.", labels=["role"]
        )
        for role, count in counts.items():
            by_role.add_metric([role.value], count)
        return by_role

    def _failure_families(self) -> Iterator[Metric]:
        labels = ["worker", "role"]
        failures = CounterMetricFamily(
            names.ROUTER_WORKER_FAILURES,
            "Failed requests of the worker, those that failed on others too included.",
            labels=labels,
        )
        ejections = CounterMetricFamily(
            names.ROUTER_WORKER_EJECTIONS, "Times that the worker's circuit has opened.", labels=labels
        )
        for worker in self._pool:
            key = [worker.name, worker.spec.role.value]
            failures.add_metric(key, worker.failures)
            ejections.add_metric(key, worker.breaker.openings)
        yield from (failures, ejections)

    def _request_families(self) -> Iterator[Metric]:
        metrics, model = self._metrics, self._model
        yield _counter(
            names.ROUTER_REQUESTS,
            "Answers by endpoint and status code; 499: the client left.",
            ["endpoint", "code"],
            (((endpoint, str(code)), count) for (endpoint, code), count in metrics.requests.items()),
        )
        yield _counter(
            names.ROUTER_ERRORS,
            "Requests that failed, by reason.",
            ["reason"],
            (((reason,), count) for reason, count in metrics.errors.items()),
        )
        yield _counter(
            names.ROUTER_RETRIES,
            "Retries, by the reason of the failure before.",
            ["reason"],
            (((reason,), count) for reason, count in metrics.retries.items()),
        )
        yield _counter(
            names.ROUTER_FORWARDED,
            "Requests about which another router decides: answered by it, broken off there, or fallen back to this one.",
            ["outcome"],
            (((outcome,), count) for outcome, count in metrics.forwarded.items()),
        )
        yield _counter(
            names.ROUTER_KV_RELEASES,
            "Prompts prefilled for requests that no decode worker was asked to serve, by whether their KV was released.",
            ["outcome"],
            (((outcome,), count) for outcome, count in metrics.kv_releases.items()),
        )
        yield rejection_family(metrics.rejections, model=model)
        for name, text, total in (
            (names.ROUTER_PROMPT_TOKENS, "Prompt tokens of answered requests.", metrics.prompt_tokens),
            (names.ROUTER_GENERATION_TOKENS, "Tokens sent to clients.", metrics.generation_tokens),
            (
                names.ROUTER_CACHED_TOKENS,
                "Prompt tokens that prefill found in its cache.",
                metrics.cached_tokens,
            ),
        ):
            yield _counter(name, text, ["model_name"], [((model,), total)])
        for name, text, histogram in (
            (names.ROUTER_TTFT, "Arrival to first token of streams; simulated seconds.", metrics.ttft),
            (names.ROUTER_ITL, "Gaps between tokens of streams; simulated seconds.", metrics.itl),
            (names.ROUTER_E2E, "Arrival to last byte; simulated seconds.", metrics.e2e),
            (names.ROUTER_QUEUE_TIME, "Waits for the first stage; simulated seconds.", metrics.queue_time),
        ):
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([model], histogram.labelled(), histogram.total)
            yield family


def _wake_families(wake: WakeTimes) -> Iterator[Metric]:
    hold = GaugeMetricFamily(
        names.ROUTER_WAKE_HOLD,
        "How long a request waits for workers that are started for it; simulated seconds.",
    )
    hold.add_metric([], wake.hold_s)
    yield hold
    slowest = GaugeMetricFamily(
        names.ROUTER_WAKE_SLOWEST,
        "The slowest of the last starts from no worker at all; simulated seconds; absent until learnt.",
    )
    if wake.slowest_s is not None:
        slowest.add_metric([], wake.slowest_s)
    yield slowest


def _kv_event_families(counts: KvEventCounts) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        names.ROUTER_WORKER_PREFIX_BLOCKS,
        "Prefix blocks that the worker's cache is believed to hold.",
        labels=["worker"],
    )
    for worker, count in counts.blocks().items():
        blocks.add_metric([worker], count)
    yield blocks
    for name, text, value in (
        (names.ROUTER_KV_EVENT_BATCHES, "Batches of workers' KV events applied.", counts.batches),
        (
            names.ROUTER_KV_EVENT_GAPS,
            "Times that a worker's cache was forgotten for lost batches.",
            counts.gaps,
        ),
        (names.ROUTER_KV_EVENTS_MALFORMED, "KV events and messages not understood.", counts.malformed),
    ):
        yield _counter(name, text, [], [((), value)])


def _counter(
    name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(list(key), value)
    return family


class MetricsPage:
    """Renders ``/metrics``."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, collector: RouterCollector) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return the page in the Prometheus text format."""
        return generate_latest(self._registry)
