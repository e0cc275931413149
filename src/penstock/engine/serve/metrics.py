"""The worker's /metrics page: vLLM's names, labels and buckets; every time is in simulated seconds.

The page is formatted directly instead of by prometheus_client, because it is scraped up to ten times per wall-clock
second and worker, on the same CPU that serves tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Final

from prometheus_client.utils import floatToGoString

from penstock.core import metric_names as names
from penstock.core.clock import LagTracker
from penstock.core.histogram import REQUEST_BOUNDS_S, TOKEN_GAP_BOUNDS_S, TTFT_BOUNDS_S, BucketCounts
from penstock.core.tiers import TierPriority, tier_of
from penstock.engine.core.engine import Engine, StepOutcome
from penstock.engine.core.request_slots import RequestSlots
from penstock.engine.core.requests import (
    EngineCounters,
    FinishReason,
    LeaseTerm,
    PreemptionKind,
    RequestState,
)
from penstock.engine.core.timeline import Timeline
from penstock.engine.core.transfer import Transfer
from penstock.engine.serve.settings import ServeSettings

TRANSFER_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
"""Bucket bounds of the duration of KV transfers, in simulated seconds."""
TRANSFER_BOUNDS_BYTES: Final = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))
"""Bucket bounds of the size of KV transfers, in bytes."""
STEP_BOUNDS_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bucket bounds of the tokens per step."""


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """Return vLLM's bucket bounds of token counts: 1, 2, 5, 10, … up to ``max_model_len``."""
    bounds = []
    power = 1
    while power <= max_model_len:
        bounds += [float(digit * power) for digit in (1, 2, 5) if digit * power <= max_model_len]
        power *= 10
    return tuple(bounds)


class Histogram(BucketCounts):
    """A histogram with a metric name.

    Attributes:
        name: Name of the metric.
    """

    def __init__(self, name: str, bounds: Sequence[float], labels: str) -> None:
        super().__init__(bounds)
        self.name = name
        # Formatted as on vLLM's page, such as ``2.097152e+06`` above a million.
        edges = [floatToGoString(edge) for edge in (*self.bounds, math.inf)]  # type: ignore[no-untyped-call]
        self._heads = [f'{name}_bucket{{{labels},le="{edge}"}} ' for edge in edges]
        self._heads += [f"{name}_sum{{{labels}}} ", f"{name}_count{{{labels}}} "]

    def lines(self) -> list[str]:
        """Return the sample lines in the Prometheus text format."""
        counts = self.cumulative()
        values = [*counts, repr(self.total), counts[-1]]
        return [f"{head}{value}" for head, value in zip(self._heads, values, strict=True)]


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Read = Callable[[], float]
"""Function that returns the current value of a metric."""


class IgnoredNotification(StrEnum):
    """Reason why a notification, or a request ID in it, was ignored.

    Attributes:
        MALFORMED: The message is invalid.
        WRONG_ENGINE: The message names another process, for example one that ran at this address before.
        UNKNOWN_REQUEST: The request has no lease (time for which the worker keeps its KV), or none any more.
    """

    MALFORMED = "malformed"
    WRONG_ENGINE = "wrong_engine"
    UNKNOWN_REQUEST = "unknown_request"


class EngineMetrics:
    """Collects metrics of the worker, and renders the /metrics page. Times are simulated seconds.

    Attributes:
        finished: Number of ended requests by finish reason.
        failed_transfers: Number of requests whose KV could not be fetched.
        failed_notifications: Number of notifications to other workers that failed or were not accepted.
        heartbeats_sent: Number of heartbeat messages sent.
        heartbeats_received: Number of heartbeat messages received.
        ignored: Number of ignored notifications or request IDs by reason.
    """

    def __init__(
        self,
        settings: ServeSettings,
        timeline: Timeline,
        lag: LagTracker,
        slots: RequestSlots[Any],
        *,
        now_s: Callable[[], float],
    ) -> None:
        """Create the metrics.

        Args:
            settings: Settings of the worker.
            timeline: Timeline with the engine.
            lag: Samples of how late, in simulated seconds, the worker processed its steps.
            slots: Requests that are in the engine or wait for it.
            now_s: Function that returns the simulated time in seconds.
        """
        self._now_s = now_s
        self._slots = slots
        self._timeline = timeline
        self._lag = lag
        self._labels = f'engine="0",model_name="{_escape(settings.served_names[0])}"'
        self.finished = dict.fromkeys(FinishReason, 0)
        self.failed_transfers = 0
        self.failed_notifications = 0
        self.heartbeats_sent = 0
        self.heartbeats_received = 0
        self.ignored: Counter[IgnoredNotification] = Counter()
        tokens = token_buckets(settings.max_model_len)
        self._ttft = Histogram(names.VLLM_TTFT, TTFT_BOUNDS_S, self._labels)
        self._itl = Histogram(names.VLLM_ITL, TOKEN_GAP_BOUNDS_S, self._labels)
        self._tpot = Histogram(names.VLLM_TPOT, TOKEN_GAP_BOUNDS_S, self._labels)
        self._e2e = Histogram(names.VLLM_E2E, REQUEST_BOUNDS_S, self._labels)
        self._queue = Histogram(names.VLLM_QUEUE_TIME, REQUEST_BOUNDS_S, self._labels)
        self._prefill = Histogram(names.VLLM_PREFILL_TIME, REQUEST_BOUNDS_S, self._labels)
        self._decode = Histogram(names.VLLM_DECODE_TIME, REQUEST_BOUNDS_S, self._labels)
        self._inference = Histogram(names.VLLM_INFERENCE_TIME, REQUEST_BOUNDS_S, self._labels)
        self._prompt_tokens = Histogram(names.VLLM_REQUEST_PROMPT_TOKENS, tokens, self._labels)
        self._generation_tokens = Histogram(names.VLLM_REQUEST_GENERATION_TOKENS, tokens, self._labels)
        self._step_tokens = Histogram(names.VLLM_ITERATION_TOKENS, STEP_BOUNDS_TOKENS, self._labels)
        self._transfer_s = Histogram(names.VLLM_NIXL_XFER_TIME, TRANSFER_BOUNDS_S, self._labels)
        self._transfer_bytes = Histogram(names.VLLM_NIXL_BYTES, TRANSFER_BOUNDS_BYTES, self._labels)
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]
        self._static_lines = self._list_static(settings)
        self._gauges = self._list_gauges(timeline.engine)
        self._counters = self._list_counters(timeline.engine)

    # -- observations ---------------------------------------------------------------------------------

    def observe_step(self, outcome: StepOutcome) -> None:
        """Add a step's tokens, inter-token latencies and TTFTs."""
        self._step_tokens.observe(outcome.computed_tokens)
        if outcome.steady_tokens:
            self._itl.observe(outcome.gap_s, outcome.steady_tokens)
        for gap_s in outcome.late_gaps_s:
            self._itl.observe(gap_s)
        for state in outcome.started:
            self._ttft.observe(outcome.end_s - state.request.arrival_s)

    def observe_transfer(self, transfer: Transfer) -> None:
        """Add a completed KV transfer."""
        self._transfer_s.observe(transfer.done_s - transfer.started_s)
        self._transfer_bytes.observe(transfer.bytes)

    def observe_finished(self, state: RequestState) -> None:
        """Add a request that ran to its end; a request without a first output is ignored."""
        reason, end_s = state.finish_reason, state.finished_s
        scheduled_s, first_s = state.first_scheduled_s, state.first_token_s
        if reason is None or end_s is None or scheduled_s is None or first_s is None:
            return
        request = state.request
        self.finished[reason] += 1
        self._e2e.observe(end_s - request.arrival_s)
        self._queue.observe(scheduled_s - request.arrival_s)
        self._prefill.observe(first_s - scheduled_s)
        self._decode.observe(end_s - first_s)
        self._inference.observe(end_s - scheduled_s)
        self._prompt_tokens.observe(request.prompt_tokens)
        self._generation_tokens.observe(state.outputs)
        if state.outputs > 1:
            self._tpot.observe((end_s - first_s) / (state.outputs - 1))

    # -- the page -------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """Return the /metrics page in version 0.0.4 of the Prometheus text format."""
        labels = self._labels
        page = []
        for kind, suffix, metrics in (
            ("gauge", "", self._gauges),
            ("counter", names.COUNTER_SUFFIX, self._counters),
        ):
            for name, series in metrics.items():
                sample = name + suffix
                page += _title(name, sample, kind)
                page += [f"{sample}{{{labels}{extra}}} {read()!r}" for extra, read in series]
        for item in self._histograms:
            page += _title(item.name, item.name, "histogram")
            page += item.lines()
        page += self._static_lines
        page += self._lag_lines()
        page.append("")
        return "\n".join(page).encode()

    def _list_static(self, settings: ServeSettings) -> list[str]:
        """Return the lines that never change; in vLLM they have other labels than the rest."""
        info, engine = names.VLLM_CACHE_CONFIG_INFO, settings.engine
        return [
            *_title(info, info, "gauge"),
            (
                f'{info}{{engine="0",block_size="{engine.limits.block_size}",num_gpu_blocks="{engine.num_blocks}",'
                f'enable_prefix_caching="{settings.flags.enable_prefix_caching}"}} 1'
            ),
            *_title(names.TIME_SCALE, names.TIME_SCALE, "gauge"),
            f"{names.TIME_SCALE} {settings.flags.speed!r}",
        ]

    def _lag_lines(self) -> list[str]:
        sample = names.SCHEDULE_LAG_SAMPLES + names.COUNTER_SUFFIX
        lines = [
            *_title(names.SCHEDULE_LAG_SAMPLES, sample, "counter"),
            f"{sample} {self._lag.total}",
        ]
        if (p99_s := self._lag.p99_s()) is not None:
            name = names.SCHEDULE_LAG_P99
            lines += [*_title(name, name, "gauge"), f"{name} {p99_s!r}"]
        return lines

    def _list_gauges(self, engine: Engine) -> dict[str, list[tuple[str, Read]]]:
        def capacity() -> int:
            return engine.batcher.waiting + self._timeline.backlog

        return {
            names.VLLM_RUNNING: [("", lambda: engine.batcher.running)],
            names.VLLM_WAITING: [("", lambda: capacity() + engine.batcher.loading)],
            names.VLLM_WAITING_BY_REASON: [
                (',reason="capacity"', capacity),
                (',reason="deferred"', lambda: engine.batcher.loading),
            ],
            names.VLLM_KV_USAGE: [("", lambda: engine.kv_usage_fraction)],
            names.ENGINE_REQUESTS: [("", lambda: self._slots.running)],
            names.ENGINE_QUEUED_REQUESTS: [("", lambda: self._slots.queued)],
            names.ENGINE_SWAPPED_BLOCKS: [("", lambda: engine.swapped_blocks)],
            names.ENGINE_RESERVED_BLOCKS: [("", lambda: engine.reserved_free_blocks)],
            names.ENGINE_LEASES: [("", lambda: len(engine.pinned))],
            names.ENGINE_LEASED_BLOCKS: [("", lambda: engine.pinned.blocks)],
            names.ENGINE_OLDEST_LEASE: [("", self._oldest_lease_s)],
        }

    def _list_counters(self, engine: Engine) -> dict[str, list[tuple[str, Read]]]:
        counters = engine.counters
        plain: dict[str, Read] = {
            names.VLLM_PROMPT_TOKENS: lambda: counters.prompt_tokens,
            names.VLLM_PROMPT_TOKENS_CACHED: lambda: counters.prompt_tokens_cached,
            names.VLLM_GENERATION_TOKENS: lambda: counters.generation_tokens,
            names.VLLM_PREEMPTIONS: lambda: counters.preemptions,
            names.ENGINE_REJECTIONS: lambda: self._slots.rejected,
            names.VLLM_PREFIX_QUERIES: lambda: counters.prefix_queries,
            names.VLLM_PREFIX_HITS: lambda: counters.prefix_hits,
            names.VLLM_EXTERNAL_PREFIX_QUERIES: lambda: counters.external_queries,
            names.VLLM_EXTERNAL_PREFIX_HITS: lambda: counters.external_hits,
            names.VLLM_NIXL_EXPIRED: counters.lease_expiries.total,
            names.VLLM_NIXL_NOTIFICATIONS_AFTER_EXPIRY: lambda: counters.notifications_after_expiry,
            names.VLLM_NIXL_FAILED_TRANSFERS: lambda: self.failed_transfers,
            names.VLLM_NIXL_FAILED_NOTIFICATIONS: lambda: self.failed_notifications,
            names.ENGINE_LEASE_RENEWALS: lambda: counters.lease_renewals,
            names.ENGINE_HEARTBEATS_SENT: lambda: self.heartbeats_sent,
            names.ENGINE_HEARTBEATS_RECEIVED: lambda: self.heartbeats_received,
        }
        listed = {name: [("", read)] for name, read in plain.items()}
        listed[names.ENGINE_PREEMPTIONS] = [
            (f',kind="{kind}",tier="{tier.name.lower()}"', partial(_preemptions, counters, kind, tier))
            for kind in PreemptionKind
            for tier in TierPriority
        ]
        listed[names.ENGINE_LEASE_EXPIRIES] = [
            (f',term="{term}"', partial(counters.lease_expiries.__getitem__, term)) for term in LeaseTerm
        ]
        listed[names.ENGINE_IGNORED_NOTIFICATIONS] = [
            (f',reason="{why}"', partial(self.ignored.__getitem__, why)) for why in IgnoredNotification
        ]
        listed[names.VLLM_REQUEST_SUCCESS] = [
            (f',finished_reason="{reason}"', partial(self.finished.__getitem__, reason))
            for reason in FinishReason
        ]
        return listed

    def _oldest_lease_s(self) -> float:
        """Return the age of the oldest lease in seconds; 0 if there is none."""
        granted_s = self._timeline.engine.pinned.oldest_s
        return 0.0 if granted_s is None else max(0.0, self._now_s() - granted_s)


def _preemptions(counters: EngineCounters, kind: PreemptionKind, tier: TierPriority) -> int:
    # A client of the worker can send any integer as priority.
    return sum(
        count
        for (of_kind, priority), count in counters.preemptions_by.items()
        if of_kind is kind and tier_of(priority) is tier
    )


def _title(name: str, sample: str, kind: str) -> list[str]:
    text = [f"# HELP {sample} {_HELP[name]}"] if name in _HELP else []
    return [*text, f"# TYPE {sample} {kind}"]


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_HELP = {
    names.ENGINE_PREEMPTIONS: "Requests thrown out of the batch, by what became of their KV and by their tier.",
    names.ENGINE_SWAPPED_BLOCKS: "KV blocks of preempted requests in host memory.",
    names.ENGINE_RESERVED_BLOCKS: "Free KV blocks that only premium and system requests may take.",
    names.ENGINE_LEASES: "Prompts kept for another worker.",
    names.ENGINE_LEASED_BLOCKS: "KV blocks kept for another worker, each counted once.",
    names.ENGINE_OLDEST_LEASE: "Age of the oldest lease, seconds; 0 without one.",
    names.ENGINE_LEASE_RENEWALS: "Leases whose end a heartbeat has moved.",
    names.ENGINE_LEASE_EXPIRIES: "Leases that ran out, by the term that did.",
    names.ENGINE_HEARTBEATS_SENT: "Heartbeat messages sent, one for each worker read from and round.",
    names.ENGINE_HEARTBEATS_RECEIVED: "Heartbeat messages received.",
    names.ENGINE_IGNORED_NOTIFICATIONS: "Notifications, or request ids in heartbeats, that changed nothing, by reason.",
    names.SCHEDULE_LAG_P99: "How late steps were processed against their schedule, simulated seconds.",
    names.SCHEDULE_LAG_SAMPLES: "Steps whose lateness was sampled.",
    names.ENGINE_REQUESTS: "Requests that the engine handles now.",
    names.ENGINE_QUEUED_REQUESTS: "Requests that wait for the engine, beyond its request limit.",
    names.ENGINE_REJECTIONS: "Requests rejected because engine and queue were full.",
    names.TIME_SCALE: "Simulated seconds per real second.",
}
"""Help texts of the metrics that are not vLLM's own."""
