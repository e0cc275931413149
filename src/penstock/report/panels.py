"""Draws what came to the routers, how a planner of mode sla kept its targets, and fleets by cost; called by `charts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from penstock.api import Role
from penstock.report.analysis import arrivals_over_time, demand_bins
from penstock.report.counterfactual import Counterfactual, FleetKind, FleetOutcome
from penstock.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    ROLE_COLOURS,
    SKY,
    VERMILION,
    YELLOW,
    columns,
    legend_beside,
)
from penstock.report.ledger_view import PlannerRun
from penstock.report.series import window_for
from penstock.report.targets import FACTOR_NAMES, attainment_over_time, kept, readings_of
from penstock.workload.record import RequestResult

TALL_INCHES: Final = 9.0
"""Height of a picture of five panels."""

_FACTOR_COLOURS: Final = {"prefill": BLUE, "ttft": YELLOW, "itl": PURPLE}

_LOOKS: Final = {
    FleetKind.PLANNER: ("o", BLUE),
    FleetKind.FIXED: ("s", VERMILION),
    FleetKind.AUTOSCALER: ("^", PURPLE),
    FleetKind.ORACLE: ("D", GREEN),
}

_CLOSE: Final = 0.025
"""Chosen: names of points nearer than this, as a share of the cost and in attainment, would hide each other."""

_COMPUTED = ROLE_COLOURS[Role.PREFILL]


def draw_demand(run: PlannerRun, span_s: float, panels: Sequence[Axes]) -> None:
    """Draw requests/s, prompt tokens/s with forecast and supply, and the oldest wait, one below the other."""
    rates, tokens, waits = panels
    width_s = np.ceil(window_for(span_s) / 2)
    found = demand_bins(run.samples, width_s)
    rates.stairs(found.arrivals, found.edges, fill=True, color=SKY, label=f"arrivals, {width_s:g} s means")
    rates.stairs(found.rejected, found.edges, fill=True, color=PURPLE, label="of them rejected")
    rates.set_ylabel("requests / s")
    tokens.stairs(found.uncached_tokens, found.edges, fill=True, color=SKY, label="arrive, uncached")
    tokens.stairs(
        found.computed_tokens, found.edges, color=_COMPUTED, baseline=None, linewidth=1.6, label="computed"
    )
    _draw_forecasts(tokens, run)
    tokens.set_ylabel("prompt tokens / s")
    waits.stairs(found.oldest_wait_s, found.edges, fill=True, color=_COMPUTED, alpha=0.6, label="oldest wait")
    slo_s = run.config.ttft_slo_s
    waits.axhline(slo_s, color=BLACK, linestyle="--", linewidth=1.0, label=f"TTFT SLO {slo_s:g} s")
    waits.set_ylabel("wait (s)")


def _draw_forecasts(axes: Axes, run: PlannerRun) -> None:
    """Draw what was expected to arrive, at the time that it was expected for, and what the workers could compute."""
    made = [
        (mark.at_s, part.forecast)
        for mark in run.decisions
        for part in mark.roles
        if part.forecast is not None
    ]
    if not made:
        return
    axes.plot(
        *columns([(at_s + forecast.horizon_s, forecast.tokens_per_s) for at_s, forecast in made]),
        color=BLACK,
        linewidth=1.6,
        linestyle=":",
        label="forecast",
    )
    known = [
        (at_s, forecast.supply_tokens_per_s)
        for at_s, forecast in made
        if forecast.supply_tokens_per_s is not None
    ]
    axes.step(
        *columns(known),
        where="post",
        color=YELLOW,
        linewidth=1.8,
        label="supply",
    )


def needing_roles(run: PlannerRun) -> list[Role]:
    """Return the roles whose needed replicas could be looked up."""
    found = {role for _, role, each in readings_of(run) if each.needed is not None}
    return [role for role in ROLE_COLOURS if role in found]


def draw_targets(
    run: PlannerRun, results: Sequence[RequestResult], roles: Sequence[Role], panels: Sequence[Axes]
) -> None:
    """Draw one below the other."""
    _draw_prediction(run, panels[0])
    _draw_attainment(run, results, panels[1])
    _draw_factors(run, panels[2])
    for axes, role in zip(panels[3:], roles, strict=True):
        _draw_replicas(run, role, axes)


def _draw_prediction(run: PlannerRun, axes: Axes) -> None:
    axes.plot(*columns(arrivals_over_time(run)), color=SKY, linewidth=1.6, label="came (30 s)")
    expected = sorted(
        (mark.at_s + part.forecast.horizon_s, part.forecast.tokens_per_s)
        for mark in run.decisions
        for part in mark.roles
        if part.forecast is not None
    )
    axes.plot(*columns(expected), color=BLACK, linewidth=0.9, label="predicted")
    axes.set_ylabel("uncached\ntokens / s")
    axes.set_ylim(bottom=0)


def _draw_attainment(run: PlannerRun, results: Sequence[RequestResult], axes: Axes) -> None:
    config = run.config
    is_ttft, is_itl = kept(results, ttft_s=config.ttft_slo_s, itl_s=config.itl_slo_s)
    lines = [(is_ttft, BLUE, f"TTFT <= {config.ttft_slo_s:g} s")]
    if config.itl_slo_s is not None:
        lines.append((is_itl, VERMILION, f"mean ITL <= {config.itl_slo_s:g} s"))
    for values, colour, label in lines:
        times, shares = attainment_over_time(results, values)
        axes.plot(times, shares, color=colour, linewidth=1.2, marker=".", markersize=4, label=label)
    axes.axhline(
        config.attainment, color=BLACK, linestyle="--", linewidth=1.0, label=f"goal {config.attainment:.0%}"
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("requests\nwithin target")
    axes.set_ylim(top=1.02)


def _draw_factors(run: PlannerRun, axes: Axes) -> None:
    readings = [(at_s, each) for at_s, _, each in readings_of(run)]
    times = np.array([at_s for at_s, _ in readings])
    for name, label in FACTOR_NAMES.items():
        values = [each.factors[name] for _, each in readings]
        axes.plot(times, values, color=_FACTOR_COLOURS[name], linewidth=1.2, label=label)
    axes.axhline(1.0, color=BLACK, linestyle=":", linewidth=1.0, label="as the profile")
    axes.set_ylabel("observed\nover profile")


def _draw_replicas(run: PlannerRun, role: Role, axes: Axes) -> None:
    readings = [
        (at_s, each.needed, each.had)
        for at_s, own, each in readings_of(run)
        if own is role and each.needed is not None and each.had is not None
    ]
    times = [at_s for at_s, _, _ in readings]
    had = [had for _, _, had in readings]
    axes.fill_between(times, had, step="post", color=ROLE_COLOURS[role], alpha=0.25, linewidth=0)
    axes.step(times, had, where="post", color=ROLE_COLOURS[role], linewidth=1.6, label="ready + starting")
    needed = [needed for _, needed, _ in readings]
    axes.step(
        times, needed, where="post", color=BLACK, linewidth=0.9, linestyle="--", label="needed by profile"
    )
    axes.set_ylabel(f"{role.value}\nreplicas")
    axes.set_ylim(0, max([2, *had, *needed]) + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def draw_fleets(axes: Axes, found: Counterfactual) -> None:
    """Draw every fleet whose cost is known; the measured one is a star, with lines through it to compare by."""
    named = {each.name for each in found.outcomes}
    others = [each for each in found.fixed if each.name not in named]
    _points(axes, others, "other fixed fleets", ".", GREY)
    for each in found.outcomes:
        marker, colour = ("*", BLACK) if each.is_measured else _LOOKS[each.kind]
        _points(axes, [each], f"{each.name}, {each.source}", marker, colour)
    _name(axes, [*found.outcomes, *sorted(others, key=lambda each: -each.in_time)])
    served = found.served
    axes.axhline(served.in_time, color=BLACK, linestyle=":", linewidth=1.0)
    if served.gpu_hours is not None:
        axes.axvline(served.gpu_hours, color=BLACK, linestyle=":", linewidth=1.0)
    axes.set_xlabel("GPU-hours")
    axes.set_ylabel(f"share with TTFT below {found.slo_s:g} s")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    legend_beside(axes)


def _points(axes: Axes, fleets: list[FleetOutcome], label: str, marker: str, colour: str) -> None:
    known = [(each.gpu_hours, each) for each in fleets if each.gpu_hours is not None]
    if not known:
        return
    axes.plot(
        [gpu_hours for gpu_hours, _ in known],
        [each.in_time for _, each in known],
        linestyle="none",
        marker=marker,
        markersize=14 if marker == "*" else 8,
        color=colour,
        label=label,
        zorder=4 if marker == "*" else 3,
    )


def _name(axes: Axes, fleets: Sequence[FleetOutcome]) -> None:
    taken: list[tuple[float, float]] = []
    for each in fleets:
        if each.kind is not FleetKind.FIXED or each.gpu_hours is None:
            continue
        place = (each.gpu_hours, each.in_time)
        if any(abs(place[0] - x) < _CLOSE * x and abs(place[1] - y) < _CLOSE for x, y in taken):
            continue
        taken.append(place)
        axes.annotate(each.name, place, xytext=(6, -10), textcoords="offset points", fontsize=7)
