"""Derives what a recommended graph carries besides its workers: floors, ceilings, a schedule and a threshold. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np

from penstock.api import Role
from penstock.assess.manifest import GraphPlan
from penstock.assess.observed import Floats, Observed
from penstock.simulator.observer import RunSample

CEILING_MARGIN: Final = 1.25
"""Ceiling by the most replicas that the simulation needed. Chosen: the next peak may be a quarter higher."""
FLOOR_RANK: Final = 0.05
"""Floor: replicas below which the simulated fleet was in this fraction of the time. Chosen: rare lulls set no floor."""
LEAST_DAYS: Final = 2
"""Days of history below which a daily shape is not known."""
LEAST_EXPLAINED: Final = 0.6
"""Fraction of the variance of the hourly load that the hour of the day explains, of a clear daily shape. Chosen."""
LEAST_SWING: Final = 1.5
"""Mean load of the busy hours by that of the others, of a clear daily shape. Chosen."""
WEEKEND_SHARE: Final = 0.5
"""Load of a weekend's busy hours by those of working days below which the schedule holds on working days only. Chosen."""
_TARGETS: Final = 2.0
"""TTFT targets of work that a worker may have before it is busy. Chosen: what waits longer is late, wherever it waits."""
_HOURS: Final = 24
_SATURDAY: Final = 5


@dataclass(frozen=True, slots=True)
class DailyShape:
    """When the load is high.

    Attributes:
        first_hour: Of the busy time, UTC, 0-23.
        hours: Length of the busy time.
        rate: Requests a second that three of four busy hours reach.
        is_workdays: Weekends are quiet.
    """

    first_hour: int
    hours: int
    rate: float
    is_workdays: bool


def daily_shape(observed: Observed) -> DailyShape | None:
    """Return the busy time of the day; None: the history is short, or the load has no clear daily shape."""
    rates, starts = _hourly(observed)
    if len(rates) < LEAST_DAYS * _HOURS:
        return None
    hours = np.array([at.hour for at in starts])
    is_weekend = np.array([at.weekday() >= _SATURDAY for at in starts])
    is_known = ~np.isnan(rates)
    is_workdays = _are_weekends_quiet(rates, is_weekend, is_known)
    is_own = is_known & ~is_weekend if is_workdays else is_known
    by_hour = np.array([_mean(rates[is_own & (hours == hour)]) for hour in range(_HOURS)])
    if np.isnan(by_hour).any():
        return None
    own = rates[is_own]
    spread = float(own.var())
    explained = float(by_hour[hours[is_own]].var()) / spread if spread > 0 else 0.0
    first, length = _longest_run(by_hour > (by_hour.max() + by_hour.min()) / 2)
    busy_hours = [(first + place) % _HOURS for place in range(length)]
    is_busy = np.isin(hours, busy_hours)
    rest = _mean(rates[is_own & ~is_busy])
    swing = _mean(rates[is_own & is_busy]) / rest if rest > 0 else math.inf
    if explained < LEAST_EXPLAINED or swing < LEAST_SWING:
        return None
    return DailyShape(first, length, float(np.quantile(rates[is_own & is_busy], 0.25)), is_workdays)


def _hourly(observed: Observed) -> tuple[Floats, list[datetime]]:
    """Return requests a second of each whole hour of the clock, NaN where more than half is unknown, and when it begins."""
    steps = max(1, round(3600 / observed.step_s))
    begun_s = math.ceil(observed.start_s / 3600) * 3600
    first = round((begun_s - observed.start_s) / observed.step_s)
    rates, starts = [], []
    for at in range(first, observed.steps - steps + 1, steps):
        part = observed.arrivals[at : at + steps]
        is_known = np.isfinite(part)
        known = float(part[is_known].mean()) / observed.step_s if is_known.mean() >= 0.5 else math.nan
        rates.append(known)
        starts.append(datetime.fromtimestamp(observed.start_s + at * observed.step_s, UTC))
    return np.array(rates), starts


def _are_weekends_quiet(rates: Floats, is_weekend: Any, is_known: Any) -> bool:
    weekend, rest = rates[is_weekend & is_known], rates[~is_weekend & is_known]
    return bool(len(weekend) >= _HOURS and len(rest) and weekend.mean() < WEEKEND_SHARE * rest.mean())


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else math.nan


def _longest_run(is_busy: Any) -> tuple[int, int]:
    """Return (first, length) of the longest run on the clock's circle."""
    best = (0, 0)
    for first in range(_HOURS):
        length = next((place for place in range(_HOURS) if not is_busy[(first + place) % _HOURS]), _HOURS)
        best = max(best, (first, length), key=lambda run: run[1])
    return best


def proposed(
    plan: GraphPlan,
    observed: Observed,
    samples: Sequence[RunSample],
    *,
    rates: Floats,
    step_s: float,
    cold_start_s: float,
    prefill_tokens_per_s: float | None,
) -> GraphPlan:
    """Return the graph with bounds, and with a schedule where the load has a clear daily shape.

    Args:
        plan: That was simulated.
        observed: The whole history, for the schedule.
        samples: Of a simulation of the plan.
        rates: Requests a second that it was simulated with, by steps of ``step_s``.
        step_s: Seconds.
        cold_start_s: By how much a scheduled entry begins before the load does.
        prefill_tokens_per_s: Prompt tokens that one replica computes at best; None: unknown, no threshold is set.
    """
    bounds, needed = {}, {}
    most = max(1, plan.max_gpus // plan.gpus)
    for role in samples[0].replicas:
        counts = np.array(
            [float(each.replicas[role][0]) for each in samples if each.at_s < len(rates) * step_s]
        )
        peak = int(counts.max())
        ceiling = min(max(peak, math.ceil(peak * CEILING_MARGIN)), most - len(samples[0].replicas) + 1)
        bounds[role] = (max(1, min(int(np.quantile(counts, FLOOR_RANK)), ceiling)), max(1, ceiling))
        needed[role] = _per_rate(counts, [each.at_s for each in samples], rates, step_s)
    threshold = None
    if prefill_tokens_per_s is not None:
        threshold = math.ceil(_TARGETS * plan.slo.ttft_seconds * prefill_tokens_per_s / 1000) * 1000
    shape = daily_shape(observed)
    schedule = () if shape is None else _schedule(shape, bounds, needed, cold_start_s)
    return replace(
        plan,
        bounds=bounds,
        schedule=schedule,
        startup_s=max(1, round(cold_start_s)),
        prefill_threshold=threshold,
    )


def _per_rate(counts: Floats, at_s: Sequence[float], rates: Floats, step_s: float) -> float:
    """Return the replicas that the simulation had for a request a second, in the busiest quarter of the steps."""
    places = np.minimum((np.array(at_s[: len(counts)]) // step_s).astype(np.int64), len(rates) - 1)
    load = rates[places]
    is_busy = load >= np.quantile(load, 0.75)
    total = float(load[is_busy].sum())
    return float(counts[is_busy].sum()) / total if total > 0 else 0.0


def _schedule(
    shape: DailyShape,
    bounds: Mapping[Role, tuple[int, int]],
    needed: Mapping[Role, float],
    cold_start_s: float,
) -> tuple[dict[str, Any], ...]:
    """Return an entry that raises the floors for the busy time; none where no floor would be higher."""
    floors = {
        role: min(bounds[role][1], max(bounds[role][0], math.floor(needed[role] * shape.rate)))
        for role in bounds
    }
    if all(floors[role] <= bounds[role][0] for role in bounds) or shape.hours == _HOURS:
        return ()
    lead = timedelta(minutes=math.ceil(cold_start_s / 60))
    # Any Monday; an entry that begins before midnight begins on the evening before.
    begin = datetime(2024, 1, 1, shape.first_hour, tzinfo=UTC) - lead
    is_before = begin.day != 1
    days = ("0-4" if is_before else "1-5") if shape.is_workdays else "*"
    length_s = shape.hours * 3600 + round(lead.total_seconds())
    entry: dict[str, Any] = {
        "name": "busy-hours",
        "cron": f"{begin.minute} {begin.hour} * * {days}",
        "timeZone": "UTC",
        "durationSeconds": min(length_s, _HOURS * 3600 - 60),
    }
    return (entry | {role.value: {"minReplicas": floors[role]} for role in sorted(bounds)},)
