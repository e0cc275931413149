"""What came to a router in the last minute, for people: ``GET /workers``, `penstock status` and `penstock doctor`. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.histogram import quantile
from penstock.router.metrics import RouterMetrics

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
