"""What a run cost and whether it held its targets: GPU-hours against two baselines, and violations.

Pure. All times are simulated seconds from the load run's zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from penstock.api import Role
from penstock.report.ledger_view import LedgerSample, PlannerRun
from penstock.report.series import Floats
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.statistics import pooled_gaps

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class GpuUse:
    """GPU-hours over a span; a draining replica still holds its GPUs.

    Attributes:
        end_s: End of the span; what the ledger does not reach is not counted.
        used_hours: Held by existing replicas.
        static_max_hours: The budget, held all the time: what provisioning for the peak costs. With no
            ceiling configured it is the largest number held.
        static_min_hours: The floor of each role, held all the time: the least that serves at all.
        budget_gpus: The ceiling; None when there is none.
    """

    start_s: float
    end_s: float
    used_hours: float
    static_max_hours: float
    static_min_hours: float
    peak_gpus: int
    budget_gpus: int | None

    @property
    def saved_fraction(self) -> float | None:
        """Share of the static maximum that was not used; None over an empty span."""
        return 1 - self.used_hours / self.static_max_hours if self.static_max_hours > 0 else None


@dataclass(frozen=True, slots=True)
class Violations:
    """How many requests and gaps missed a target.

    Attributes:
        late_first_tokens: Requests without a first token within the target, failed and rejected included.
        gaps: Inter-token gaps of ok requests.
        long_gaps: Gaps above the target.
    """

    ttft_target_s: float | None
    itl_target_s: float | None
    requests: int
    late_first_tokens: int | None
    gaps: int
    long_gaps: int | None


def gpu_steps(run: PlannerRun) -> list[tuple[float, int]]:
    """Return (time, GPUs held from then on), in order of time.

    While an adjustment is under way nothing is pulled: from a decision that was carried out to the next
    pull the replicas it adds hold their GPUs, and those it removes still hold theirs.
    """
    steps = [(sample.at_s, sample.gpus) for sample in run.samples]
    steps.extend(
        (mark.at_s, mark.gpus_after)
        for mark in run.decisions
        if any(role.outcome == "applied" for role in mark.roles)
    )
    # a pull and its decision share their time: the decision comes after it
    return sorted(steps, key=lambda step: step[0])


def gpu_use(run: PlannerRun, *, start_s: float, end_s: float) -> GpuUse | None:
    """Return the GPU-hours between two times, or None where the ledger saw nothing.

    Args:
        run: From the ledger.
        start_s: Begin; moved to the first pull if that is later.
        end_s: End; moved to the newest record if that is earlier.
    """
    steps = gpu_steps(run)
    if not steps:
        return None
    start_s, end_s = max(start_s, steps[0][0]), min(end_s, run.end_s)
    if end_s <= start_s:
        return None
    gpu_s = 0.0
    peak = 0
    for index, (at_s, gpus) in enumerate(steps):
        until_s = steps[index + 1][0] if index + 1 < len(steps) else end_s
        held_s = min(until_s, end_s) - max(at_s, start_s)
        if held_s > 0:
            gpu_s += held_s * gpus
            peak = max(peak, gpus)
    hours = (end_s - start_s) / _HOUR_S
    budget = run.config.max_gpu_budget
    return GpuUse(
        start_s=start_s,
        end_s=end_s,
        used_hours=gpu_s / _HOUR_S,
        static_max_hours=(peak if budget is None else budget) * hours,
        static_min_hours=floor_gpus(run) * hours,
        peak_gpus=peak,
        budget_gpus=budget,
    )


def floor_gpus(run: PlannerRun) -> int:
    """Return the GPUs of the fewest replicas that the planner may leave, over all roles seen."""
    engines: dict[Role, int] = {}
    for sample in run.samples:
        for role, pool in sample.pools.items():
            engines[role] = max(engines.get(role, 0), run.config.engine_gpus(role, pool.gpus))
    return sum(run.config.floor(role, gpus) * gpus for role, gpus in engines.items())


def violations(
    results: Sequence[RequestResult], *, ttft_target_s: float | None, itl_target_s: float | None
) -> Violations:
    """Count what missed the targets; a request without a first token missed its target."""
    late = None
    if ttft_target_s is not None:
        late = sum(
            result.status is not RequestStatus.OK or result.ttft_s is None or result.ttft_s > ttft_target_s
            for result in results
        )
    gaps = pooled_gaps(results)
    return Violations(
        ttft_target_s=ttft_target_s,
        itl_target_s=itl_target_s,
        requests=len(results),
        late_first_tokens=late,
        gaps=int(gaps.size),
        long_gaps=None if itl_target_s is None else int((gaps > itl_target_s).sum()),
    )


COMPARED_S: Final = 30.0
"""A forecast is compared with the mean over this long around the time that it was made for. Chosen: tokens arrive a
prompt at a time, so that shorter means are noise."""


@dataclass(frozen=True, slots=True)
class DemandSummary:
    """Demand over a span; times are simulated seconds.

    Attributes:
        arrivals: Requests that came, rejected ones included.
        rejected: Refused, or timed out in the queue.
        oldest_wait_s: The longest that any had waited at a pull; None when none waited.
        unknown_pulls: Pulls at which no router reported the demand.
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
    """Yield (forecast, what came), tokens/s, of the forecasts whose surroundings are within the pulls of a span."""
    known = _Arrivals([sample for sample in run.samples if start_s <= sample.at_s <= end_s])
    for mark in run.decisions:
        for forecast in (part.forecast for part in mark.roles if part.forecast is not None):
            came = known.around(mark.at_s + forecast.horizon_s)
            if came:
                yield forecast.tokens_per_s, came


def arrivals_over_time(run: PlannerRun) -> list[tuple[float, float]]:
    """Return (time, tokens/s that came around it), as forecasts are compared with, for each pull within."""
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
