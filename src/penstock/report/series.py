"""Data of the charts: running percentiles, distributions, and counts over time. Pure; nothing is drawn here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.report.ledger_view import PlannerRun
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.statistics import percentiles
from penstock_planner.decide.demand.observation import Pull

Floats = NDArray[np.float64]

COMPARED_S: Final = 30.0
"""Seconds over which the observed demand is averaged, around the time of a forecast, to compare it with the forecast.

Chosen: tokens arrive one prompt at a time, so shorter means are noise.
"""

MAX_CURVE_POINTS: Final = 2000
"""Maximum number of points of a curve. Chosen: more than a chart has pixel columns."""


def cdf(values: Sequence[float] | NDArray[np.floating]) -> tuple[Floats, Floats]:
    """Return the sorted values, and for each the fraction of values at or below it; at most 2000 points (`MAX_CURVE_POINTS`).

    Of more values, evenly spaced ones are returned. Returns two empty arrays if there are no values.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    share = np.arange(1, ordered.size + 1) / max(1, ordered.size)
    if ordered.size > MAX_CURVE_POINTS:
        kept = np.unique(np.linspace(0, ordered.size - 1, MAX_CURVE_POINTS).astype(int))
        return ordered[kept], share[kept]
    return ordered, share


def running_percentiles(
    times: Floats, values: Floats, *, ranks: Sequence[float], window_s: float
) -> tuple[Floats, Floats]:
    """Return percentiles over windows of time, each of which overlaps half of the next one.

    Args:
        times: Times of the values, in any order.
        values: Values, same shape as ``times``.
        ranks: Percentiles to compute, in percent.
        window_s: Width of the windows, > 0; their centres are half of it apart.

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
    """Return a window width for a time span: a thirtieth of the span, between 5 and 120 seconds."""
    return min(120.0, max(5.0, span_s / 30))


def token_gaps(results: Sequence[RequestResult]) -> tuple[Floats, Floats]:
    """Return (times, gaps) of every inter-token gap of successful requests; a gap's time is its end."""
    times, gaps = [np.empty(0)], [np.empty(0)]
    for result in results:
        if result.status is RequestStatus.OK and result.itl_s and result.ttft_s is not None:
            own = np.frombuffer(result.itl_s, dtype=np.float32).astype(np.float64)
            gaps.append(own)
            times.append(result.sent_s + result.ttft_s + np.cumsum(own))
    return np.concatenate(times), np.concatenate(gaps)


def in_flight(results: Sequence[RequestResult]) -> tuple[Floats, Floats]:
    """Return the times at which the number of requests in flight changes, and the number from each of these times on."""
    times = np.array([result.sent_s for result in results] + [result.ended_s for result in results])
    steps = np.repeat([1.0, -1.0], len(results))
    order = np.lexsort((-steps, times))
    return times[order], np.cumsum(steps[order])


def within_targets(
    results: Sequence[RequestResult], *, ttft_s: float | None, itl_s: float | None
) -> tuple[Floats, Floats]:
    """Return two arrays with 1 (yes) or 0 per request: whether the TTFT, and whether the mean gap between tokens, is within its target.

    Failed and rejected requests are 0 in both. A successful request with one output token has no gap, and meets the target for the gaps.

    Args:
        results: Results of all requests.
        ttft_s: TTFT target, seconds; None means that every successful request is within it.
        itl_s: Target for the mean gap, seconds; None means that every successful request is within it.
    """
    first, gaps = [], []
    for result in results:
        is_ok = result.status is RequestStatus.OK and result.ttft_s is not None
        first.append(is_ok and (ttft_s is None or (result.ttft_s or 0.0) <= ttft_s))
        gaps.append(is_ok and (itl_s is None or result.tpot_s is None or result.tpot_s <= itl_s))
    return np.array(first, dtype=np.float64), np.array(gaps, dtype=np.float64)


def attainment_over_time(results: Sequence[RequestResult], values: Floats) -> tuple[Floats, Floats]:
    """Return means of ``values`` by windows of arrival time, whose width is that of `window_for`.

    Args:
        results: Results of the requests.
        values: One value per request, such as 1 if it met a target.

    Returns:
        Centres of the windows in seconds, and the mean in each window; NaN in windows without requests. Two empty arrays if there are no
        requests.
    """
    arrivals = np.array([result.arrival_s for result in results])
    if not arrivals.size:
        return np.empty(0), np.empty(0)
    width_s = window_for(float(arrivals.max()))
    bins = np.floor(arrivals / width_s).astype(int)
    shares = _ratio(np.bincount(bins, weights=values), np.bincount(bins))
    return np.arange(0.5, shares.size) * width_s, shares


def tokens_around(pulls: Sequence[Pull], times: Floats) -> Floats:
    """Return the observed uncached prompt tokens/s, averaged over 30 s (`COMPARED_S`) around each time.

    The result is NaN at times less than 15 s after the first, or before the last, of the metrics scrapes (``pulls``) that have a demand.
    """
    known = [(pull.at_s, pull.demand) for pull in pulls if pull.demand is not None]
    ends = np.array([at_s for at_s, _ in known])
    begins_s, ends_s = times - COMPARED_S / 2, times + COMPARED_S / 2
    firsts, lasts = (np.searchsorted(ends, each, side="right") for each in (begins_s, ends_s))
    tokens = np.cumsum([0.0, *(demand.uncached_tokens for _, demand in known)])
    seconds = np.cumsum([0.0, *(demand.period_s for _, demand in known)])
    rates = _ratio(tokens[lasts] - tokens[firsts], seconds[lasts] - seconds[firsts])
    if known:
        rates[(begins_s < ends[0]) | (ends_s > ends[-1])] = np.nan
    return rates


def demand_bins(pulls: Sequence[Pull], width_s: float) -> tuple[Floats, dict[str, Floats]]:
    """Return the demand averaged over bins of time.

    Metrics are scraped each second, so without averaging a chart would show single requests.

    Args:
        pulls: Metrics scrapes in order of time; at least one has the demand.
        width_s: Width of a bin, seconds, > 0.

    Returns:
        Times of the bins' edges, shape (n + 1,), and by name, shape (n,), with NaN in bins without a known demand: ``arrivals`` and
        ``rejected`` in requests/s, ``uncached`` (arrived) and ``computed`` in prompt tokens/s, and ``oldest_wait_s``, the longest wait.
    """
    known = [(pull.at_s, pull.demand) for pull in pulls if pull.demand is not None]
    demands = [demand for _, demand in known]
    places = np.array([np.floor((at_s - demand.period_s / 2) / width_s) for at_s, demand in known], dtype=int)
    first = int(places.min())
    places -= first
    count = int(places.max()) + 1
    seconds = np.bincount(places, weights=[each.period_s for each in demands], minlength=count)
    sums = {
        "arrivals": [each.arrivals for each in demands],
        "rejected": [each.refused + each.timed_out for each in demands],
        "uncached": [each.uncached_tokens for each in demands],
        "computed": [each.prefilled_tokens for each in demands],
    }
    found = {
        name: _ratio(np.bincount(places, weights=values, minlength=count), seconds)
        for name, values in sums.items()
    }
    found["oldest_wait_s"] = np.full(count, np.nan)
    np.fmax.at(found["oldest_wait_s"], places, [each.oldest_wait_s or 0.0 for each in demands])
    return (first + np.arange(count + 1, dtype=np.float64)) * width_s, found


def _ratio(sums: NDArray[Any], counts: NDArray[Any]) -> Floats:
    shares = np.full(sums.size, np.nan)
    np.divide(sums, counts, out=shares, where=counts > 0)
    return shares


def shown_span(run: PlannerRun, *, duration_s: float) -> tuple[float, float]:
    """Return the start and end of the time span that the charts show, in simulated seconds from the start of the load run.

    The span covers the load run of ``duration_s``, and up to ten adjustment intervals (times between two decisions) after the load run, in
    which the planner removes replicas.
    """
    interval_s = run.config.adjustment_interval_s
    first_s = run.pulls[0].at_s if run.pulls else 0.0
    return max(min(0.0, first_s), -interval_s), min(max(run.end_s, duration_s), duration_s + 10 * interval_s)
