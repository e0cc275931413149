"""Draws how a planner of mode sla kept its targets; called by `charts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from penstock.api import Role
from penstock.report.demand import arrivals_over_time
from penstock.report.drawing import BLACK, BLUE, PURPLE, ROLE_COLOURS, SKY, VERMILION, YELLOW, columns
from penstock.report.ledger_view import PlannerRun
from penstock.report.targets import FACTOR_NAMES, attainment_over_time, kept, readings_of
from penstock.workload.record import RequestResult

TALL_INCHES: Final = 9.0
"""Height of a picture of five panels."""

_FACTOR_COLOURS: Final = {"prefill": BLUE, "ttft": YELLOW, "itl": PURPLE}


def needing_roles(run: PlannerRun) -> list[Role]:
    """Return the roles whose needed replicas could be looked up."""
    found = {role for _, role, each in readings_of(run) if each.needed is not None}
    return [role for role in ROLE_COLOURS if role in found]


def draw_targets(
    run: PlannerRun, results: Sequence[RequestResult], roles: Sequence[Role], panels: Sequence[Axes]
) -> None:
    """Draw one below the other.

    Args:
        run: Of mode sla.
        results: Of the load run.
        roles: From `needing_roles`.
        panels: Three, and one for each role.
    """
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
