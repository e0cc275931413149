"""Draws a planner's run over time (replicas, signals, demand, and the targets of mode sla); called by `charts`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from penstock.api import Role
from penstock.report import series
from penstock.report.analysis import FACTOR_NAMES
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
)
from penstock.report.ledger_view import PlannerRun
from penstock.workload.record import RequestResult
from penstock_planner.decide.config import Mode
from penstock_planner.decide.demand.observation import Pull
from penstock_planner.served_shares import WINDOW_S, share_windows

Points = Sequence[tuple[float, float | None]]

_FACTOR_COLOURS: Final = {"prefill": BLUE, "ttft": YELLOW, "itl": PURPLE}


def _steps(axes: Axes, points: Points, colour: str, label: str, *, until_s: float | None = None) -> None:
    """Draw steps, the last one until ``until_s``. Desired values are black and dashed."""
    if points:
        last_s, last = points[-1]
        shown = [*points, (max(until_s, last_s), last)] if until_s is not None else points
        line = "--" if colour == BLACK else "-"
        axes.step(*columns(shown), where="post", color=colour, linestyle=line, label=label)


def _goal(axes: Axes, value: float, label: str, *, is_dotted: bool = False) -> None:
    axes.axhline(value, color=GREY if is_dotted else BLACK, linestyle=":" if is_dotted else "--", label=label)


def _whole(axes: Axes, label: str, values: Iterable[float]) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(0, max([2, *values]) * 1.1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _roles(run: PlannerRun) -> list[Role]:
    return [role for role in ROLE_COLOURS if any(role in pull.pools for pull in run.pulls)]


def _needing_roles(run: PlannerRun) -> list[Role]:
    found = {role for _, role, each in run.readings() if each.needed is not None}
    return [role for role in ROLE_COLOURS if role in found]


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart of a planner's run over time.

    Attributes:
        name: File name without its ending.
        title: Title of the chart.
        panels: Number of panels, which are drawn one below the other.
        draw: Function of the planner's run, the results of the load run's requests, and the axes of the panels, that draws the panels.
    """

    name: str
    title: str
    panels: int
    draw: Callable[[PlannerRun, Sequence[RequestResult], Sequence[Axes]], None]


def planner_pictures(run: PlannerRun) -> list[Picture]:
    """Return the charts for which the planner's ledger (decision log) has data."""
    roles, thresholds = _roles(run), ", thresholds" if run.config.mode == Mode.LOAD else ""
    signals = 2 if Role.PREFILL in roles else 1
    found = [
        Picture("replicas", "Replicas and GPUs over time", len(roles) + 1, _draw_replicas),
        Picture("signals", f"Planner signals{thresholds} and decisions", signals, _draw_signals),
    ]
    if any(pull.demand is not None for pull in run.pulls):
        found.append(Picture("demand", "Demand at the routers and what became of it", 3, _draw_demand))
    if run.config.mode == Mode.SLA:
        title = "Mode sla: prediction, targets, correction, replicas"
        found.append(Picture("targets", title, 3 + len(_needing_roles(run)), _draw_targets))
    if share_windows(run.shares()):
        found.append(Picture("in_time", "Requests in time: served, and predicted", 1, _draw_in_time))
    return found


def _draw_replicas(run: PlannerRun, _results: Sequence[RequestResult], panels: Sequence[Axes]) -> None:
    """Draw each role's replicas, existing and desired, and below them the GPUs with the budget."""
    for axes, role in zip(panels, _roles(run), strict=False):
        pools = [(pull.at_s, pull.pools[role]) for pull in run.pulls if role in pull.pools]
        desired = [
            (mark.at_s, part.desired) for mark in run.decisions for part in mark.roles if part.role is role
        ]
        existing = [(at_s, pool.existing) for at_s, pool in pools]
        _steps(axes, existing, SKY, "+ starting, draining", until_s=run.end_s)
        ready = [(at_s, pool.ready) for at_s, pool in pools]
        _steps(axes, ready, ROLE_COLOURS[role], "ready", until_s=run.end_s)
        _steps(axes, desired, BLACK, "desired", until_s=run.end_s)
        _whole(axes, f"{role.value}\nreplicas", [count for _, count in (*existing, *desired)])
    axes, gpus, floor, budget = panels[-1], run.gpu_steps(), run.floor_gpus(), run.config.max_gpu_budget
    _steps(axes, gpus, BLUE, "held", until_s=run.end_s)
    if budget is not None:
        _goal(axes, budget, f"budget {budget}")
    _goal(axes, floor, f"floor {floor}", is_dotted=True)
    _whole(axes, "GPUs", [budget or 0, floor, *(held for _, held in gpus)])


def _draw_signals(run: PlannerRun, _results: Sequence[RequestResult], panels: Sequence[Axes]) -> None:
    """Draw KV usage and, on a second panel, the prefill queue, with a marker for each decision."""
    config = run.config
    kv_role = Role.DECODE if len(panels) > 1 else Role.AGGREGATED
    kv = [(pull.at_s, pull.kv.mean) for pull in run.pulls]
    _draw_signal(panels[0], run, kv_role, kv, (config.kv_down, config.kv_up))
    panels[0].set_ylabel(f"{kv_role.value} KV usage\n(mean fraction)")
    panels[0].set_ylim(0, 1.2)
    for axes in panels[1:]:
        unit = "requests per worker" if config.queue_per_worker else "requests"
        queue = [(pull.at_s, _queue(pull, per_worker=config.queue_per_worker)) for pull in run.pulls]
        _draw_signal(axes, run, Role.PREFILL, queue, (config.queue_down, config.queue_up))
        axes.set_ylabel(f"prefill queue\n({unit})")
        axes.set_yscale("symlog", linthresh=1.0)  # thresholds are below 1, bursts far above
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom=0)


def _queue(pull: Pull, *, per_worker: bool) -> float | None:
    if per_worker:
        return pull.queue_per_worker
    return pull.queue.value if pull.queue is not None and pull.queue.is_known else None


def _draw_signal(
    axes: Axes, run: PlannerRun, role: Role, points: Points, thresholds: tuple[float, float]
) -> None:
    axes.plot(*columns(points), color=ROLE_COLOURS[role], linewidth=1.0, label="signal")
    if run.config.mode == Mode.LOAD:
        _goal(axes, thresholds[1], f"up above {thresholds[1]:g}")
        _goal(axes, thresholds[0], f"down below {thresholds[0]:g}", is_dotted=True)
    times = [at_s for at_s, _ in points]
    for action, marker, colour in (("up", "^", GREEN), ("down", "v", PURPLE)):
        marks = []
        for mark in run.decisions:
            for part in mark.roles:
                if part.role is role and part.action == action:
                    place = bisect_right(times, mark.at_s) - 1
                    signal = (points[place][1] if place >= 0 else None) or 0.0
                    marks.append((mark.at_s, signal if part.mean is None else part.mean))
        label = f"scale {action} ({len(marks)})"
        axes.plot(
            *columns(marks), marker, markersize=9, color=colour, markeredgecolor=BLACK, label=label, zorder=5
        )


def _draw_demand(run: PlannerRun, _results: Sequence[RequestResult], panels: Sequence[Axes]) -> None:
    """Draw requests/s, prompt tokens/s with forecast and supply, and the longest wait."""
    rates, tokens, waits = panels
    width_s = np.ceil(series.window_for(run.end_s) / 2)
    edges, found = series.demand_bins(run.pulls, width_s)
    rates.stairs(found["arrivals"], edges, fill=True, color=SKY, label=f"arrivals, {width_s:g} s means")
    rates.stairs(found["rejected"], edges, fill=True, color=PURPLE, label="of them rejected")
    rates.set_ylabel("requests / s")
    tokens.stairs(found["uncached"], edges, fill=True, color=SKY, label="arrive, uncached")
    tokens.stairs(found["computed"], edges, color=BLUE, baseline=None, label="computed")
    _draw_forecasts(tokens, run)
    supply = [
        (at_s, forecast.supply_tokens_per_s)
        for at_s, forecast in run.forecasts()
        if forecast.supply_tokens_per_s is not None
    ]
    _steps(tokens, supply, YELLOW, "supply")
    tokens.set_ylabel("prompt tokens / s")
    waits.stairs(found["oldest_wait_s"], edges, fill=True, color=BLUE, alpha=0.6, label="oldest wait")
    _goal(waits, run.config.ttft_slo_s, f"TTFT SLO {run.config.ttft_slo_s:g} s")
    waits.set_ylabel("wait (s)")
    for axes in panels:
        axes.set_ylim(bottom=0)


def _draw_forecasts(axes: Axes, run: PlannerRun) -> None:
    """Draw each forecast at the time that it was for."""
    made = [(at_s + forecast.horizon_s, forecast.tokens_per_s) for at_s, forecast in run.forecasts()]
    if made:
        axes.plot(*columns(sorted(made)), color=BLACK, linestyle=":", label="forecast")


def _draw_targets(run: PlannerRun, results: Sequence[RequestResult], panels: Sequence[Axes]) -> None:
    """Draw forecast, attainment, correction factors and each role's replicas."""
    prediction, attainment, factors, *replicas = panels
    pulls = np.array([pull.at_s for pull in run.pulls])
    prediction.plot(pulls, series.tokens_around(run.pulls, pulls), color=SKY, label="came (30 s)")
    _draw_forecasts(prediction, run)
    prediction.set_ylabel("uncached\ntokens / s")
    prediction.set_ylim(bottom=0)
    _draw_attainment(run, results, attainment)
    times = [at_s for at_s, _, _ in run.readings()]
    for name, label in FACTOR_NAMES.items():
        values = [each.factors[name] for _, _, each in run.readings()]
        factors.plot(times, values, color=_FACTOR_COLOURS[name], label=label)
    _goal(factors, 1.0, "as the profile", is_dotted=True)
    factors.set_ylabel("observed\nover profile")
    for axes, role in zip(replicas, _needing_roles(run), strict=True):
        known = [(at_s, each) for at_s, own, each in run.readings() if own is role and each.needed]
        had, needed = (
            [(at_s, each.had) for at_s, each in known],
            [(at_s, each.needed) for at_s, each in known],
        )
        _steps(axes, had, ROLE_COLOURS[role], "ready + starting")
        _steps(axes, needed, BLACK, "needed by profile")
        _whole(axes, f"{role.value}\nreplicas", [count or 0 for _, count in (*had, *needed)])


def _shares(axes: Axes, label: str) -> None:
    """Scale an axis of fractions from at most 90% to 100%, since a smaller range would magnify single requests."""
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel(label)
    axes.set_ylim(min(0.9, axes.get_ylim()[0]), 1.01)


def _draw_in_time(run: PlannerRun, _results: Sequence[RequestResult], panels: Sequence[Axes]) -> None:
    """Draw the observed and the predicted fraction on time, by windows of ten minutes."""
    (axes,), windows = panels, share_windows(run.shares())
    for values, colour, label in (
        ([each.served for each in windows], BLUE, "served"),
        ([each.predicted for each in windows], BLACK, "predicted"),
    ):
        times = [each.at_s + WINDOW_S / 2 for each in windows]
        axes.plot(times, values, "--" if colour == BLACK else "-", color=colour, marker=".", label=label)
    _shares(axes, "requests\nin time")


def _draw_attainment(run: PlannerRun, results: Sequence[RequestResult], axes: Axes) -> None:
    config = run.config
    in_time, is_fast = series.within_targets(results, ttft_s=config.ttft_slo_s, itl_s=config.itl_slo_s)
    lines = [(in_time, BLUE, f"TTFT <= {config.ttft_slo_s:g} s")]
    if config.itl_slo_s is not None:
        lines.append((is_fast, VERMILION, f"mean ITL <= {config.itl_slo_s:g} s"))
    for values, colour, label in lines:
        axes.plot(*series.attainment_over_time(results, values), color=colour, marker=".", label=label)
    _goal(axes, config.attainment, f"goal {config.attainment:.0%}")
    _shares(axes, "requests\nwithin target")
