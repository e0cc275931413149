"""Renders the router's ``/metrics``: the metrics of `series` are filled from the router's counters and core when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Exemplar, Metric
from prometheus_client.exposition import choose_encoder

from penstock.api import Role, Tier
from penstock.core import metric_names as names
from penstock.core.histogram import BucketCounts
from penstock.router.context import RouterContext
from penstock.router.core.tiers import TierControl
from penstock.router.core.worker import Worker, WorkerState
from penstock.router.kv_listener import KvListener
from penstock.router.picker.group import PeerGroup
from penstock.router.proxy.tiers import LiveTiers
from penstock.router.series import SERIES

_Rows = Sequence[tuple[Sequence[str], float | BucketCounts | None]]
"""Rows of label values and the value; a row whose value is None is omitted."""


@dataclass(eq=False)
class MetricsPage:
    """Renders ``/metrics``, the metrics of one router; an attribute is None if the graph does not have that part.

    Attributes:
        context: Shared objects of the router.
        kv_events: Listener for KV events.
        tiers: Tiers of the router.
        group: Connections to the other routers of the graph.
    """

    context: RouterContext
    kv_events: KvListener | None
    tiers: LiveTiers | None
    group: PeerGroup | None

    def __post_init__(self) -> None:
        """Register this object and the process metrics as collectors."""
        self._core = self.context.admission.core
        self._metrics = self.context.metrics
        self._model = self.context.settings.model
        self._now_s = self.context.clock.now_s
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type.

        The format is Prometheus' text, or OpenMetrics (which has exemplars) if ``accept``, the value of the Accept header,
        requests it.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the parts of the router that are in use, each with its present values; some may have none yet."""
        parts = [
            self._of_model(),
            self._of_roles(),
            self._of_workers(),
            self._of_requests(),
            self._of_router(),
        ]
        if self.tiers is not None and self._core.tiers is not None:
            parts.append(self._of_tiers(self._core.tiers, self.tiers.downgraded))
        if self.kv_events is not None:
            parts.append(_of_kv_events(self.kv_events))
        for name, rows in chain.from_iterable(parts):
            yield _family(name, rows)

    def _of_router(self) -> Iterator[tuple[str, _Rows]]:
        yield names.ROUTER_IS_PICKER, [((), self.group is None or self.group.is_picker)]
        yield names.ROUTER_DISCOVERY_CURRENT, [((), self.context.discovery.problem is None)]
        yield names.SCHEDULE_LAG_P99, [((), self._metrics.lag.p99_s())]
        yield names.SCHEDULE_LAG_SAMPLES, [((), self._metrics.lag.total)]
        wake = self._core.wake
        if wake is not None:
            yield names.ROUTER_WAKE_HOLD, [((), wake.max_startup_wait_s)]
            yield names.ROUTER_WAKE_SLOWEST, [((), wake.slowest_s)]

    def _of_model(self) -> Iterator[tuple[str, _Rows]]:
        metrics, core, queue = self._metrics, self._core, self._core.entry_queue
        decode, tokens = core.queues.get(Role.DECODE), queue.prompt_tokens
        values: dict[str, float | BucketCounts] = {
            names.ROUTER_QUEUE_REQUESTS: len(queue),
            names.ROUTER_QUEUE_TOKENS: queue.tokens,
            names.ROUTER_QUEUE_UNCACHED_TOKENS: tokens.waiting,
            names.ROUTER_QUEUE_OLDEST: queue.oldest_s(self._now_s()),
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
            names.ROUTER_TTFT: metrics.ttft,
            names.ROUTER_DISPATCHED_TTFT: metrics.dispatched_ttft,
            names.ROUTER_PROMPT_ESTIMATE_RATIO: metrics.prompt_estimate,
            names.ROUTER_ITL: metrics.itl,
            names.ROUTER_E2E: metrics.e2e,
            names.ROUTER_QUEUE_TIME: metrics.queue_time,
        }
        if decode is not None:
            values[names.ROUTER_DECODE_QUEUE_REQUESTS] = len(decode)
        if core.deflection is not None:
            values[names.ROUTER_DEFLECTED_PREFILLS] = core.deflection.total
        for name, value in values.items():
            yield name, [((self._model,), value)]

    def _of_roles(self) -> Iterator[tuple[str, _Rows]]:
        now_s, core = self._now_s(), self._core
        decode = core.queues.get(Role.DECODE, ())
        waiting = {role: len(decode if role is Role.DECODE else core.entry_queue) for role in Role}
        # A role without workers has the value 0: a missing time series triggers no alert.
        ready = dict.fromkeys(core.queues, 0)
        for worker in core.pool:
            ready[worker.spec.role] = ready.get(worker.spec.role, 0) + _is_ready(worker, now_s)
        rejections = [((self._model, role.value), role, each) for role, each in core.rejections.items()]
        yield names.ROUTER_TURNED_AWAY, [(key, each.total) for key, _, each in rejections]
        yield names.ROUTER_UNSERVED, [(key, waiting[r] + each.recent(now_s)) for key, r, each in rejections]
        yield names.ROUTER_READY_WORKERS, [((role.value,), number) for role, number in ready.items()]

    def _of_workers(self) -> Iterator[tuple[str, _Rows]]:
        now_s, core = self._now_s(), self._core
        # The picker counts the requests in flight for all routers.
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
            names.ROUTER_WORKER_ACTIVE_PREFILL_TOKENS: core.stages.active_prefill_tokens,
            names.ROUTER_WORKER_FAILURES: lambda each: each.failures,
            names.ROUTER_WORKER_EJECTIONS: lambda each: each.breaker.openings,
        }
        for name, read in values.items():
            yield name, [(_key(each), read(each)) for each in core.pool]

    def _of_requests(self) -> Iterator[tuple[str, _Rows]]:
        metrics = self._metrics
        yield names.ROUTER_REQUESTS, [((path, str(code)), n) for (path, code), n in metrics.requests.items()]
        yield names.ROUTER_REJECTIONS, [((self._model, *key), n) for key, n in metrics.rejections.items()]
        yield names.ROUTER_ERRORS, _by_label(metrics.errors)
        yield names.ROUTER_RETRIES, _by_label(metrics.retries)
        yield names.ROUTER_CONTINUATIONS, _by_label(metrics.continuations)
        yield names.ROUTER_LOST_STREAMS, _by_label(metrics.lost_streams)
        yield names.ROUTER_FAILED_JOBS, _by_label(metrics.failed_jobs)
        yield names.ROUTER_PICKS, _by_label(metrics.picks)
        yield names.ROUTER_KV_RELEASES, _by_label(metrics.kv_releases)
        yield names.ROUTER_KV_TRANSFERS, _by_label(metrics.kv_transfers)

    def _of_tiers(self, control: TierControl, downgraded: Mapping[Tier, int]) -> Iterator[tuple[str, _Rows]]:
        counts, monitor, now_s = control.counts, control.monitor, self._now_s()
        waiting = self._core.entry_queue.occupancy.tiers
        yield names.ROUTER_TIER_ARRIVALS, _by_label({tier: each.arrivals for tier, each in counts.items()})
        yield names.ROUTER_TIER_REJECTED, _by_label({tier: each.rejected for tier, each in counts.items()})
        yield names.ROUTER_TIER_SHED, _by_label({tier: each.shed for tier, each in counts.items()})
        yield names.ROUTER_TIER_DOWNGRADED, _by_label(downgraded)
        gauges: Mapping[str, Callable[[Tier], float | None]] = {
            names.ROUTER_TIER_WAITING: lambda tier: waiting.get(tier, 0),
            names.ROUTER_TIER_COMPLIANCE: lambda tier: monitor.compliance(tier, now_s),
            names.ROUTER_TIER_SHARE_DEVIATION: lambda tier: control.share_deviation(tier, now_s),
            names.ROUTER_TIER_SHED_FRACTION: monitor.shed_fraction,
        }
        for name, read in gauges.items():
            yield name, [((tier.value,), read(tier)) for tier in Tier]
        yield names.ROUTER_TIER_TTFT, _by_label({tier: each.ttft for tier, each in counts.items()})
        yield names.ROUTER_TIER_E2E, _by_label({tier: each.e2e for tier, each in counts.items()})
        yield (
            names.ROUTER_TIER_QUEUE_TIME,
            _by_label({tier: each.queue_time for tier, each in counts.items()}),
        )


def _of_kv_events(listener: KvListener) -> Iterator[tuple[str, _Rows]]:
    yield names.ROUTER_WORKER_PREFIX_BLOCKS, _by_label(listener.blocks())
    yield names.ROUTER_KV_EVENT_BATCHES, [((), listener.batches)]
    yield names.ROUTER_KV_EVENT_GAPS, [((), listener.gaps)]
    yield names.ROUTER_KV_EVENTS_MALFORMED, [((), listener.malformed)]


_Label = TypeVar("_Label", bound=str)


def _by_label(counts: Mapping[_Label, float | BucketCounts]) -> _Rows:
    return [((key,), count) for key, count in counts.items()]


def _family(name: str, rows: _Rows) -> Metric:
    """Return a metric with its samples."""
    series = SERIES[name]
    family = series.family(name, series.text, labels=series.labels)
    add: Callable[..., None] = family.add_metric
    for key, value in rows:
        if isinstance(value, BucketCounts):
            add(key, _buckets(value), value.total)
        elif value is not None:
            add(key, value)
    return family


def _buckets(counts: BucketCounts) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    edges = (*map(str, counts.bounds), "+Inf")
    rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = [
        *zip(edges, map(float, counts.cumulative()), strict=True)
    ]
    for place, (trace_id, value, at_s) in counts.exemplars.items():
        rows[place] = (*rows[place][:2], Exemplar({"trace_id": trace_id}, value, at_s))
    return rows


def _key(worker: Worker) -> tuple[str, str]:
    return worker.name, worker.spec.role.value


def _is_ready(worker: Worker, now_s: float) -> bool:
    return worker.state(now_s)[0] is WorkerState.READY


def _active_blocks(worker: Worker) -> int | None:
    blocks, usage = worker.kv_total_blocks, worker.kv_usage_fraction
    return None if blocks is None or usage is None else round(usage * blocks)
