"""Moves arrivals in time: spreads Mooncake's three-second batches and sets the mean rate.

Pure: the random generator is an argument. Called by the command line before a replay; every choice is
recorded in the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import groupby

import numpy as np

from penstock.core.errors import ConfigError
from penstock.workload.traces import TraceRequest

GROUP_INTERVAL_S = 3.0
"""Seconds between Mooncake's batches: 99.9% of the conversation trace's gaps are 3.000 +- 0.002 s."""


class Spread(StrEnum):
    """How the requests of one batch are placed inside its interval.

    EVEN: request i of n arrives at i/n of the interval: the batch's rate, with no burst of its own.
    POISSON: n independent uniform places, sorted: a Poisson process that has n arrivals.
    NONE: all at the batch's own time, as recorded.
    """

    EVEN = "even"
    POISSON = "poisson"
    NONE = "none"


def spread(
    requests: Sequence[TraceRequest],
    how: Spread,
    *,
    rng: np.random.Generator,
    interval_s: float = GROUP_INTERVAL_S,
) -> list[TraceRequest]:
    """Return the requests with each batch spread over its interval, in order of arrival.

    A batch is a run of rows with one and the same time; a row alone keeps its time under EVEN and NONE.

    Args:
        requests: Arrivals never decrease.
        how: See `Spread`.
        rng: Drawn from by POISSON only.
        interval_s: Length of a batch's interval in seconds, > 0; it ends early where the next batch
            begins, so that batches never mix.
    """
    if how is Spread.NONE:
        return list(requests)
    moved: list[TraceRequest] = []
    for start_s, batch, room_s in _batches(requests, interval_s):
        count = len(batch)
        places = np.arange(count) / count if how is Spread.EVEN else np.sort(rng.random(count))
        moved.extend(
            replace(request, arrival_s=start_s + float(place) * room_s)
            for request, place in zip(batch, places, strict=True)
        )
    return moved


def _batches(
    requests: Sequence[TraceRequest], interval_s: float
) -> Iterator[tuple[float, list[TraceRequest], float]]:
    batches = [(at, list(rows)) for at, rows in groupby(requests, key=lambda request: request.arrival_s)]
    for index, (at, rows) in enumerate(batches):
        until_next = batches[index + 1][0] - at if index + 1 < len(batches) else interval_s
        yield at, rows, min(interval_s, until_next)


def mean_rate(requests: Sequence[TraceRequest]) -> float | None:
    """Return requests/s between the first and the last arrival, or None when no time passes.

    n arrivals span n - 1 gaps, so the rate is (n - 1) / (last - first).
    """
    if len(requests) < 2:
        return None
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s > 0 else None


def rescale(
    requests: Sequence[TraceRequest], *, rate_rps: float | None = None, rate_scale: float | None = None
) -> tuple[list[TraceRequest], float]:
    """Return the requests with time stretched or shrunk about 0, and the rate factor applied.

    Args:
        requests: Arrivals never decrease.
        rate_rps: Wanted mean rate in requests/s, > 0; excludes ``rate_scale``.
        rate_scale: Factor on the rate, > 0: 2 sends twice as fast.

    Raises:
        ConfigError: both given, or the trace has no rate to scale.
    """
    if rate_rps is not None and rate_scale is not None:
        raise ConfigError("--rate and --rate-scale: both set the arrival rate; give one")
    if rate_rps is not None:
        current = mean_rate(requests)
        if current is None:
            raise ConfigError("--rate: the selected requests all arrive at once, there is no rate to scale")
        rate_scale = rate_rps / current
    elif rate_scale is None:
        return list(requests), 1.0
    return [replace(request, arrival_s=request.arrival_s / rate_scale) for request in requests], rate_scale
