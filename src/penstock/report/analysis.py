"""Analyses a run: GPU-hours, missed latency targets, demand, and the planning of mode sla, each with its sentences for the reader.

Pure. All times are simulated seconds from the start of the load run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Final

import numpy as np

from penstock.api import Role
from penstock.report.ledger_view import PlannerRun
from penstock.report.series import COMPARED_S, tokens_around, within_targets
from penstock.workload.record import RequestResult
from penstock.workload.statistics import pooled_gaps
from penstock_planner.decide.config import Mode
from penstock_planner.decision_steps import ProfileReading
from penstock_planner.served_shares import ServedShares, agreement, share_windows

_HOUR_S = 3600.0

_COVERED = 0.99
"""Fraction of a run that a ledger must cover for its GPU-hours to count as the run's. Chosen."""

FACTOR_NAMES: Final = {"prefill": "prefill", "ttft": "TTFT", "itl": "ITL"}
"""Display names of the correction factors (observed time divided by the performance profile's time), by key."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """GPU-hours over a span of time, draining replicas included. Times are simulated seconds from the start of the load run.

    Attributes:
        start_s, end_s: Start and end of the span, which leaves out times that the ledger (the planner's decision log) does not cover.
        used_hours: GPU-hours held by existing replicas.
        static_max_hours: GPU-hours if the GPU budget were held all the time, the cost of provisioning for the peak. Without a budget, the
            largest number of GPUs held is used in its place.
        static_min_hours: GPU-hours if the minimum replicas of each role were held all the time.
        peak_gpus: Largest number of GPUs held.
        budget_gpus: GPU budget; None if there is no limit.
    """

    start_s: float
    end_s: float
    used_hours: float
    static_max_hours: float
    static_min_hours: float
    peak_gpus: int
    budget_gpus: int | None

    @property
    def saved_fraction(self) -> float:
        """Fraction of ``static_max_hours`` that was not used."""
        return 1 - self.used_hours / self.static_max_hours if self.static_max_hours > 0 else 0.0

    def covers(self, duration_s: float) -> bool:
        """Return whether the span covers at least 99% of a load run of ``duration_s`` seconds, so that its GPU-hours count as the run's."""
        return self.end_s - self.start_s >= _COVERED * duration_s

    def lines(self) -> list[str]:
        """Return one sentence with the GPU-hours, in a list."""
        ceiling = "the peak held" if self.budget_gpus is None else f"the budget of {self.budget_gpus}"
        hours = f"{self.used_hours:.3f} used over {self.end_s - self.start_s:.0f} s"
        static = f"{self.static_max_hours:.3f} static at {ceiling} ({self.saved_fraction:.1%} saved)"
        floor = f"{self.static_min_hours:.3f} static at the floor"
        return [f"GPU-hours: {hours}; {static}, {floor}; peak {self.peak_gpus} GPUs"]


def gpu_use(run: PlannerRun, *, start_s: float, end_s: float) -> GpuUse | None:
    """Return the GPU-hours between two times; None if the ledger (decision log) covers no part of this span.

    Args:
        run: Planner's run, from its ledger.
        start_s: Start of the span in seconds from the start of the load run; the first metrics scrape replaces it if that is later.
        end_s: End of the span, as ``start_s``; the newest record of the ledger replaces it if that is earlier.
    """
    steps = run.gpu_steps()
    if not steps:
        return None
    start_s, end_s = max(start_s, steps[0][0]), min(end_s, run.end_s)
    if end_s <= start_s:
        return None
    gpu_s = 0.0
    peak = 0
    for (at_s, gpus), (until_s, _) in pairwise([*steps, (end_s, 0)]):
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
        static_min_hours=run.floor_gpus() * hours,
        peak_gpus=peak,
        budget_gpus=budget,
    )


@dataclass(frozen=True, slots=True)
class Violations:
    """Numbers of requests and token gaps that missed a latency target. Failed and rejected requests missed both targets.

    Attributes:
        ttft_target_s, itl_target_s: Targets for the TTFT and for the gaps between tokens, simulated seconds; None if there is no such
            target.
        requests: Number of requests.
        late_first_tokens: Number of requests without a first token within the TTFT target; None without a TTFT target.
        slow_requests: Number of requests whose mean gap between tokens (TPOT) is above the ITL target; None without an ITL target.
        gaps: Number of inter-token gaps of successful requests.
        long_gaps: Number of gaps above the ITL target; None without an ITL target.
    """

    ttft_target_s: float | None
    itl_target_s: float | None
    requests: int
    late_first_tokens: int | None
    slow_requests: int | None
    gaps: int
    long_gaps: int | None

    def lines(self) -> list[str]:
        """Return one sentence for each target; empty if there is no target."""
        lines = []
        if self.ttft_target_s is not None and self.late_first_tokens is not None:
            lines.append(
                f"TTFT target {self.ttft_target_s:g} s: missed by {self._share(self.late_first_tokens)}, failed and"
                " rejected ones included"
            )
        if self.itl_target_s is not None and self.long_gaps is not None and self.slow_requests is not None:
            lines.append(
                f"ITL target {self.itl_target_s:g} s: exceeded by {self.long_gaps} of {self.gaps} gaps"
                f" ({self.long_gaps / max(1, self.gaps):.1%}); on average (TPOT) by {self._share(self.slow_requests)}"
            )
        return lines

    def _share(self, missed: int) -> str:
        return f"{missed} of {self.requests} requests ({missed / max(1, self.requests):.1%})"


def violations(
    results: Sequence[RequestResult], *, ttft_target_s: float | None, itl_target_s: float | None
) -> Violations:
    """Return the numbers of requests and token gaps that missed the latency targets.

    Args:
        results: Results of all requests; one without a first token missed both targets.
        ttft_target_s: TTFT target, seconds; None for no target.
        itl_target_s: Target for the gaps between tokens, seconds; None for no target.
    """
    in_time, is_fast = within_targets(results, ttft_s=ttft_target_s, itl_s=itl_target_s)
    gaps = pooled_gaps(results)
    return Violations(
        ttft_target_s=ttft_target_s,
        itl_target_s=itl_target_s,
        requests=len(results),
        late_first_tokens=None if ttft_target_s is None else int((in_time == 0).sum()),
        slow_requests=None if itl_target_s is None else int((is_fast == 0).sum()),
        gaps=int(gaps.size),
        long_gaps=None if itl_target_s is None else int((gaps > itl_target_s).sum()),
    )


@dataclass(frozen=True, slots=True)
class DemandSummary:
    """Demand at the routers over a span of time.

    Attributes:
        arrivals: Number of requests that arrived, rejected ones included.
        rejected: Number of requests that were refused or timed out in the queue.
        oldest_wait_s: Longest wait of any queued request at a metrics scrape, simulated seconds; None if no request waited.
        unknown_pulls: Number of metrics scrapes of the planner at which the routers' demand was unknown.
        forecasts: Number of forecasts that could be compared with the observed demand.
        forecast_error: Median of |forecast - observed| / observed; None if no forecast could be compared.
    """

    arrivals: float
    rejected: float
    oldest_wait_s: float | None
    unknown_pulls: int
    forecasts: int
    forecast_error: float | None

    def lines(self) -> list[str]:
        """Return one or two sentences about the demand and the error of its forecasts."""
        wait = "none waited at a pull"
        if self.oldest_wait_s is not None:
            wait = f"the oldest wait was {self.oldest_wait_s:.1f} s"
        lines = [f"demand: {self.arrivals:.0f} requests came, {self.rejected:.0f} were rejected, {wait}"]
        if self.unknown_pulls:
            lines[0] += f"; {self.unknown_pulls} pulls knew nothing of it"
        if self.forecast_error is not None:
            lines.append(
                f"prediction of tokens/s: off by {self.forecast_error:.0%} (median of {self.forecasts}, against"
                f" {COMPARED_S:g} s means)"
            )
        return lines


def demand_summary(run: PlannerRun, *, start_s: float, end_s: float) -> DemandSummary | None:
    """Return the demand at the routers between two times, with the error of the planner's forecasts.

    Returns None if no metrics scrape between them has the demand.

    Args:
        run: Planner's run, from its ledger.
        start_s: Start, seconds from the start of the load run.
        end_s: End, seconds from the start of the load run.
    """
    pulls = [pull for pull in run.pulls if start_s <= pull.at_s <= end_s]
    known = [pull.demand for pull in pulls if pull.demand is not None]
    if not known:
        return None
    made = list(run.forecasts())
    came = tokens_around(pulls, np.array([at_s + forecast.horizon_s for at_s, forecast in made]))
    errors = [
        abs(forecast.tokens_per_s - rate) / rate
        for (_, forecast), rate in zip(made, came, strict=True)
        if rate > 0
    ]
    return DemandSummary(
        arrivals=sum(each.arrivals for each in known),
        rejected=sum(each.refused + each.timed_out for each in known),
        oldest_wait_s=max(
            (each.oldest_wait_s for each in known if each.oldest_wait_s is not None), default=None
        ),
        unknown_pulls=len(pulls) - len(known),
        forecasts=len(errors),
        forecast_error=float(median(errors)) if errors else None,
    )


@dataclass(frozen=True, slots=True)
class PredictionSummary:
    """Comparison of the fraction of requests on time as observed and as predicted by the latency model of the planner.

    Attributes:
        windows: Number of ten-minute windows with enough requests.
        agreed: Fraction of these windows in which the observed and the predicted fraction differ by at most one percentage point; None if
            there are no windows.
        newest: Observed and predicted fraction at the newest decision that has both.
    """

    windows: int
    agreed: float | None
    newest: ServedShares

    def lines(self) -> list[str]:
        """Return one sentence with both fractions and the number of windows in which they agree, in a list."""
        newest = self.newest
        line = (
            f"requests on time over the last half hour (rejected count as late): observed {newest.served:.1%}, "
            f"the planner's model {newest.predicted:.1%}"
        )
        if self.agreed is not None:
            agreed = round(self.agreed * self.windows)
            line += f"; within 1 point of each other in {agreed} of {self.windows} ten-minute windows"
        return [line]


def prediction_summary(run: PlannerRun, *, start_s: float, end_s: float) -> PredictionSummary | None:
    """Return how well the latency model of the planner predicted the fraction of requests on time between two times.

    Returns None if the ledger has no predictions between them.

    Args:
        run: Planner's run, from its ledger.
        start_s: Start, seconds from the start of the load run.
        end_s: End, seconds from the start of the load run.
    """
    found = [(at_s, shares) for at_s, shares in run.shares() if start_s <= at_s <= end_s]
    if not found:
        return None
    windows = share_windows(found)
    return PredictionSummary(len(windows), agreement(windows), found[-1][1])


@dataclass(frozen=True, slots=True)
class NeededReplicas:
    """Number of replicas of one role that the latency targets required according to the performance profile, and the number that existed.

    Attributes:
        decisions: Number of decisions compared.
        needed: Mean number of replicas required.
        had: Mean number of existing replicas, starting ones included.
        short: Fraction of the decisions at which fewer replicas existed than were required.
    """

    decisions: int
    needed: float
    had: float
    short: float


@dataclass(frozen=True, slots=True)
class Factor:
    """One correction factor of mode sla: the observed time divided by the time in the performance profile.

    Attributes:
        least, median, most: Minimum, median and maximum over the decisions.
        last: Value at the newest decision.
    """

    least: float
    median: float
    most: float
    last: float


@dataclass(frozen=True, slots=True)
class TargetsSummary:
    """Planning of mode sla for its latency targets.

    Attributes:
        goal: Fraction of the requests that should meet the latency targets.
        factors: Correction factors by name.
        replicas: Required and existing replicas by role.
        outside: Fraction of the decisions at which the load was outside the range of the performance profile, so that the profile's values
            at the edge were used; None if there were no decisions.
    """

    goal: float
    factors: dict[str, Factor]
    replicas: dict[str, NeededReplicas]
    outside: float | None

    def lines(self) -> list[str]:
        """Return sentences about the targets, the correction factors and the needed replicas."""
        lines = [f"the targets are to hold for {self.goal:.1%} of the requests"]
        if self.factors:
            factors = "; ".join(
                f"{FACTOR_NAMES[name]} {each.median:.2f} ({each.least:.2f} to {each.most:.2f}, at the end {each.last:.2f})"
                for name, each in self.factors.items()
            )
            lines.append(f"observed over profile, median: {factors}")
        lines += [
            f"{role} needed {each.needed:.1f} replicas by the profile and had {each.had:.1f}, fewer than needed at"
            f" {each.short:.1%} of {each.decisions} decisions"
            for role, each in self.replicas.items()
        ]
        if self.outside:
            lines.append(f"outside the profile at {self.outside:.1%} of the decisions: its edge held")
        return lines


def targets_summary(run: PlannerRun, *, start_s: float, end_s: float) -> TargetsSummary | None:
    """Return how a planner in mode sla planned for its latency targets between two times; None in other modes.

    Args:
        run: Planner's run, from its ledger.
        start_s: Start, seconds from the start of the load run.
        end_s: End, seconds from the start of the load run.
    """
    config = run.config
    if config.mode != Mode.SLA:
        return None
    readings = [(role, each) for at_s, role, each in run.readings() if start_s <= at_s <= end_s]
    factors = {
        name: Factor(min(values), median(values), max(values), values[-1])
        for name in FACTOR_NAMES
        if (values := [each.factors[name] for _, each in readings])
    }
    counts = {role.value: list(_needs(role, readings)) for role in Role}
    replicas = {
        role: NeededReplicas(
            decisions=len(pairs),
            needed=fmean(needed for needed, _ in pairs),
            had=fmean(had for _, had in pairs),
            short=fmean(had < needed for needed, had in pairs),
        )
        for role, pairs in counts.items()
        if pairs
    }
    outside = fmean(each.is_outside for _, each in readings) if readings else None
    return TargetsSummary(config.attainment, factors, replicas, outside)


def _needs(role: Role, readings: Sequence[tuple[Role, ProfileReading]]) -> Iterator[tuple[int, int]]:
    for own, each in readings:
        if own is role and each.needed is not None and each.had is not None:
            yield each.needed, each.had
