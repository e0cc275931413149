"""How a planner of mode sla kept its targets: prediction against truth, correction factors, attainment, replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

import numpy as np

from penstock.api import Role
from penstock.planner.decide.config import Mode
from penstock.planner.decision_steps import ProfileReading
from penstock.report.analysis import COMPARED_S, compared_forecasts
from penstock.report.ledger_view import PlannerRun
from penstock.report.series import Floats, window_for
from penstock.workload.record import RequestResult, RequestStatus

FACTOR_NAMES: Final = {"prefill": "prefill", "ttft": "TTFT", "itl": "ITL"}
"""Correction factors by their key, as people read them."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas of one role that profile and targets needed, over the decisions that could look them up.

    Attributes:
        decisions: How many could, >= 1.
        needed: Mean need.
        had: Mean there was, those that start included.
        short: Share of the decisions at which there were fewer than needed.
    """

    decisions: int
    needed: float
    had: float
    short: float


@dataclass(frozen=True, slots=True)
class Factor:
    """One correction factor, seconds observed over seconds by the profile, over the decisions of a run.

    Attributes:
        last: At the newest decision.
    """

    least: float
    median: float
    most: float
    last: float


@dataclass(frozen=True, slots=True)
class TargetsSummary:
    """Targets of a run; times are simulated seconds.

    Attributes:
        itl_target_s: ITL to hold; None: any.
        goal: Share of the requests to hold them for.
        requests: Requests of the load run that ended, lost ones included.
        ttft_attainment: Share of them with a TTFT within the target; lost ones are not. None without requests.
        itl_attainment: The same of the mean gap between tokens (TPOT); answers of one token have none to miss.
        forecasts: Forecasts that could be held against what came.
        forecast_mape: Their mean of |forecast - what came| / what came; None without any.
        factors: Correction factors by name.
        replicas: By role.
        outside: Share of the decisions at which the load lay outside of the profile, so that its edge held; None without
            decisions.
    """

    ttft_target_s: float
    itl_target_s: float | None
    goal: float
    requests: int
    ttft_attainment: float | None
    itl_attainment: float | None
    forecasts: int
    forecast_mape: float | None
    factors: dict[str, Factor]
    replicas: dict[str, Replicas]
    outside: float | None


def targets_summary(
    run: PlannerRun, results: Sequence[RequestResult], *, start_s: float, end_s: float
) -> TargetsSummary | None:
    """Return how the targets were kept between two times; None of a planner in another mode."""
    config = run.config
    if config.mode != Mode.SLA:
        return None
    pairs = list(compared_forecasts(run, start_s=start_s, end_s=end_s))
    errors = [abs(expected - came) / came for expected, came in pairs]
    readings = [(role, each) for at_s, role, each in readings_of(run) if start_s <= at_s <= end_s]
    is_ttft, is_itl = kept(results, ttft_s=config.ttft_slo_s, itl_s=config.itl_slo_s)
    return TargetsSummary(
        ttft_target_s=config.ttft_slo_s,
        itl_target_s=config.itl_slo_s,
        goal=config.attainment,
        requests=len(results),
        ttft_attainment=float(is_ttft.mean()) if len(results) else None,
        itl_attainment=None if config.itl_slo_s is None or not len(results) else float(is_itl.mean()),
        forecasts=len(errors),
        forecast_mape=fmean(errors) if errors else None,
        factors=_factors([each for _, each in readings]),
        replicas={role.value: found for role in Role if (found := _replicas(role, readings)) is not None},
        outside=fmean(each.is_outside for _, each in readings) if readings else None,
    )


def readings_of(run: PlannerRun) -> Iterator[tuple[float, Role, ProfileReading]]:
    """Yield (time, role, what it took from the profile) of every decision, in order of time."""
    for mark in run.decisions:
        for part in mark.roles:
            if part.profile is not None:
                yield mark.at_s, part.role, part.profile


def kept(results: Sequence[RequestResult], *, ttft_s: float, itl_s: float | None) -> tuple[Floats, Floats]:
    """Return 1 or 0 per request: whether its TTFT, and whether its mean gap, was within the target; of lost ones neither."""
    is_ok = [result.status is RequestStatus.OK for result in results]
    first = [
        ok and result.ttft_s is not None and result.ttft_s <= ttft_s
        for ok, result in zip(is_ok, results, strict=True)
    ]
    gaps = [
        ok and (itl_s is None or result.tpot_s is None or result.tpot_s <= itl_s)
        for ok, result in zip(is_ok, results, strict=True)
    ]
    return np.array(first, dtype=np.float64), np.array(gaps, dtype=np.float64)


def attainment_over_time(results: Sequence[RequestResult], values: Floats) -> tuple[Floats, Floats]:
    """Return (centres of windows, mean of the requests that arrived in each); windows without any are NaN."""
    arrivals = np.array([result.arrival_s for result in results])
    if not arrivals.size:
        return np.empty(0), np.empty(0)
    width_s = window_for(float(arrivals.max()))
    bins = np.floor(arrivals / width_s).astype(int)
    counts, sums = np.bincount(bins), np.bincount(bins, weights=values)
    shares = np.full(counts.size, np.nan)
    np.divide(sums, counts, out=shares, where=counts > 0)
    centres = (np.arange(counts.size, dtype=np.float64) + 0.5) * width_s
    return centres, shares


def target_lines(found: TargetsSummary) -> list[str]:
    """Return the summary in sentences."""
    lines = [
        _attained("TTFT", found.ttft_target_s, found.ttft_attainment, found),
        _attained("mean ITL", found.itl_target_s, found.itl_attainment, found),
    ]
    if found.forecast_mape is not None:
        lines.append(
            f"prediction of tokens/s: off by {found.forecast_mape:.0%} on average (MAPE of {found.forecasts}, against"
            f" {COMPARED_S:g} s means)"
        )
    if found.factors:
        factors = "; ".join(
            f"{FACTOR_NAMES[name]} {each.median:.2f} ({each.least:.2f} to {each.most:.2f}, at the end {each.last:.2f})"
            for name, each in found.factors.items()
        )
        lines.append(f"observed over profile, median: {factors}")
    lines += [
        f"{role} needed {each.needed:.1f} replicas by the profile and had {each.had:.1f}, fewer than needed at"
        f" {each.short:.1%} of {each.decisions} decisions"
        for role, each in found.replicas.items()
    ]
    if found.outside:
        lines.append(f"outside the profile at {found.outside:.1%} of the decisions: its edge held")
    return [line for line in lines if line]


def _attained(name: str, target_s: float | None, share: float | None, found: TargetsSummary) -> str:
    if target_s is None or share is None:
        return ""
    return (
        f"{name} within {target_s:g} s: {share:.1%} of {found.requests} requests, lost ones counted as late; to hold are"
        f" {found.goal:.1%}"
    )


def _factors(readings: Sequence[ProfileReading]) -> dict[str, Factor]:
    if not readings:
        return {}
    series = {name: [each.factors[name] for each in readings] for name in FACTOR_NAMES}
    return {
        name: Factor(min(values), median(values), max(values), values[-1]) for name, values in series.items()
    }


def _replicas(role: Role, readings: Sequence[tuple[Role, ProfileReading]]) -> Replicas | None:
    counts = [
        (each.needed, each.had)
        for own, each in readings
        if own is role and each.needed is not None and each.had is not None
    ]
    if not counts:
        return None
    return Replicas(
        decisions=len(counts),
        needed=fmean(needed for needed, _ in counts),
        had=fmean(had for _, had in counts),
        short=fmean(had < needed for needed, had in counts),
    )
