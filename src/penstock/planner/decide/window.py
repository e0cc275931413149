"""The interval's means: KV usage of the decode workers, queued requests, and the queue's newest trend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.api import Role
from penstock.planner.decide.observation import Pull, Window
from penstock.planner.decide.reading import Quality

WAITING_KV = 0.02
"""KV usage that a waiting request adds; the figure of the document's planner."""

_NEWEST = 3
"""Chosen: the trend is that of the newest third of the known pulls, ten of thirty: long enough for a line, short enough
that a queue which has turned is seen to have turned."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One role's load over an interval, with bounds for what is unknown.

    Attributes:
        mean: Mean of what is known; None when nothing is.
        low: The same with every unknown counted as 0: the load is at least this. None when nothing is known.
        is_complete: Every pull knew every ready worker; only then may the role shrink.
        pulls: Pulls in the interval.
        unknown: Pulls that missed something.
        source: Who gave the newest value.
        why: Why something is unknown, from the newest such pull.
    """

    mean: float | None
    low: float | None
    is_complete: bool
    pulls: int
    unknown: int
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class _Gaps:
    unknown: int
    source: str
    why: str


def kv_signal(pulls: Sequence[Pull]) -> Signal:
    """Return the mean over the pulls of the mean KV usage fraction over the ready workers.

    A request that waits inside the workers, and in an aggregated graph one that waits in the routers, adds
    `WAITING_KV` of one worker: a saturated pool whose KV is not full is busy. May exceed 1.

    A pull with an unknown worker gives two numbers: the mean of the known workers, for people, and a lower
    bound with the unknown counted as empty, as the Kubernetes HPA does before it scales up. A pull that knew
    nobody counts as 0 in the bound and is left out of the mean.

    Example: two workers at 0.98 and unknown: mean 0.98, low 0.49, incomplete.
    """
    means: list[float] = []
    low_sum = 0.0
    unknown = 0
    source = why = ""
    for pull in pulls:
        kv = pull.kv
        if kv.fresh:
            load = kv.total + WAITING_KV * _waiting(pull)
            means.append(load / kv.fresh)
            low_sum += load / (kv.fresh + kv.unknown)
            source = kv.source
        if kv.unknown or not kv.fresh:
            unknown += 1
            why = kv.why or "no ready worker"
    return _signal(means, low_sum, len(pulls), _Gaps(unknown, source, why))


def _waiting(pull: Pull) -> float:
    inside = pull.worker_waiting.total if pull.worker_waiting is not None else 0.0
    is_aggregated = Role.AGGREGATED in pull.pools
    return inside + (pull.demand.waiting if is_aggregated and pull.demand is not None else 0.0)


def queue_signal(pulls: Sequence[Pull], *, per_worker: bool) -> Signal:
    """Return the mean over the pulls of queued requests, ``per_worker`` divided by ready prefill workers.

    A pull without a known queue, or without a ready prefill worker to divide by, is unknown: 0 in the lower
    bound and left out of the mean. A queue that is only a lower bound counts with its value and makes the
    interval incomplete.
    """
    points, gaps = _queue_points(pulls, per_worker=per_worker)
    values = [value for _, value in points]
    return _signal(values, sum(values), len(pulls), gaps)


def queue_trend(window: Window, horizon_s: float, *, per_worker: bool) -> tuple[float, float] | None:
    """Return (slope, predicted) of the queue.

    The slope is the least-squares line through the newest third of the interval's known pulls (t, q), two at least,
    ``b = sum((t - mean t)(q - mean q)) / sum((t - mean t)^2)`` in requests per second. The line's value at the
    interval's end plus ``b * horizon_s`` is the prediction; it may be below 0. The newest third rather than all: a
    queue that fell and rises again is rising, and a burst that is over is over.

    Example: pulls at t = 1..30 s with q = 4 - 0.05 t. b = -0.05, the line ends at 2.5, and three intervals
    of 30 s later it is 2.5 - 0.05 * 90 = -2.0, below 0.5: the queue drains by itself.
    With q = 4 - 0.01 t it ends at 3.7 and predicts 3.7 - 0.9 = 2.8: scale up.

    Returns:
        None when fewer than two pulls at different times are known in full: no trend.
    """
    whole = [pull for pull in window.pulls if pull.queue is None or not pull.queue.at_least]
    points, _ = _queue_points(whole, per_worker=per_worker)
    if len(points) < 2:
        return None
    points = points[-max(2, len(points) // _NEWEST) :]
    mean_t = sum([t for t, _ in points]) / len(points)
    mean_q = sum([q for _, q in points]) / len(points)
    spread = product = 0.0
    for t, q in points:
        spread += (t - mean_t) * (t - mean_t)
        product += (t - mean_t) * (q - mean_q)
    if spread == 0:
        return None
    slope = product / spread
    return slope, mean_q + slope * (window.end_s - mean_t + horizon_s)


def _queue_points(pulls: Iterable[Pull], *, per_worker: bool) -> tuple[list[tuple[float, float]], _Gaps]:
    points: list[tuple[float, float]] = []
    unknown = 0
    source = why = ""
    # Looked up once: this loop is most of what a decision costs.
    prefill, is_fresh = Role.PREFILL, Quality.FRESH
    for pull in pulls:
        queue = pull.queue
        pool = pull.pools.get(prefill)
        if queue is None or queue.value is None or queue.quality is not is_fresh:
            unknown += 1
            why = queue.why if queue is not None else "not reported"
        elif pool is None or pool.ready == 0:
            unknown += 1
            why = "no ready worker"
        else:
            points.append((pull.at_s, queue.value / pool.ready if per_worker else queue.value))
            source = queue.source
            if queue.at_least:
                unknown += 1
                why = f"{queue.source} sees only the workers' own queues"
    return points, _Gaps(unknown, source, why)


def _signal(values: Sequence[float], low_sum: float, pulls: int, gaps: _Gaps) -> Signal:
    return Signal(
        mean=sum(values) / len(values) if values else None,
        low=low_sum / pulls if values else None,
        is_complete=bool(values) and gaps.unknown == 0,
        pulls=pulls,
        unknown=gaps.unknown,
        source=gaps.source,
        why=gaps.why,
    )
