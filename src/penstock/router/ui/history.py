"""The last quarter of an hour of one router for its live page: fleet, queue, traffic and latencies. Pure.

All times are simulated seconds. What is unknown is None, never zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from penstock.core.histogram import BucketCounts, quantile, share_within
from penstock.router.core.tiers import TierControl
from penstock.router.metrics import RouterMetrics

STEP_S: Final = 5.0
"""Between two points. Chosen: a dozen of them make a minute."""
_WINDOW: Final = 12
"""Steps over which latencies and rejections are summed: a minute, as `penstock status` has it."""
_TIER_COUNTS: Final = ("arrivals", "rejected", "shed")
_POINTS: Final = 180
"""Chosen: a quarter of an hour, in which a fleet has started and left again."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What holds at one moment.

    Attributes:
        ready: Ready replicas by role.
        gpus: GPUs of all workers that discovery lists; None: the graph's GPUs are not known.
        queued: Requests that wait for the first stage.
        kv_usage_fraction: Mean over the ready decode (or aggregated) workers; None: no reading.
    """

    ready: Mapping[str, int]
    gpus: int | None
    queued: int
    kv_usage_fraction: float | None


@dataclass(frozen=True, slots=True)
class Targets:
    """TTFT, and ITL where the graph has a target for it; simulated seconds."""

    ttft_s: float
    itl_s: float | None


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters at one moment; histograms cumulative by bound, tiers as in `_TIER_COUNTS`."""

    at_s: float
    arrivals: int
    refused: int
    timed_out: int
    completed: int
    ttft: tuple[int, ...]
    itl: tuple[int, ...]
    tiers: Mapping[str, tuple[int, int, int]]

    @classmethod
    def of(cls, metrics: RouterMetrics, tiers: TierControl | None, now_s: float) -> _Counts:
        """Read the counters."""
        by_tier = {} if tiers is None else tiers.counts
        return cls(
            now_s,
            metrics.arrivals,
            metrics.refused,
            metrics.queue_timeouts,
            metrics.completed,
            tuple(metrics.ttft.cumulative()),
            tuple(metrics.itl.cumulative()),
            {tier.value: (each.arrivals, each.rejected, each.shed) for tier, each in by_tier.items()},
        )


@dataclass(slots=True)
class Cost:
    """GPU-seconds held, and what fleets of a fixed size would have held in the same time; simulated.

    Attributes:
        gpu_seconds: GPUs held, integrated over ``elapsed_s``.
        most_gpus: The most that were held at once.
        elapsed_s: Time in which GPUs were known.
    """

    gpu_seconds: float = 0.0
    most_gpus: int = 0
    elapsed_s: float = 0.0
    _gpus: int | None = None
    _at_s: float = 0.0

    def note(self, gpus: int | None, now_s: float) -> None:
        """Take the GPUs that are held from now on."""
        if self._gpus is not None:
            self.gpu_seconds += self._gpus * (now_s - self._at_s)
            self.elapsed_s += now_s - self._at_s
        self._gpus, self._at_s = gpus, now_s
        self.most_gpus = max(self.most_gpus, gpus or 0)

    def to_json(self, budget: int | None) -> dict[str, Any] | None:
        """Return it beside fleets fixed at the most held and at the budget; None while nothing is known."""
        if not self.elapsed_s:
            return None
        sizes = {"most": self.most_gpus, **({} if budget is None else {"budget": budget})}
        fixed = {name: {"gpus": size, "gpu_seconds": size * self.elapsed_s} for name, size in sizes.items()}
        return {"elapsed_s": self.elapsed_s, "gpu_seconds": self.gpu_seconds, "fixed": fixed}


@dataclass(slots=True)
class History:
    """Marks a router's counters and gauges.

    Attributes:
        metrics: The counters.
        tiers: Counters by tier; None: the graph has no tiers.
        gauges: Reads what holds now.
        targets: To measure the latencies by.
        cost: Since the router's start.
    """

    metrics: RouterMetrics
    tiers: TierControl | None
    gauges: Callable[[], Gauges]
    targets: Targets
    cost: Cost = field(default_factory=Cost)
    _counts: deque[_Counts] = field(default_factory=lambda: deque(maxlen=_WINDOW + 1))
    _points: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_POINTS))

    def tick(self, now_s: float) -> None:
        """Mark once in a step; called again and again."""
        if not self._counts or now_s - self._counts[-1].at_s >= STEP_S:
            self._mark(now_s)

    def minute(self, now_s: float) -> dict[str, Any]:
        """Return traffic and latencies of the last minute, or of the time since the start."""
        now = _Counts.of(self.metrics, self.tiers, now_s)
        then = next((each for each in self._counts if each.at_s >= now_s - _WINDOW * STEP_S), now)
        ttft, itl = self._latencies(then, now)
        return {
            "period_s": now.at_s - then.at_s,
            "arrivals": now.arrivals - then.arrivals,
            "completed": now.completed - then.completed,
            "refused": now.refused - then.refused,
            "timed_out": now.timed_out - then.timed_out,
            "ttft": ttft,
            "itl": itl,
            "tiers": {
                tier: {name: b - a for name, a, b in zip(_TIER_COUNTS, then.tiers[tier], counts, strict=True)}
                for tier, counts in now.tiers.items()
            },
        }

    def traffic(self, now_s: float) -> dict[str, Any]:
        """Return what ``GET /workers`` says of the last minute; without a stream no TTFT is known."""
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

    def series(self) -> list[dict[str, Any]]:
        """Return the points, oldest first."""
        return list(self._points)

    def _mark(self, now_s: float) -> None:
        now, gauges = _Counts.of(self.metrics, self.tiers, now_s), self.gauges()
        self.cost.note(gauges.gpus, now_s)
        before = self._counts[-1] if self._counts else None
        self._counts.append(now)
        ttft, itl = self._latencies(self._counts[0], now)
        step_s = 0.0 if before is None else now.at_s - before.at_s
        rates: tuple[float | None, float | None] = (None, None)
        if before is not None and step_s > 0:
            rejected = now.refused + now.timed_out - before.refused - before.timed_out
            rates = ((now.arrivals - before.arrivals) / step_s, rejected / step_s)
        self._points.append(
            {
                "at_s": now_s,
                **asdict(gauges),
                "arrivals_per_s": rates[0],
                "rejected_per_s": rates[1],
                **{f"ttft_{key}": ttft[key] for key in ("p99_s", "in_time")},
                **{f"itl_{key}": itl[key] for key in ("p99_s", "in_time")},
            }
        )

    def _latencies(self, then: _Counts, now: _Counts) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return TTFT and ITL between two marks; a rejected request counts as one that missed its TTFT."""
        rejected = now.refused + now.timed_out - then.refused - then.timed_out
        metrics, targets = self.metrics, self.targets
        return (
            _latency(_gained(metrics.ttft, then.ttft, now.ttft), targets.ttft_s, missed=rejected),
            _latency(_gained(metrics.itl, then.itl, now.itl), targets.itl_s),
        )


def _gained(counts: BucketCounts, then: tuple[int, ...], now: tuple[int, ...]) -> list[tuple[float, float]]:
    bounds = (*counts.bounds, float("inf"))
    return [(bound, float(b - a)) for bound, a, b in zip(bounds, then, now, strict=True)]


def _latency(
    buckets: Sequence[tuple[float, float]], target_s: float | None, *, missed: int = 0
) -> dict[str, Any]:
    samples = buckets[-1][1]
    # Without a sample nothing says what an answered request waited: complete answers have no first token.
    in_time = None if target_s is None or not samples else share_within(buckets, target_s, missed=missed)
    return {
        "p50_s": quantile(buckets, 0.5),
        "p99_s": quantile(buckets, 0.99),
        "target_s": target_s,
        "in_time": in_time,
        "samples": int(samples),
    }
