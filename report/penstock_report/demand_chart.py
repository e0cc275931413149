"""Draws what came to the routers, what the planner expected, and what became of it; called by `charts`."""

from __future__ import annotations

from matplotlib.axes import Axes

from penstock_api import Role
from penstock_report.drawing import BLACK, PURPLE, ROLE_COLOURS, SKY, YELLOW
from penstock_report.ledger_view import PlannerRun

_COMPUTED = ROLE_COLOURS[Role.PREFILL]


def draw_demand(run: PlannerRun, rates: Axes, tokens: Axes, waits: Axes) -> None:
    """Draw requests/s, prompt tokens/s with forecast and supply, and the oldest wait, one below the other."""
    known = [(sample.at_s, sample.demand) for sample in run.samples if sample.demand is not None]
    times = [at_s for at_s, _ in known]
    rates.plot(times, [d.arrivals / d.period_s for _, d in known], color=SKY, linewidth=1.2, label="arrivals")
    rejected = [(d.refused + d.timed_out) / d.period_s for _, d in known]
    rates.fill_between(times, rejected, step="post", color=PURPLE, alpha=0.6, linewidth=0, label="rejected")
    rates.set_ylabel("requests / s")
    uncached = [d.uncached_tokens / d.period_s for _, d in known]
    tokens.plot(times, uncached, color=SKY, linewidth=1.2, label="arrive, uncached")
    computed = [d.prefilled_tokens / d.period_s for _, d in known]
    tokens.plot(times, computed, color=_COMPUTED, linewidth=1.2, label="computed")
    _draw_forecasts(tokens, run)
    tokens.set_ylabel("prompt tokens / s")
    oldest = [d.oldest_wait_s or 0.0 for _, d in known]
    waits.fill_between(
        times, oldest, step="post", color=_COMPUTED, alpha=0.35, linewidth=0, label="oldest wait"
    )
    slo_s = run.config.ttft_slo_s
    waits.axhline(slo_s, color=BLACK, linestyle="--", linewidth=1.0, label=f"TTFT SLO {slo_s:g} s")
    waits.set_ylabel("wait (s)")
    waits.set_xlabel("time (simulated s)")


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
        [at_s + forecast.horizon_s for at_s, forecast in made],
        [forecast.tokens_per_s for _, forecast in made],
        color=BLACK,
        linewidth=1.0,
        linestyle=":",
        label="forecast",
    )
    known = [
        (at_s, forecast.supply_tokens_per_s)
        for at_s, forecast in made
        if forecast.supply_tokens_per_s is not None
    ]
    axes.step(
        [at_s for at_s, _ in known],
        [supply for _, supply in known],
        where="post",
        color=YELLOW,
        linewidth=1.2,
        label="supply",
    )
