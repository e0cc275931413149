"""What came to the routers over a run, what was turned away, how long it waited, and how well it was foreseen. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from penstock.report.ledger_view import LedgerSample, PlannerRun
from penstock.report.series import Floats

COMPARED_S: Final = 30.0
"""A forecast is compared with the mean over this long around the time that it was made for. Chosen: tokens arrive a
prompt at a time, so that shorter means say nothing."""


@dataclass(frozen=True, slots=True)
class DemandSummary:
    """Demand over a span; times are simulated seconds.

    Attributes:
        arrivals: Requests that came, rejected ones included.
        rejected: Refused, or timed out in the queue.
        oldest_wait_s: The longest that any had waited at a pull; None when none waited.
        unknown_pulls: Pulls at which no router told the demand.
        forecast_error: Median of |forecast - what came| / what came, tokens/s; None where nothing was forecast.
    """

    arrivals: float
    rejected: float
    oldest_wait_s: float | None
    unknown_pulls: int
    forecast_error: float | None


def demand_summary(run: PlannerRun, *, start_s: float, end_s: float) -> DemandSummary | None:
    """Return the demand between two times; None where no pull knew any."""
    pulls = [sample for sample in run.samples if start_s <= sample.at_s <= end_s]
    known = [sample.demand for sample in pulls if sample.demand is not None]
    if not known:
        return None
    errors = [
        abs(expected - came) / came
        for expected, came in compared_forecasts(run, start_s=start_s, end_s=end_s)
    ]
    waits = [each.oldest_wait_s for each in known if each.oldest_wait_s is not None]
    return DemandSummary(
        arrivals=sum(each.arrivals for each in known),
        rejected=sum(each.refused + each.timed_out for each in known),
        oldest_wait_s=max(waits, default=None),
        unknown_pulls=len(pulls) - len(known),
        forecast_error=median(errors) if errors else None,
    )


def compared_forecasts(run: PlannerRun, *, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    """Yield (forecast, what came), tokens/s, of the forecasts whose surroundings lie within the pulls of a span."""
    known = _Arrivals([sample for sample in run.samples if start_s <= sample.at_s <= end_s])
    for mark in run.decisions:
        for forecast in (part.forecast for part in mark.roles if part.forecast is not None):
            came = known.around(mark.at_s + forecast.horizon_s)
            if came:
                yield forecast.tokens_per_s, came


def arrivals_over_time(run: PlannerRun) -> list[tuple[float, float]]:
    """Return (time, tokens/s that came around it), as forecasts are compared with, for each pull that lies within."""
    known = _Arrivals(run.samples)
    rates = ((at_s, known.around(at_s)) for at_s in known.times)
    return [(float(at_s), rate) for at_s, rate in rates if rate is not None]


@dataclass(frozen=True, slots=True)
class DemandBins:
    """Demand over bins of one width; NaN where no pull knew any. Rates per second, the wait in seconds.

    Attributes:
        edges: Times, shape (n + 1,).
        arrivals, rejected: Requests, shape (n,).
        uncached_tokens, computed_tokens: Prompt tokens that came and that were prefilled.
        oldest_wait_s: Longest of the bin's pulls.
    """

    edges: Floats
    arrivals: Floats
    rejected: Floats
    uncached_tokens: Floats
    computed_tokens: Floats
    oldest_wait_s: Floats


def demand_bins(samples: Sequence[LedgerSample], width_s: float) -> DemandBins:
    """Return means over bins: of pulls each second, single requests and prompts would be all that a picture shows.

    Args:
        samples: In order of time; at least one knows the demand.
        width_s: Of a bin, seconds, > 0.
    """
    known = [(sample.at_s, sample.demand) for sample in samples if sample.demand is not None]
    places = np.array([np.floor((at_s - demand.period_s / 2) / width_s) for at_s, demand in known], dtype=int)
    first = int(places.min())
    places -= first
    count = int(places.max()) + 1
    seconds = np.bincount(places, weights=[demand.period_s for _, demand in known], minlength=count)

    def rate(values: Sequence[float]) -> Floats:
        found = np.full(count, np.nan)
        np.divide(np.bincount(places, weights=values, minlength=count), seconds, out=found, where=seconds > 0)
        return found

    oldest = np.full(count, np.nan)
    np.fmax.at(oldest, places, [demand.oldest_wait_s or 0.0 for _, demand in known])
    return DemandBins(
        edges=(first + np.arange(count + 1, dtype=np.float64)) * width_s,
        arrivals=rate([demand.arrivals for _, demand in known]),
        rejected=rate([demand.refused + demand.timed_out for _, demand in known]),
        uncached_tokens=rate([demand.uncached_tokens for _, demand in known]),
        computed_tokens=rate([demand.prefilled_tokens for _, demand in known]),
        oldest_wait_s=oldest,
    )


class _Arrivals:
    """Uncached tokens that came, over the pulls that know them."""

    def __init__(self, samples: Sequence[LedgerSample]) -> None:
        known = [(sample.at_s, sample.demand) for sample in samples if sample.demand is not None]
        self.times = np.array([at_s for at_s, _ in known])
        self._tokens = np.concatenate(([0.0], np.cumsum([demand.uncached_tokens for _, demand in known])))
        self._seconds = np.concatenate(([0.0], np.cumsum([demand.period_s for _, demand in known])))

    def around(self, at_s: float) -> float | None:
        begin_s, finish_s = at_s - COMPARED_S / 2, at_s + COMPARED_S / 2
        if not self.times.size or begin_s < self.times[0] or finish_s > self.times[-1]:
            return None
        begin, finish = np.searchsorted(self.times, (begin_s, finish_s), side="right")
        seconds = self._seconds[finish] - self._seconds[begin]
        return float((self._tokens[finish] - self._tokens[begin]) / seconds) if seconds > 0 else None


def demand_line(found: DemandSummary) -> str:
    """Return the summary in one sentence."""
    wait = "none waited at a pull"
    if found.oldest_wait_s is not None:
        wait = f"the oldest wait was {found.oldest_wait_s:.1f} s"
    line = f"demand: {found.arrivals:.0f} requests came, {found.rejected:.0f} were rejected, {wait}"
    if found.forecast_error is not None:
        line += f"; the forecast of tokens/s was off by {found.forecast_error:.0%} (median, against {COMPARED_S:g} s means)"
    if found.unknown_pulls:
        line += f"; {found.unknown_pulls} pulls knew nothing of it"
    return line
