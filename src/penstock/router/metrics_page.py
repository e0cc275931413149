"""Renders the router's ``/metrics``: families are built from its counters and its core when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from penstock.api import Role, Tier
from penstock.core import metric_names as names
from penstock.core.histogram import BucketCounts
from penstock.router.context import RouterContext
from penstock.router.core.tiers import TierControl
from penstock.router.core.waiting import LATELY_S
from penstock.router.core.worker import Worker, WorkerState
from penstock.router.kv_listener import KvListener
from penstock.router.picker.group import RouterGroup
from penstock.router.proxy.tiers import LiveTiers

_HELP: Final = {
    names.ROUTER_QUEUE_REQUESTS: "Requests waiting for a prefill worker.",
    names.ROUTER_QUEUE_TOKENS: "Prompt tokens waiting for a prefill worker.",
    names.ROUTER_QUEUE_UNCACHED_TOKENS: "Prompt tokens waiting for a prefill worker that no cache is believed to hold.",
    names.ROUTER_QUEUE_OLDEST: "Longest wait so far in the prefill queue; simulated seconds.",
    names.ROUTER_DECODE_QUEUE_REQUESTS: "Requests waiting for a decode worker, while no circuit lets them pass.",
    names.ROUTER_UNSERVED: f"Requests that wait for a worker of the role, and those turned away in the last {LATELY_S:g} s.",
    names.ROUTER_TURNED_AWAY: "Requests rejected, shed, refused by a full queue or timed out for want of workers of the role.",
    names.ROUTER_DEFLECTED_PREFILLS: "Prompts that decode workers computed because all prefill workers were behind.",
    names.ROUTER_ARRIVALS: "Completion requests that arrived, refused ones included.",
    names.ROUTER_ARRIVED_TOKENS: "Prompt tokens of the arrivals.",
    names.ROUTER_REFUSED: "Arrivals refused with 429 or 503 before any worker.",
    names.ROUTER_QUEUE_TIMEOUTS: "Arrivals that left the queue at its limit.",
    names.ROUTER_COMPLETED: "Arrivals answered in full.",
    names.ROUTER_COMPLETED_TOKENS: "Output tokens of those.",
    names.ROUTER_ROUTED_TOKENS: "Prompt tokens of admitted requests.",
    names.ROUTER_ROUTED_UNCACHED_TOKENS: "Prompt tokens of admitted requests that no cache was believed to hold.",
    names.ROUTER_COMPUTED_TOKENS: "Those whose prompts were computed.",
    names.ROUTER_PROMPT_TOKENS: "Prompt tokens of answered requests.",
    names.ROUTER_GENERATION_TOKENS: "Tokens sent to clients.",
    names.ROUTER_CACHED_TOKENS: "Prompt tokens that prefill found in its cache.",
    names.ROUTER_READY_WORKERS: "Workers that requests are sent to, by role.",
    names.ROUTER_WORKER_READY: "1 if requests are sent there.",
    names.ROUTER_WORKER_INFLIGHT_REQUESTS: "Requests under way.",
    names.ROUTER_WORKER_INFLIGHT_TOKENS: "Tokens under way.",
    names.ROUTER_WORKER_KV_USAGE: "KV blocks in use as last scraped, 0-1; absent if unknown.",
    names.ROUTER_WORKER_WAITING: "Requests that wait in the worker for room, as last scraped; absent if unknown.",
    names.ROUTER_WORKER_PENDING_TOKENS: "Uncached prompt tokens given to the worker and not computed yet.",
    names.ROUTER_WORKER_METRICS_AGE: "Age of the worker's metrics; simulated seconds.",
    # Names and meanings of NVIDIA Dynamo's document "Request Rejection", under Penstock's prefix.
    names.ROUTER_WORKER_ACTIVE_DECODE_BLOCKS: "KV blocks in use, as last scraped.",
    names.ROUTER_WORKER_KV_TOTAL_BLOCKS: "KV blocks of the worker, all ranks together.",
    names.ROUTER_WORKER_ACTIVE_PREFILL_TOKENS: "Uncached prompt tokens that wait for the worker or are being computed there.",
    names.ROUTER_WORKER_FAILURES: "Failed requests of the worker, those that failed on others too included.",
    names.ROUTER_WORKER_EJECTIONS: "Times that the worker's circuit has opened.",
    names.ROUTER_WORKER_PREFIX_BLOCKS: "Prefix blocks that the worker's cache is believed to hold.",
    names.ROUTER_REQUESTS: "Answers by endpoint and status code; 499: the client left.",
    names.ROUTER_ERRORS: "Requests that failed, by reason.",
    names.ROUTER_RETRIES: "Retries, by the reason of the failure before.",
    names.ROUTER_CONTINUATIONS: "Broken streams that went on at another worker, by the reason of the failure before.",
    names.ROUTER_LOST_STREAMS: "Broken streams that ended in an error, by why: request, said, limit, deaths.",
    names.ROUTER_PICKS: "Stays at workers that another router has picked, and requests that this one picked alone for want of a picker.",
    names.ROUTER_KV_RELEASES: "Prompts prefilled for requests that no decode worker was asked to serve, by whether their KV was released.",
    names.ROUTER_KV_TRANSFERS: "Prompts prefilled for decode, by what became of their KV: done; none, prefill kept none; lost, not in time.",
    names.ROUTER_REJECTIONS: "Requests rejected with 503 to protect those under way.",
    names.ROUTER_TTFT: "Arrival to first token of streams; simulated seconds.",
    names.ROUTER_ITL: "Gaps between tokens of streams; simulated seconds.",
    names.ROUTER_E2E: "Arrival to last byte; simulated seconds.",
    names.ROUTER_QUEUE_TIME: "Waits for the first stage; simulated seconds.",
    names.ROUTER_WAKE_HOLD: "How long a request waits for workers that are started for it; simulated seconds.",
    names.ROUTER_WAKE_SLOWEST: "The slowest of the last starts from no worker at all; simulated seconds; absent until learnt.",
    names.ROUTER_KV_EVENT_BATCHES: "Batches of workers' KV events applied.",
    names.ROUTER_KV_EVENT_GAPS: "Times that a worker's cache was forgotten for lost batches.",
    names.ROUTER_KV_EVENTS_MALFORMED: "KV events and messages not understood.",
    names.ROUTER_IS_PICKER: "1 if this router picks the workers for all routers of the graph.",
    names.ROUTER_DISCOVERY_CURRENT: "1 if the view of the workers is up to date, 0 if it is the last good one.",
    names.SCHEDULE_LAG_P99: "How late the router's timer runs, p99; simulated seconds.",
    names.SCHEDULE_LAG_SAMPLES: "Timer ticks measured for lateness.",
    names.ROUTER_TIER_ARRIVALS: "Requests that arrived.",
    names.ROUTER_TIER_REJECTED: "Arrivals for which there was no room, no worker or no time.",
    names.ROUTER_TIER_SHED: "Arrivals refused so that higher tiers keep their SLO.",
    names.ROUTER_TIER_DOWNGRADED: "Requests that asked for this tier without a key that allows it.",
    names.ROUTER_TIER_WAITING: "Requests that wait for the first stage.",
    names.ROUTER_TIER_COMPLIANCE: "Share of the requests of the window that kept all targets of their tier, 0-1; absent if none ended.",
    names.ROUTER_TIER_SHARE_DEVIATION: "Part of the prompt tokens computed in the last minute that was the tier's, less its share, -1 to 1; absent if none was.",
    names.ROUTER_TIER_SHED_FRACTION: "Share of the arrivals that is shed now, 0-1.",
    names.ROUTER_TIER_TTFT: "Arrival to first token of streams; simulated seconds.",
    names.ROUTER_TIER_E2E: "Arrival to last byte; simulated seconds.",
    names.ROUTER_TIER_QUEUE_TIME: "Waits for the first stage; simulated seconds.",
}

_Rows = Iterable[tuple[Sequence[str], float | None]]
"""Label values, and the value; a row whose value is None is left out."""


@dataclass(eq=False)
class MetricsPage:
    """Renders ``/metrics``, and builds its families at scrape time; None stands for parts that the graph does not have."""

    context: RouterContext
    kv_events: KvListener | None
    tiers: LiveTiers | None
    group: RouterGroup | None

    def __post_init__(self) -> None:
        """Collect from this object and the process."""
        self._core = self.context.admission.core
        self._metrics = self.context.metrics
        self._model = self.context.settings.model
        self._now_s = self.context.clock.now_s
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type: Prometheus' text, or OpenMetrics, which has exemplars, to whom asks."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._model_gauges()
        yield from self._model_counters()
        yield from self._role_families()
        yield from self._worker_families()
        yield from self._request_families()
        if self.tiers is not None and self._core.tiers is not None:
            yield from self._tier_families(self._core.tiers, self.tiers.downgraded)
        values: dict[str, float | None] = {
            names.ROUTER_IS_PICKER: self.group is None or self.group.is_picker,
            names.ROUTER_DISCOVERY_CURRENT: self.context.discovery.problem is None,
            names.SCHEDULE_LAG_P99: self._metrics.lag.p99_s(),
        }
        counts = {names.SCHEDULE_LAG_SAMPLES: self._metrics.lag.total}
        if self._core.wake is not None:
            values[names.ROUTER_WAKE_HOLD] = self._core.wake.hold_s
            values[names.ROUTER_WAKE_SLOWEST] = self._core.wake.slowest_s
        if self.kv_events is not None:
            blocks = self.kv_events.blocks()
            yield _gauge(names.ROUTER_WORKER_PREFIX_BLOCKS, ["worker"], (([w], n) for w, n in blocks.items()))
            counts[names.ROUTER_KV_EVENT_BATCHES] = self.kv_events.batches
            counts[names.ROUTER_KV_EVENT_GAPS] = self.kv_events.gaps
            counts[names.ROUTER_KV_EVENTS_MALFORMED] = self.kv_events.malformed
        yield from (_gauge(name, [], [((), value)]) for name, value in values.items())
        yield from (_counter(name, [], [((), count)]) for name, count in counts.items())

    def _model_gauges(self) -> Iterator[Metric]:
        queue, decode = self._core.entry_queue, self._core.queues.get(Role.DECODE)
        values: dict[str, float] = {
            names.ROUTER_QUEUE_REQUESTS: len(queue),
            names.ROUTER_QUEUE_TOKENS: queue.tokens,
            names.ROUTER_QUEUE_UNCACHED_TOKENS: queue.prompt_tokens.waiting,
            names.ROUTER_QUEUE_OLDEST: queue.oldest_s(self._now_s()),
        }
        if decode is not None:
            values[names.ROUTER_DECODE_QUEUE_REQUESTS] = len(decode)
        for name, value in values.items():
            yield _gauge(name, ["model_name"], [([self._model], value)])

    def _model_counters(self) -> Iterator[Metric]:
        metrics, tokens = self._metrics, self._core.entry_queue.prompt_tokens
        counts = {
            names.ROUTER_ARRIVALS: metrics.arrivals,
            names.ROUTER_ARRIVED_TOKENS: metrics.arrived_tokens,
            names.ROUTER_REFUSED: metrics.refused,
            names.ROUTER_QUEUE_TIMEOUTS: metrics.queue_timeouts,
            names.ROUTER_COMPLETED: metrics.completed,
            names.ROUTER_COMPLETED_TOKENS: metrics.completed_tokens,
            names.ROUTER_ROUTED_TOKENS: tokens.routed,
            names.ROUTER_ROUTED_UNCACHED_TOKENS: tokens.admitted,
            names.ROUTER_COMPUTED_TOKENS: tokens.computed,
            names.ROUTER_PROMPT_TOKENS: metrics.prompt_tokens,
            names.ROUTER_GENERATION_TOKENS: metrics.generation_tokens,
            names.ROUTER_CACHED_TOKENS: metrics.cached_tokens,
        }
        for name, count in counts.items():
            yield _counter(name, ["model_name"], [([self._model], count)])

    def _role_families(self) -> Iterator[Metric]:
        now_s, core, labels = self._now_s(), self._core, ["model_name", "role"]
        decode = core.queues.get(Role.DECODE, ())
        waiting = {role: len(decode if role is Role.DECODE else core.entry_queue) for role in Role}
        # A role without any worker has a zero: a series that vanishes alarms no one.
        ready = dict.fromkeys(core.queues, 0)
        for worker in core.pool:
            ready[worker.spec.role] = ready.get(worker.spec.role, 0) + _is_ready(worker, now_s)
        turned_away = core.turned_away.items()
        unserved = (([self._model, r.value], waiting[r] + counts.lately(now_s)) for r, counts in turned_away)
        yield _counter(
            names.ROUTER_TURNED_AWAY,
            labels,
            (([self._model, r.value], each.total) for r, each in turned_away),
        )
        if core.deflection is not None:
            deflected = [([self._model], core.deflection.total)]
            yield _counter(names.ROUTER_DEFLECTED_PREFILLS, ["model_name"], deflected)
        yield _gauge(names.ROUTER_UNSERVED, labels, unserved)
        yield _gauge(names.ROUTER_READY_WORKERS, ["role"], (([role.value], n) for role, n in ready.items()))

    def _worker_families(self) -> Iterator[Metric]:
        now_s, core = self._now_s(), self._core
        # The picker counts what is in flight for all routers.
        counts_here = self.group is None or not self.group.is_relay
        pending = core.entry_queue.prompt_tokens.pending if counts_here else {}
        values: Mapping[str, Callable[[Worker], float | None]] = {
            names.ROUTER_WORKER_READY: lambda each: _is_ready(each, now_s),
            names.ROUTER_WORKER_INFLIGHT_REQUESTS: lambda each: each.inflight_requests * counts_here,
            names.ROUTER_WORKER_INFLIGHT_TOKENS: lambda each: each.inflight_tokens * counts_here,
            names.ROUTER_WORKER_KV_USAGE: lambda each: each.kv_usage_fraction,
            names.ROUTER_WORKER_WAITING: lambda each: each.waiting_requests,
            names.ROUTER_WORKER_PENDING_TOKENS: lambda each: pending.get(each.name, 0),
            names.ROUTER_WORKER_METRICS_AGE: lambda each: each.metrics_age_s(now_s),
            names.ROUTER_WORKER_ACTIVE_DECODE_BLOCKS: _active_blocks,
            names.ROUTER_WORKER_KV_TOTAL_BLOCKS: lambda each: each.kv_total_blocks,
            names.ROUTER_WORKER_ACTIVE_PREFILL_TOKENS: core.active_prefill_tokens,
        }
        for name, read in values.items():
            yield _gauge(name, _OF_WORKER, ((_key(each), read(each)) for each in core.pool))
        failures = ((_key(each), each.failures) for each in core.pool)
        yield _counter(names.ROUTER_WORKER_FAILURES, _OF_WORKER, failures)
        ejections = ((_key(each), each.breaker.openings) for each in core.pool)
        yield _counter(names.ROUTER_WORKER_EJECTIONS, _OF_WORKER, ejections)

    def _request_families(self) -> Iterator[Metric]:
        metrics = self._metrics
        answers = (([endpoint, str(code)], count) for (endpoint, code), count in metrics.requests.items())
        yield _counter(names.ROUTER_REQUESTS, ["endpoint", "code"], answers)
        rejections = (([self._model, *key], count) for key, count in metrics.rejections.items())
        yield _counter(names.ROUTER_REJECTIONS, ["model", "endpoint", "reason"], rejections)
        for name, label, counts in (
            (names.ROUTER_ERRORS, "reason", metrics.errors),
            (names.ROUTER_RETRIES, "reason", metrics.retries),
            (names.ROUTER_CONTINUATIONS, "reason", metrics.continuations),
            (names.ROUTER_LOST_STREAMS, "why", metrics.lost_streams),
            (names.ROUTER_PICKS, "by", metrics.picks),
            (names.ROUTER_KV_RELEASES, "outcome", metrics.kv_releases),
            (names.ROUTER_KV_TRANSFERS, "result", metrics.kv_transfers),
        ):
            yield _by_label(name, label, counts)
        for name, buckets in (
            (names.ROUTER_TTFT, metrics.ttft),
            (names.ROUTER_ITL, metrics.itl),
            (names.ROUTER_E2E, metrics.e2e),
            (names.ROUTER_QUEUE_TIME, metrics.queue_time),
        ):
            yield _histogram(name, "model_name", [(self._model, buckets)])

    def _tier_families(self, control: TierControl, downgraded: Mapping[Tier, int]) -> Iterator[Metric]:
        counts, monitor, now_s = control.counts, control.monitor, self._now_s()
        waiting = self._core.entry_queue.room.tiers
        for name, field in (
            (names.ROUTER_TIER_ARRIVALS, "arrivals"),
            (names.ROUTER_TIER_REJECTED, "rejected"),
            (names.ROUTER_TIER_SHED, "shed"),
        ):
            yield _by_label(name, "tier", {tier: getattr(each, field) for tier, each in counts.items()})
        yield _by_label(names.ROUTER_TIER_DOWNGRADED, "tier", downgraded)
        gauges: Mapping[str, Callable[[Tier], float | None]] = {
            names.ROUTER_TIER_WAITING: lambda tier: waiting.get(tier, 0),
            names.ROUTER_TIER_COMPLIANCE: lambda tier: monitor.compliance(tier, now_s),
            names.ROUTER_TIER_SHARE_DEVIATION: lambda tier: control.share_deviation(tier, now_s),
            names.ROUTER_TIER_SHED_FRACTION: monitor.shed_fraction,
        }
        for name, read in gauges.items():
            yield _gauge(name, ["tier"], (([tier.value], read(tier)) for tier in Tier))
        for name, field in (
            (names.ROUTER_TIER_TTFT, "ttft"),
            (names.ROUTER_TIER_E2E, "e2e"),
            (names.ROUTER_TIER_QUEUE_TIME, "queue_time"),
        ):
            yield _histogram(name, "tier", ((tier, getattr(each, field)) for tier, each in counts.items()))


_Label = TypeVar("_Label", bound=str)
_OF_WORKER: Final = ("worker", "role")


_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily)


def _filled(family: _Family, rows: _Rows) -> _Family:
    for key, value in rows:
        if value is not None:
            family.add_metric(key, value)
    return family


def _gauge(name: str, labels: Sequence[str], rows: _Rows) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(name, _HELP[name], labels=labels), rows)


def _counter(name: str, labels: Sequence[str], rows: _Rows) -> CounterMetricFamily:
    return _filled(CounterMetricFamily(name, _HELP[name], labels=labels), rows)


def _by_label(name: str, label: str, counts: Mapping[_Label, int]) -> CounterMetricFamily:
    return _counter(name, [label], (([key], count) for key, count in counts.items()))


def _histogram(name: str, label: str, counts: Iterable[tuple[str, BucketCounts]]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, _HELP[name], labels=[label])
    for key, buckets in counts:
        edges = (*map(str, buckets.bounds), "+Inf")
        rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = [
            *zip(edges, map(float, buckets.cumulative()), strict=True)
        ]
        for place, (trace_id, value, at_s) in buckets.exemplars.items():
            rows[place] = (*rows[place][:2], Exemplar({"trace_id": trace_id}, value, at_s))
        family.add_metric([key], rows, buckets.total)
    return family


def _key(worker: Worker) -> tuple[str, str]:
    return worker.name, worker.spec.role.value


def _is_ready(worker: Worker, now_s: float) -> bool:
    return worker.state(now_s)[0] is WorkerState.READY


def _active_blocks(worker: Worker) -> int | None:
    blocks, usage = worker.kv_total_blocks, worker.kv_usage_fraction
    return None if blocks is None or usage is None else round(usage * blocks)
