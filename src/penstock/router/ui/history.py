"""The last quarter of an hour of one router, for its live page: fleet, queue, traffic and latencies. Pure.

All times are in simulated seconds. Unknown values are None, never zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from penstock.core.histogram import BucketCounts, quantile, share_within
from penstock.router.core.tiers import TierControl
from penstock.router.metrics import RouterMetrics

STEP_S: Final = 5.0
"""Interval between two points in simulated seconds. Chosen: a dozen of them make a minute."""
_WINDOW: Final = 12
"""Number of steps over which latencies and rejections are summed: a minute, as in `penstock status`."""
_POINTS: Final = 180
"""Chosen: a quarter of an hour, in which a fleet has started and left again."""


class _Snapshot(NamedTuple):
    """Snapshot of the counters; histograms are cumulative by bound."""

    at_s: float
    counts: Mapping[str, int]
    tiers: Mapping[str, Mapping[str, int]]
    ttft: tuple[int, ...]
    itl: tuple[int, ...]


class Cost:
    """Sums the GPU-seconds that the graph has used, and calculates, for comparison, those of fleets of a fixed size.

    They count from the time at which the number of GPUs was first known. All times are in simulated seconds.
    """

    def __init__(self) -> None:
        self._gpu_seconds = 0.0
        self._elapsed_s = 0.0
        self._peak_gpus = 0
        self._gpus: int | None = None
        self._at_s = 0.0

    def record(self, gpus: int | None, now_s: float) -> None:
        """Record the number of GPUs that the graph uses from ``now_s`` (simulated seconds) on; None if it is unknown."""
        if self._gpus is not None:
            self._gpu_seconds += self._gpus * (now_s - self._at_s)
            self._elapsed_s += now_s - self._at_s
        self._gpus, self._at_s = gpus, now_s
        self._peak_gpus = max(self._peak_gpus, gpus or 0)

    def to_json(self, budget: int | None) -> dict[str, Any] | None:
        """Return the GPU-seconds used, and those that fleets of a fixed size would have used; None if no time was recorded.

        The sizes are the maximum number of GPUs in use so far (``peak``) and the budget of the graph. The result contains
        ``elapsed_s`` (simulated seconds), ``gpu_seconds`` and ``fixed`` (GPUs and GPU-seconds by name of the size).

        ``budget`` is the maximum number of GPUs of the graph; None leaves out the fleet of that size.
        """
        if not self._elapsed_s:
            return None
        sizes = {"peak": self._peak_gpus, **({} if budget is None else {"budget": budget})}
        fixed = {name: {"gpus": size, "gpu_seconds": size * self._elapsed_s} for name, size in sizes.items()}
        return {"elapsed_s": self._elapsed_s, "gpu_seconds": self._gpu_seconds, "fixed": fixed}


class RouterHistory:
    """Records snapshots of a router's counters and gauges, for its live page. Times are in simulated seconds.

    Attributes:
        ttft_target_s: TTFT target in simulated seconds.
        itl_target_s: ITL target in simulated seconds; None if the graph has none.
        cost: GPU-seconds since the router's start.
        points: Values to plot, the oldest first, one per 5 simulated seconds (`STEP_S`), for a quarter of an hour.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        tiers: TierControl | None,
        gauges: Callable[[], Mapping[str, Any]],
        ttft_target_s: float,
    ) -> None:
        """Create an empty history.

        Args:
            metrics: Counters of the router.
            tiers: Counters by tier; None if tiers are disabled.
            gauges: Returns the present values of gauges by name; ``gpus`` must be among them (None if unknown).
            ttft_target_s: TTFT target in simulated seconds.
        """
        self._metrics = metrics
        self._tiers = tiers
        self._gauges = gauges
        self.ttft_target_s = ttft_target_s
        self.itl_target_s: float | None = None
        self.cost = Cost()
        self.points: deque[dict[str, Any]] = deque(maxlen=_POINTS)
        self._snapshots: deque[_Snapshot] = deque(maxlen=_WINDOW + 1)

    def tick(self, now_s: float) -> None:
        """Record a snapshot if the last one is at least 5 simulated seconds old (`STEP_S`); called more often than that."""
        if not self._snapshots or now_s - self._snapshots[-1].at_s >= STEP_S:
            self._record(now_s)

    def minute(self, now_s: float) -> dict[str, Any]:
        """Return the figures of the last simulated minute, by name; of the time since the start if that is shorter.

        They are ``period_s`` (length of the time), the increases of the router's counters (``arrivals``, ``refused`` and so
        on), percentiles of latencies (``ttft`` and so on, in simulated seconds), and ``tiers`` (increases by tier).
        """
        now = self._read(now_s)
        then = next((each for each in self._snapshots if each.at_s >= now_s - _WINDOW * STEP_S), now)
        return {
            "period_s": now.at_s - then.at_s,
            **_increases(then.counts, now.counts),
            **self._latencies(then, now),
            "tiers": {tier: _increases(then.tiers[tier], counts) for tier, counts in now.tiers.items()},
        }

    def series(self, now_s: float, minute: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the values to plot: `points`, and a last one for the present time.

        Each point is a dict with the time (``at_s``, simulated seconds) and the values by name. The last point contains the
        figures of ``minute``, the result of the method `minute`; its rates are those of the last complete step of 5 s.
        """
        points = list(self.points)
        rates = ("arrivals_per_s", "rejected_per_s")
        last = points[-1] if points else dict.fromkeys(rates)
        now = {"at_s": now_s, **self._gauges(), **{name: last[name] for name in rates}, **_shares(minute)}
        return [*points, now] if not points or now_s > points[-1]["at_s"] else [*points[:-1], now]

    def traffic(self, now_s: float) -> dict[str, Any]:
        """Return the summary of the last simulated minute that ``GET /workers`` shows, by name.

        It contains numbers of requests (``arrivals``, ``rejected`` and so on) and percentiles of TTFT in simulated seconds,
        which are None if there was no stream.
        """
        minute = self.minute(now_s)
        ttft = minute["ttft"]
        return {
            "period_s": minute["period_s"],
            "arrivals": minute["arrivals"],
            "rejected": minute["refused"] + minute["timed_out"],
            "ttft_p50_s": ttft["p50_s"],
            "ttft_p99_s": ttft["p99_s"],
            "ttft_slo_s": ttft["target_s"],
        }

    def _read(self, now_s: float) -> _Snapshot:
        metrics, tiers = self._metrics, {} if self._tiers is None else self._tiers.counts
        counts = {
            "arrivals": metrics.arrivals,
            "completed": metrics.completed,
            "refused": metrics.refused,
            "timed_out": metrics.queue_timeouts,
        }
        by_tier = {
            tier.value: {"arrivals": each.arrivals, "rejected": each.rejected, "shed": each.shed}
            for tier, each in tiers.items()
        }
        return _Snapshot(
            now_s, counts, by_tier, tuple(metrics.ttft.cumulative()), tuple(metrics.itl.cumulative())
        )

    def _record(self, now_s: float) -> None:
        now, gauges = self._read(now_s), self._gauges()
        before = self._snapshots[-1] if self._snapshots else None
        self.cost.record(gauges["gpus"], now_s)
        self._snapshots.append(now)
        arrivals_per_s = rejected_per_s = None
        if before is not None and now_s > before.at_s:
            increases, step_s = _increases(before.counts, now.counts), now_s - before.at_s
            arrivals_per_s = increases["arrivals"] / step_s
            rejected_per_s = (increases["refused"] + increases["timed_out"]) / step_s
        latencies = self._latencies(self._snapshots[0], now)
        self.points.append(
            {
                "at_s": now_s,
                **gauges,
                "arrivals_per_s": arrivals_per_s,
                "rejected_per_s": rejected_per_s,
                **_shares(latencies),
            }
        )

    def _latencies(self, then: _Snapshot, now: _Snapshot) -> dict[str, dict[str, Any]]:
        """Return TTFT and ITL between two snapshots; a rejected request counts as one that missed its TTFT target."""
        increases = _increases(then.counts, now.counts)
        missed, metrics = increases["refused"] + increases["timed_out"], self._metrics
        return {
            "ttft": _latency(metrics.ttft, then.ttft, now.ttft, self.ttft_target_s, missed=missed),
            "itl": _latency(metrics.itl, then.itl, now.itl, self.itl_target_s),
        }


def _shares(latencies: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{of}_{key}": latencies[of][key] for of in ("ttft", "itl") for key in ("p99_s", "in_time")}


def _increases(then: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: count - then[name] for name, count in now.items()}


def _latency(
    counts: BucketCounts,
    then: tuple[int, ...],
    now: tuple[int, ...],
    target_s: float | None,
    *,
    missed: int = 0,
) -> dict[str, Any]:
    bounds = (*counts.bounds, float("inf"))
    buckets = [(bound, float(b - a)) for bound, a, b in zip(bounds, then, now, strict=True)]
    samples = buckets[-1][1]
    # Without a sample the waits of answered requests are unknown, because non-streaming responses have no first token.
    in_time = None if target_s is None or not samples else share_within(buckets, target_s, missed=missed)
    return {
        "p50_s": quantile(buckets, 0.5),
        "p99_s": quantile(buckets, 0.99),
        "target_s": target_s,
        "in_time": in_time,
        "samples": int(samples),
    }
