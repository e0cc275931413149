"""Numbers behind the pictures: running percentiles, distributions, counts over time.

Pure: arrays in, arrays out; nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.report.ledger_view import PlannerRun
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.statistics import percentiles

Floats = NDArray[np.float64]

MAX_CURVE_POINTS: Final = 2000
"""Chosen: more points than a picture has columns."""

MAX_BINS: Final = 120
"""Chosen: bars that can still be distinguished."""


def cdf(values: Sequence[float] | NDArray[np.floating]) -> tuple[Floats, Floats]:
    """Return (sorted values, share of values at most as large), thinned to `MAX_CURVE_POINTS`."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    share = np.arange(1, ordered.size + 1) / max(1, ordered.size)
    if ordered.size > MAX_CURVE_POINTS:
        kept = np.unique(np.linspace(0, ordered.size - 1, MAX_CURVE_POINTS).astype(int))
        return ordered[kept], share[kept]
    return ordered, share


def running_percentiles(
    times: Floats, values: Floats, *, ranks: Sequence[float], window_s: float
) -> tuple[Floats, Floats]:
    """Return (times, percentiles) over half-overlapping windows.

    Args:
        times: Of the values, in any order.
        values: Same shape as ``times``.
        ranks: In percent.
        window_s: Width, > 0; the steps are half of it.

    Returns:
        The windows' centres, shape (n,), and percentiles, shape (ranks, n); NaN in windows without values.
    """
    if times.size == 0:
        return np.empty(0), np.empty((len(ranks), 0))
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    centres = np.arange(times[0], times[-1] + window_s / 2, window_s / 2)
    begins = np.searchsorted(times, centres - window_s / 2, side="left")
    ends = np.searchsorted(times, centres + window_s / 2, side="right")
    found = np.full((len(ranks), centres.size), np.nan)
    for column, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if end > begin:
            found[:, column] = percentiles(values[begin:end], *ranks)
    return centres, found


def window_for(span_s: float) -> float:
    """Return a window width in seconds: a thirtieth of the span, between 5 and 120."""
    return min(120.0, max(5.0, span_s / 30))


def token_gaps(results: Sequence[RequestResult]) -> tuple[Floats, Floats]:
    """Return (times, gaps) of every inter-token gap of ok requests; a gap's time is its end."""
    times: list[Floats] = []
    gaps: list[Floats] = []
    for result in results:
        if result.status is RequestStatus.OK and result.itl_s and result.ttft_s is not None:
            own = np.frombuffer(result.itl_s, dtype=np.float32).astype(np.float64)
            gaps.append(own)
            times.append(result.sent_s + result.ttft_s + np.cumsum(own))
    if not gaps:
        return np.empty(0), np.empty(0)
    return np.concatenate(times), np.concatenate(gaps)


def in_flight(results: Sequence[RequestResult]) -> tuple[Floats, Floats, Floats]:
    """Return (bin edges, mean, peak) of the requests in flight; bins are whole seconds, `MAX_BINS` at most.

    The mean is over time: ten requests of a tenth of a second each are one request in flight for a second.
    """
    if not results:
        return np.zeros(1), np.empty(0), np.empty(0)
    times = np.array([result.sent_s for result in results] + [result.ended_s for result in results])
    steps = np.repeat([1.0, -1.0], len(results))
    order = np.lexsort((-steps, times))
    times, count = times[order], np.cumsum(steps[order])
    edges = _edges(float(times[-1]))
    request_s = np.concatenate(([0.0], np.cumsum(count[:-1] * np.diff(times))))
    mean = np.diff(np.interp(edges, times, request_s)) / np.diff(edges)
    firsts = np.searchsorted(times, edges[:-1], side="right")
    ends = np.searchsorted(times, edges[1:], side="right")
    # what a bin begins with counts for its peak as well
    peak = [count[max(0, first - 1) : end].max(initial=0.0) for first, end in zip(firsts, ends, strict=True)]
    return edges, mean, np.array(peak)


def _edges(end_s: float) -> Floats:
    width_s = max(1.0, np.ceil((end_s + 1e-9) / MAX_BINS))
    return np.arange(0.0, end_s + width_s + 1e-9, width_s)


def without_lines_across(
    times: Floats, values: Floats, spans: Sequence[tuple[float, float]]
) -> tuple[Floats, Floats]:
    """Return the points with a gap put where each span begins, so that no line is drawn across it."""
    begins = np.array([begin_s for begin_s, _ in spans], dtype=np.float64)
    places = np.searchsorted(times, begins, side="right")
    return np.insert(times, places, begins), np.insert(values, places, np.nan)


def arrivals_per_s(results: Sequence[RequestResult]) -> tuple[Floats, Floats]:
    """Return (bin edges, arrivals/s in each bin); bins are whole seconds, `MAX_BINS` at most."""
    if not results:
        return np.zeros(1), np.empty(0)
    arrivals = np.array([result.arrival_s for result in results])
    edges = _edges(float(arrivals.max()))
    counts, _ = np.histogram(arrivals, bins=edges)
    return edges, counts / np.diff(edges)


def shown_span(run: PlannerRun | None, *, duration_s: float | None) -> tuple[float, float]:
    """Return the span of time to draw: the load run, and the planner's coming to rest after it.

    Args:
        run: None draws the load run only.
        duration_s: Of the load run; None draws the planner's entire run.
    """
    if duration_s is None:
        return (0.0, run.end_s if run is not None else 0.0)
    if run is None:
        return 0.0, duration_s
    interval_s = run.config.adjustment_interval_s
    first_s = run.samples[0].at_s if run.samples else 0.0
    return max(min(0.0, first_s), -interval_s), min(max(run.end_s, duration_s), duration_s + 10 * interval_s)
