"""What operators and the supervisor ask: health, readiness, the workers, their drain, recent traffic and thresholds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.core.clock import SimulatedClock
from penstock.core.histogram import quantile
from penstock.router.admission import Admission
from penstock.router.core.worker import Worker
from penstock.router.metrics import QueueGauges, RouterMetrics

WINDOW_S: Final = 60.0
"""Simulated seconds looked back. Chosen: an overload that began half a minute ago shows, one of an hour ago does not."""

_STEP_S: Final = 5.0
"""Simulated seconds between two marks. Chosen: a dozen marks for a window."""


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


class Admin:
    """Answers from the workers' states at the moment of asking."""

    def __init__(
        self,
        admission: Admission,
        metrics: RouterMetrics,
        traffic: RecentTraffic,
        *,
        clock: SimulatedClock,
        discovery_problem: Callable[[], str | None],
    ) -> None:
        self._admission = admission
        self._pool = admission.core.pool
        self._metrics = metrics
        self._traffic = traffic
        self._clock = clock
        self._now_s = clock.now_s
        self._discovery_problem = discovery_problem
        self.stopping = False

    def health(self) -> tuple[int, bytes]:
        """Return 200: the process is alive, whatever its workers do."""
        return 200, b'{"status":"ok"}'

    def ready(self) -> tuple[int, bytes]:
        """Return 200 if a request would be served now, else 503 with the reasons."""
        reasons = self._admission.problems()
        if self.stopping:
            reasons.append("the router is stopping")
        discovery = self._discovery_problem()
        if discovery is not None and reasons:
            reasons.append(f"discovery: {discovery}")
        if reasons:
            return 503, orjson.dumps({"status": "not ready", "reasons": reasons})
        return 200, b'{"status":"ready","reasons":[]}'

    def workers(self, *, shows_urls: bool) -> bytes:
        """Return ``{"workers", "prefill_queue", "traffic", "discovery_problem", "lag_p99_s", "speed"}``.

        Args:
            shows_urls: Whether the asker may know where the workers are; ``url`` is left out otherwise.
        """
        now_s = self._now_s()
        queue = self.queue_gauges()
        return orjson.dumps(
            {
                "workers": [self._shown(worker, now_s, shows_url=shows_urls) for worker in self._pool],
                "prefill_queue": {
                    "requests": queue.requests,
                    "tokens": queue.tokens,
                    "oldest_s": round(queue.oldest_s, 6),
                },
                "traffic": self._traffic.to_json(now_s),
                "discovery_problem": self._discovery_problem(),
                "lag_p99_s": self._metrics.lag.p99_s(),
                "speed": self._clock.speed,
            }
        )

    def queue_gauges(self) -> QueueGauges:
        """Return the prefill queue's numbers."""
        queue = self._admission.core.entry_queue
        oldest_s = queue.oldest_s(self._now_s())
        return QueueGauges(len(queue), queue.tokens, oldest_s, queue.prompt_tokens.copy())

    def drain(self, name: str, *, drained: bool) -> bytes:
        """Stop (or allow again) new requests to a worker; done when this returns.

        Raises:
            NotFoundError: no worker has that name.
        """
        self._admission.set_drained(name, drained=drained)
        return orjson.dumps({"name": name, "inflight_requests": self._pool.inflight_requests(name)})

    def _shown(self, worker: Worker, now_s: float, *, shows_url: bool) -> dict[str, Any]:
        state, reason = worker.state(now_s)
        return {
            "name": worker.name,
            "role": worker.spec.role.value,
            **({"url": worker.spec.url} if shows_url else {}),
            "state": state.value,
            "inflight_requests": self._pool.inflight_requests(worker.name),
            "inflight_tokens": worker.inflight_tokens,
            "kv_usage_fraction": worker.kv_usage_fraction,
            "reason": reason,
        }
