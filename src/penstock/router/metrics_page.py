"""Renders the router's ``/metrics``: families are built from its counters and its core when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from penstock.api import Role
from penstock.core import metric_names as names
from penstock.router.admission import LiveCore
from penstock.router.core.waiting import LATELY_S, WakeTimes
from penstock.router.core.worker import Worker, WorkerState
from penstock.router.families import by_label, counter, gauge, histogram
from penstock.router.kv_listener import KvListener
from penstock.router.metrics import RouterMetrics
from penstock.router.picker.group import RouterGroup
from penstock.router.policy.arrival import PromptTokenCounts

_WorkerGauge = tuple[str, str, Callable[[Worker], float | None]]
"""Name, text, and what reads a worker's value; None: unknown, the series is absent."""


class MetricsPage:
    """Renders ``/metrics``, and builds its families at scrape time."""

    def __init__(
        self,
        metrics: RouterMetrics,
        core: LiveCore,
        *,
        model: str,
        now_s: Callable[[], float],
        discovery_problem: Callable[[], str | None],
        kv_events: KvListener | None = None,
        tiers: Callable[[], Iterator[Metric]] | None = None,
        group: RouterGroup | None = None,
    ) -> None:
        """Connect the parts; ``now_s`` returns simulated seconds, None stands for parts that the graph does not have."""
        self._metrics = metrics
        self._core = core
        self._pool = core.pool
        self._model = model
        self._now_s = now_s
        self._discovery_problem = discovery_problem
        self._kv_events = kv_events
        self._tiers = tiers
        self._group = group
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type: Prometheus' text, or OpenMetrics, which has exemplars, to whom asks."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        tokens = self._core.entry_queue.prompt_tokens
        yield from self._queue_families()
        yield from self._frontend_families(tokens)
        # The picker counts what is in flight for all routers.
        is_relay = self._group is not None and self._group.is_relay
        yield from self._worker_families({} if is_relay else tokens.pending, is_relay=is_relay)
        yield from self._request_families()
        if self._core.wake is not None:
            yield from _wake_families(self._core.wake)
        if self._kv_events is not None:
            yield from _kv_event_families(self._kv_events)
        if self._tiers is not None:
            yield from self._tiers()
        is_picker = self._group is None or self._group.is_picker
        text = "1 if this router picks the workers for all routers of the graph."
        yield gauge(names.ROUTER_IS_PICKER, text, [], [((), is_picker)])
        is_current, lag = self._discovery_problem() is None, self._metrics.lag
        text = "1 if the view of the workers is up to date, 0 if it is the last good one."
        yield gauge(names.ROUTER_DISCOVERY_CURRENT, text, [], [((), is_current)])
        text = "How late the router's timer runs, p99; simulated seconds."
        yield gauge(names.SCHEDULE_LAG_P99, text, [], [((), lag.p99_s())])
        text = "Timer ticks measured for lateness."
        yield counter(names.SCHEDULE_LAG_SAMPLES, text, [], [((), lag.total)])

    def _frontend_families(self, tokens: PromptTokenCounts) -> Iterator[Metric]:
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
            (names.ROUTER_PROMPT_TOKENS, "Prompt tokens of answered requests.", metrics.prompt_tokens),
            (names.ROUTER_GENERATION_TOKENS, "Tokens sent to clients.", metrics.generation_tokens),
            (
                names.ROUTER_CACHED_TOKENS,
                "Prompt tokens that prefill found in its cache.",
                metrics.cached_tokens,
            ),
        ):
            yield counter(name, text, ["model_name"], [([self._model], total)])

    def _queue_families(self) -> Iterator[Metric]:
        queue, decode = self._core.entry_queue, self._core.queues.get(Role.DECODE)
        decode_waiting = None if decode is None else len(decode)
        for name, text, value in (
            (names.ROUTER_QUEUE_REQUESTS, "Requests waiting for a prefill worker.", len(queue)),
            (names.ROUTER_QUEUE_TOKENS, "Prompt tokens waiting for a prefill worker.", queue.tokens),
            (
                names.ROUTER_QUEUE_UNCACHED_TOKENS,
                "Prompt tokens waiting for a prefill worker that no cache is believed to hold.",
                queue.prompt_tokens.waiting,
            ),
            (
                names.ROUTER_QUEUE_OLDEST,
                "Longest wait so far in the prefill queue; simulated seconds.",
                queue.oldest_s(self._now_s()),
            ),
            (
                names.ROUTER_DECODE_QUEUE_REQUESTS,
                "Requests waiting for a decode worker; they wait only while no circuit lets them pass.",
                decode_waiting,
            ),
        ):
            if value is not None:
                yield gauge(name, text, ["model_name"], [([self._model], value)])
        yield from self._unserved_families(len(queue), decode_waiting or 0)

    def _unserved_families(self, entry_waiting: int, decode_waiting: int) -> Iterator[Metric]:
        now_s, labels = self._now_s(), ["model_name", "role"]
        yield counter(
            names.ROUTER_TURNED_AWAY,
            "Requests rejected, shed, refused by a full queue or timed out for want of workers of the role.",
            labels,
            (([self._model, role.value], counts.total) for role, counts in self._core.turned_away.items()),
        )
        waiting = {role: decode_waiting if role is Role.DECODE else entry_waiting for role in Role}
        yield gauge(
            names.ROUTER_UNSERVED,
            f"Requests that wait for a worker of the role, and those turned away in the last {LATELY_S:g} s.",
            labels,
            (
                ([self._model, role.value], waiting[role] + counts.lately(now_s))
                for role, counts in self._core.turned_away.items()
            ),
        )

    def _worker_families(self, pending_tokens: Mapping[str, int], *, is_relay: bool) -> Iterator[Metric]:
        now_s = self._now_s()
        for name, text, read in self._worker_gauges(now_s, pending_tokens, is_relay=is_relay):
            yield gauge(name, text, _OF_WORKER, ((_key(each), read(each)) for each in self._pool))
        # A role without any worker has a zero: a series that vanishes alarms no one.
        counts = dict.fromkeys(self._core.queues, 0)
        for worker in self._pool:
            counts[worker.spec.role] = counts.get(worker.spec.role, 0) + _is_ready(worker, now_s)
        yield gauge(
            names.ROUTER_READY_WORKERS,
            "Workers that requests are sent to, by role.",
            ["role"],
            (([role.value], count) for role, count in counts.items()),
        )
        yield counter(
            names.ROUTER_WORKER_FAILURES,
            "Failed requests of the worker, those that failed on others too included.",
            _OF_WORKER,
            ((_key(each), each.failures) for each in self._pool),
        )
        yield counter(
            names.ROUTER_WORKER_EJECTIONS,
            "Times that the worker's circuit has opened.",
            _OF_WORKER,
            ((_key(each), each.breaker.openings) for each in self._pool),
        )

    def _worker_gauges(
        self, now_s: float, pending_tokens: Mapping[str, int], *, is_relay: bool
    ) -> Sequence[_WorkerGauge]:
        return (
            (names.ROUTER_WORKER_READY, "1 if requests are sent there.", lambda each: _is_ready(each, now_s)),
            (
                names.ROUTER_WORKER_INFLIGHT_REQUESTS,
                "Requests under way.",
                lambda each: 0 if is_relay else each.inflight_requests,
            ),
            (
                names.ROUTER_WORKER_INFLIGHT_TOKENS,
                "Tokens under way.",
                lambda each: 0 if is_relay else each.inflight_tokens,
            ),
            (
                names.ROUTER_WORKER_KV_USAGE,
                "KV blocks in use as last scraped, 0-1; absent if unknown.",
                lambda each: each.kv_usage_fraction,
            ),
            (
                names.ROUTER_WORKER_WAITING,
                "Requests that wait in the worker for room, as last scraped; absent if unknown.",
                lambda each: each.waiting_requests,
            ),
            (
                names.ROUTER_WORKER_PENDING_TOKENS,
                "Uncached prompt tokens given to the worker and not computed yet.",
                lambda each: pending_tokens.get(each.name, 0),
            ),
            (
                names.ROUTER_WORKER_METRICS_AGE,
                "Age of the worker's metrics; simulated seconds.",
                lambda each: each.metrics_age_s(now_s),
            ),
            # Names and meanings of NVIDIA Dynamo's document "Request Rejection", under Penstock's prefix.
            (
                names.ROUTER_WORKER_ACTIVE_DECODE_BLOCKS,
                "KV blocks in use, as last scraped.",
                _active_blocks,
            ),
            (
                names.ROUTER_WORKER_KV_TOTAL_BLOCKS,
                "KV blocks of the worker, all ranks together.",
                lambda each: each.kv_total_blocks,
            ),
            (
                names.ROUTER_WORKER_ACTIVE_PREFILL_TOKENS,
                "Prompt tokens that wait for the worker or are being computed there, cached ones left out.",
                self._core.active_prefill_tokens,
            ),
        )

    def _request_families(self) -> Iterator[Metric]:
        metrics, model = self._metrics, self._model
        yield counter(
            names.ROUTER_REQUESTS,
            "Answers by endpoint and status code; 499: the client left.",
            ["endpoint", "code"],
            (([endpoint, str(code)], count) for (endpoint, code), count in metrics.requests.items()),
        )
        yield by_label("reason", names.ROUTER_ERRORS, "Requests that failed, by reason.", metrics.errors)
        yield by_label(
            "reason", names.ROUTER_RETRIES, "Retries, by the reason of the failure before.", metrics.retries
        )
        yield by_label(
            "by",
            names.ROUTER_PICKS,
            "Stays at workers that another router has picked, and requests that this one picked alone for want of a picker.",
            metrics.picks,
        )
        yield by_label(
            "outcome",
            names.ROUTER_KV_RELEASES,
            "Prompts prefilled for requests that no decode worker was asked to serve, by whether their KV was released.",
            metrics.kv_releases,
        )
        yield counter(
            names.ROUTER_REJECTIONS,
            "Requests rejected with 503 to protect those under way.",
            ["model", "endpoint", "reason"],
            (([model, endpoint, reason], count) for (endpoint, reason), count in metrics.rejections.items()),
        )
        for name, text, buckets in (
            (names.ROUTER_TTFT, "Arrival to first token of streams; simulated seconds.", metrics.ttft),
            (names.ROUTER_ITL, "Gaps between tokens of streams; simulated seconds.", metrics.itl),
            (names.ROUTER_E2E, "Arrival to last byte; simulated seconds.", metrics.e2e),
            (names.ROUTER_QUEUE_TIME, "Waits for the first stage; simulated seconds.", metrics.queue_time),
        ):
            yield histogram(name, text, "model_name", [(model, buckets)])


_OF_WORKER = ("worker", "role")


def _key(worker: Worker) -> tuple[str, str]:
    return worker.name, worker.spec.role.value


def _is_ready(worker: Worker, now_s: float) -> bool:
    return worker.state(now_s)[0] is WorkerState.READY


def _active_blocks(worker: Worker) -> int | None:
    blocks, usage = worker.kv_total_blocks, worker.kv_usage_fraction
    return None if blocks is None or usage is None else round(usage * blocks)


def _wake_families(wake: WakeTimes) -> Iterator[Metric]:
    yield gauge(
        names.ROUTER_WAKE_HOLD,
        "How long a request waits for workers that are started for it; simulated seconds.",
        [],
        [((), wake.hold_s)],
    )
    yield gauge(
        names.ROUTER_WAKE_SLOWEST,
        "The slowest of the last starts from no worker at all; simulated seconds; absent until learnt.",
        [],
        [((), wake.slowest_s)],
    )


def _kv_event_families(counts: KvListener) -> Iterator[Metric]:
    yield gauge(
        names.ROUTER_WORKER_PREFIX_BLOCKS,
        "Prefix blocks that the worker's cache is believed to hold.",
        ["worker"],
        (([worker], count) for worker, count in counts.blocks().items()),
    )
    for name, text, value in (
        (names.ROUTER_KV_EVENT_BATCHES, "Batches of workers' KV events applied.", counts.batches),
        (
            names.ROUTER_KV_EVENT_GAPS,
            "Times that a worker's cache was forgotten for lost batches.",
            counts.gaps,
        ),
        (names.ROUTER_KV_EVENTS_MALFORMED, "KV events and messages not understood.", counts.malformed),
    ):
        yield counter(name, text, [], [((), value)])
