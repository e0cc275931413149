"""Draws what came to the routers, what the planner expected, and what became of it; called by `charts`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from penstock.api import Role
from penstock.report.demand import demand_bins
from penstock.report.drawing import BLACK, PURPLE, ROLE_COLOURS, SKY, YELLOW, columns
from penstock.report.ledger_view import PlannerRun
from penstock.report.series import window_for

_COMPUTED = ROLE_COLOURS[Role.PREFILL]


def draw_demand(run: PlannerRun, span_s: float, panels: Sequence[Axes]) -> None:
    """Draw requests/s, prompt tokens/s with forecast and supply, and the oldest wait, one below the other.

    Args:
        run: The planner's; a pull knows the demand.
        span_s: How long a time is shown, seconds.
        panels: Three.
    """
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
