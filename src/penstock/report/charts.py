"""Draws the report's pictures with matplotlib (the extra ``plots``); nothing is computed here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from penstock.api import Role
from penstock.planner.decide.config import Mode
from penstock.report import series
from penstock.report.analysis import floor_gpus, gpu_steps
from penstock.report.counterfactual import Counterfactual
from penstock.report.drawing import (
    BLACK,
    GREY,
    PURPLE,
    ROLE_COLOURS,
    SIZE_INCHES,
    SKY,
    YELLOW,
    blank_figure,
    columns,
    legend_above,
    legend_beside,
    save_all,
    seconds_axis,
)
from penstock.report.findings import RunReport
from penstock.report.ledger_view import PlannerRun
from penstock.report.panels import TALL_INCHES, draw_demand, draw_fleets, draw_targets, needing_roles
from penstock.workload.record import RequestStatus
from penstock.workload.statistics import percentiles

_MARGIN = 0.015
"""Chosen: room for a marker at the right edge."""

_LABELLED_CHANGES = 40
"""Chosen: more labels than this hide each other."""


def draw_all(report: RunReport, directory: Path) -> list[Path]:
    """Write every picture that the report has data for, and return their paths in the page's order."""
    pictures: list[tuple[str, Callable[[], Figure]]] = []
    run = report.planner
    if run is not None and run.samples:
        pictures += [
            ("replicas.png", partial(replicas, report, run)),
            ("signals.png", partial(signals, report, run)),
        ]
        if any(sample.demand is not None for sample in run.samples):
            pictures.append(("demand.png", partial(demand, report, run)))
        if run.config.mode == Mode.SLA:
            pictures.append(("targets.png", partial(targets, report, run)))
    if report.counterfactual is not None:
        pictures.append(("counterfactual.png", partial(counterfactual, report, report.counterfactual)))
    drawn = {"ttft.png": ttft, "itl.png": itl, "requests.png": requests}
    pictures += [(name, partial(draw, report)) for name, draw in drawn.items()]
    return save_all(pictures, directory)


def _figure(report: RunReport, title: str, *, is_of_gaps: bool = False) -> Figure:
    mark = ""
    if report.lag["is_distorted"]:
        mark = "  (DISTORTED: a process lagged behind its schedule)"
    elif is_of_gaps and report.lag["is_itl_distorted"]:
        mark = "  (DISTORTED: a process lagged too much for single gaps)"
    return blank_figure(title + mark, colour="#A00000" if mark else BLACK)


def _over_run(report: RunReport, run: PlannerRun, panels: Sequence[Axes]) -> None:
    begin_s, end_s = series.shown_span(run, duration_s=report.duration_s)
    label = "adjusting" if run.config.policy.waits_for_adjustments else "replicas change"
    spans = [span for span in run.adjusting if span[1] >= begin_s and span[0] <= end_s]
    for axes in panels:
        for number, span in enumerate(spans):
            own = None if number else label
            axes.axvspan(*span, color=YELLOW, alpha=0.15, linewidth=0, label=own)
        axes.set_xlim(begin_s, end_s + _MARGIN * (end_s - begin_s))
        axes.grid(alpha=0.25)
        legend_beside(axes)
    panels[-1].set_xlabel("time (simulated s)")


def _over_load(report: RunReport, axes: Axes) -> None:
    axes.set_xlim(0, max(report.duration_s, 1.0))
    axes.grid(alpha=0.25)
    legend_above(axes)


def replicas(report: RunReport, run: PlannerRun) -> Figure:
    """Replicas of each role, actual and desired, and GPUs against the budget."""
    roles = [role for role in ROLE_COLOURS if any(role in sample.pools for sample in run.samples)]
    figure = _figure(report, "Replicas and GPUs over time")
    panels = list(figure.subplots(len(roles) + 1, 1, sharex=True, squeeze=False)[:, 0])
    for axes, role in zip(panels, roles, strict=False):
        _draw_role(axes, run, role)
    _draw_gpus(panels[-1], run)
    for axes in panels:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _over_run(report, run, panels)
    return figure


def _draw_role(axes: Axes, run: PlannerRun, role: Role) -> None:
    samples = [sample for sample in run.samples if role in sample.pools]
    if not samples:
        return
    samples.append(replace(samples[-1], at_s=max(run.end_s, samples[-1].at_s)))
    times = [sample.at_s for sample in samples]
    colour = ROLE_COLOURS[role]
    ready = [sample.pools[role].ready for sample in samples]
    existing = [sample.pools[role].existing for sample in samples]
    axes.fill_between(times, ready, step="post", color=colour, alpha=0.25, linewidth=0)
    axes.step(times, ready, where="post", color=colour, linewidth=1.8, label="ready")
    if existing != ready:
        axes.step(times, existing, where="post", color=colour, linewidth=0.8, label="+ starting, draining")
    desired = [
        (mark.at_s, part.desired) for mark in run.decisions for part in mark.roles if part.role is role
    ]
    if desired:
        desired.append((max(run.end_s, desired[-1][0]), desired[-1][1]))
        axes.step(
            *columns(desired),
            where="post",
            color=BLACK,
            linestyle="--",
            linewidth=1.1,
            label="desired",
        )
    axes.set_ylabel(f"{role.value}\nreplicas")
    axes.set_ylim(0, max([2, *existing, *(count for _, count in desired)]) + 0.5)


def _draw_gpus(axes: Axes, run: PlannerRun) -> None:
    steps = gpu_steps(run)
    steps.append((max(run.end_s, steps[-1][0]), steps[-1][1]))
    times, gpus = columns(steps)
    axes.fill_between(times, gpus, step="post", color=SKY, alpha=0.35, linewidth=0)
    axes.step(times, gpus, where="post", color=ROLE_COLOURS[Role.PREFILL], linewidth=1.5, label="held")
    budget = run.config.max_gpu_budget
    if budget is not None:
        axes.axhline(budget, color=BLACK, linestyle="--", linewidth=1.1, label=f"budget {budget}")
    floor = floor_gpus(run)
    axes.axhline(floor, color=GREY, linestyle=":", linewidth=1.1, label=f"floor {floor}")
    axes.set_ylabel("GPUs")
    axes.set_ylim(0, max([budget or 0, floor, *gpus]) * 1.15)


def signals(report: RunReport, run: PlannerRun) -> Figure:
    """KV usage and prefill queue, in mode load with their thresholds; decisions as markers where they were taken."""
    has_queue = any(Role.PREFILL in sample.pools for sample in run.samples)
    has_thresholds = run.config.mode == Mode.LOAD
    figure = _figure(report, f"Planner signals{', thresholds' if has_thresholds else ''} and decisions")
    panels = list(figure.subplots(2 if has_queue else 1, 1, sharex=True, squeeze=False)[:, 0])
    config = run.config
    kv_role = Role.DECODE if has_queue else Role.AGGREGATED
    kv = [(sample.at_s, sample.kv_mean) for sample in run.samples]
    _draw_signal(panels[0], run, kv_role, kv, (config.kv_down, config.kv_up))
    panels[0].set_ylabel(f"{kv_role.value} KV usage\n(mean fraction)")
    panels[0].set_ylim(0, 1.2)
    panels[0].set_yticks(np.arange(0, 1.01, 0.2))
    if has_queue:
        queue = [(sample.at_s, sample.queue) for sample in run.samples]
        _draw_signal(panels[1], run, Role.PREFILL, queue, (config.queue_down, config.queue_up))
        panels[1].set_ylabel(
            "prefill queue\n(requests per worker)" if config.queue_per_worker else "prefill queue\n(requests)"
        )
        _queue_scale(panels[1], [value for _, value in queue if value is not None])
    _over_run(report, run, panels)
    return figure


def demand(report: RunReport, run: PlannerRun) -> Figure:
    """What came to the routers' frontends, what was expected and computed of it, and how long it waited."""
    span = series.shown_span(run, duration_s=report.duration_s)
    figure = _figure(report, "Demand at the routers and what became of it")
    panels = figure.subplots(3, 1, sharex=True)
    draw_demand(run, span[1] - span[0], panels)
    for axes in panels:
        axes.set_ylim(bottom=0)
    _over_run(report, run, panels)
    return figure


def targets(report: RunReport, run: PlannerRun) -> Figure:
    """Prediction against truth, attainment, correction factors, and replicas needed against actual ones."""
    roles = needing_roles(run)
    figure = _figure(report, "Mode sla: prediction, targets, correction, replicas")
    figure.set_size_inches(SIZE_INCHES[0], TALL_INCHES)
    panels = figure.subplots(3 + len(roles), 1, sharex=True)
    draw_targets(run, report.load.results, roles, panels)
    _over_run(report, run, panels)
    return figure


def _queue_scale(axes: Axes, values: Sequence[float]) -> None:
    # linear up to 1, where the thresholds are, logarithmic above, for bursts
    top = max([1.0, *values]) * 1.8
    axes.set_yscale("symlog", linthresh=1.0, linscale=1.0)
    axes.set_ylim(-0.06, top)
    ticks = [0.0, 0.5, *(step * 10.0**power for power in range(7) for step in (1, 2, 5))]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if tick <= top]))
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_signal(
    axes: Axes,
    run: PlannerRun,
    role: Role,
    points: Sequence[tuple[float, float | None]],
    thresholds: tuple[float, float],
) -> None:
    times, values = columns(points)
    down, up = thresholds
    unpulled = run.adjusting if run.config.policy.waits_for_adjustments else ()
    shown, heights = series.without_lines_across(times, values, unpulled)
    axes.plot(
        shown, heights, color=ROLE_COLOURS[role], linewidth=1.0, marker=".", markersize=2.5, label="signal"
    )
    if run.config.mode == Mode.LOAD:
        axes.axhline(up, color=BLACK, linestyle="--", linewidth=1.0, label=f"up above {up:g}")
        axes.axhline(down, color=BLACK, linestyle=":", linewidth=1.2, label=f"down below {down:g}")
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
    for action, marker, colour in (("up", "^", "#009E73"), ("down", "v", PURPLE)):
        marks = _changes(run, role, action, points)
        axes.plot(
            [at_s for at_s, _, _ in marks],
            [mean for _, mean, _ in marks],
            linestyle="none",
            marker=marker,
            markersize=9,
            color=colour,
            markeredgecolor=BLACK,
            label=f"scale {action} ({len(marks)})",
            zorder=5,
        )
        for at_s, mean, text in marks[:_LABELLED_CHANGES]:
            axes.annotate(
                text,
                (at_s, mean),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                bbox=box,
            )


def _changes(
    run: PlannerRun, role: Role, action: str, points: Sequence[tuple[float, float | None]]
) -> list[tuple[float, float, str]]:
    """Return (time, height, label) of a role's changes: at the mean decided on, or else at the signal then."""
    times = [at_s for at_s, _ in points]

    def signal_at(at_s: float) -> float:
        place = bisect_right(times, at_s) - 1
        return (points[place][1] if place >= 0 else None) or 0.0

    return [
        (
            mark.at_s,
            signal_at(mark.at_s) if part.mean is None else part.mean,
            f"{part.current}→{part.desired}",
        )
        for mark in run.decisions
        for part in mark.roles
        if part.role is role and part.action == action
    ]


def counterfactual(report: RunReport, found: Counterfactual) -> Figure:
    """GPU-hours against the share in time: what was measured, and what other fleets would have done."""
    figure = _figure(report, "The same traffic on other fleets")
    draw_fleets(figure.subplots(), found)
    return figure


def ttft(report: RunReport) -> Figure:
    """TTFT of each request over its arrival, with running percentiles, and its distribution."""
    ok = [
        result
        for result in report.load.results
        if result.status is RequestStatus.OK and result.ttft_s is not None
    ]
    times = np.array([result.arrival_s for result in ok])
    values = np.array([result.ttft_s for result in ok], dtype=np.float64)
    figure = _figure(report, "Time to first token")
    over_time, spread = figure.subplots(1, 2, width_ratios=(2, 1))
    over_time.scatter(times, values, s=8, color=SKY, alpha=0.6, linewidths=0, label="request")
    window_s = series.window_for(report.duration_s)
    _draw_running(over_time, times, values, window_s)
    bad = [result.arrival_s for result in report.load.results if result.status is not RequestStatus.OK]
    if bad:
        over_time.plot(
            bad,
            np.full(len(bad), 0.02),
            linestyle="none",
            marker="x",
            color="#A00000",
            transform=over_time.get_xaxis_transform(),
            label=f"failed or rejected ({len(bad)})",
        )
    _target(over_time, spread, report.violations.ttft_target_s)
    over_time.set_xlabel("arrival (simulated s)")
    over_time.set_ylabel("TTFT (simulated s)")
    seconds_axis(over_time, "y", values)
    _over_load(report, over_time)
    _draw_cdf(spread, values, "TTFT (simulated s)", ROLE_COLOURS[Role.PREFILL], "requests")
    return figure


def itl(report: RunReport) -> Figure:
    """Inter-token latency over time and its distribution, with the per-request TPOT."""
    times, gaps = series.token_gaps(report.load.results)
    shortest_s = report.lag["resolution_s"] if report.lag["is_itl_unresolved"] else 0.0
    gaps = np.maximum(gaps, shortest_s)  # shorter ones are below the client's timer resolution
    tpot = [r.tpot_s for r in report.load.results if r.status is RequestStatus.OK and r.tpot_s is not None]
    figure = _figure(report, "Inter-token latency", is_of_gaps=True)
    over_time, spread = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_running(over_time, times, gaps, series.window_for(report.duration_s))
    _target(over_time, spread, report.violations.itl_target_s)
    if shortest_s and gaps.size:
        least = f"timers tell gaps from {1000 * shortest_s:g} ms on apart"
        over_time.axhline(shortest_s, color=GREY, linestyle=":", linewidth=1.2, label=least)
    over_time.set_xlabel("time of the token (simulated s)")
    over_time.set_ylabel("ITL (simulated s)")
    seconds_axis(over_time, "y", gaps)
    _over_load(report, over_time)
    if not gaps.size:
        over_time.text(
            0.5, 0.5, "the run kept no inter-token gaps", ha="center", transform=over_time.transAxes
        )
    _draw_cdf(
        spread,
        gaps,
        "latency (simulated s)",
        ROLE_COLOURS[Role.DECODE],
        "gaps (ITL)",
        least=shortest_s,
    )
    shown, share = series.cdf(tpot)
    spread.plot(shown, share, color=BLACK, linestyle="--", linewidth=1.2, label="requests (TPOT)")
    legend_above(spread)
    return figure


def requests(report: RunReport) -> Figure:
    """Arrivals per second and requests in flight."""
    figure = _figure(report, "Arrivals and requests in flight")
    arrivals, flight = figure.subplots(2, 1, sharex=True)
    edges, rate = series.arrivals_per_s(report.load.results)
    arrivals.stairs(rate, edges, fill=True, color=SKY, label=f"arrivals, bins of {_width(edges):g} s")
    arrivals.set_ylabel("arrivals\n(requests / simulated s)")
    edges, mean, peak = series.in_flight(report.load.results)
    flight.stairs(peak, edges, fill=True, color=YELLOW, alpha=0.45, label="in flight, peak")
    flight.stairs(mean, edges, color=BLACK, linewidth=1.4, baseline=None, label="in flight, mean")
    flight.set_ylabel("requests in flight")
    flight.set_xlabel("time (simulated s)")
    for axes in (arrivals, flight):
        axes.set_ylim(bottom=0)
        _over_load(report, axes)
    return figure


def _width(edges: series.Floats) -> float:
    return float(edges[1] - edges[0]) if edges.size > 1 else 1.0


def _draw_running(axes: Axes, times: series.Floats, values: series.Floats, window_s: float) -> None:
    centres, found = series.running_percentiles(times, values, ranks=(50, 99), window_s=window_s)
    if centres.size:
        label = f"over {window_s:.0f} s"
        axes.plot(centres, found[0], color=ROLE_COLOURS[Role.PREFILL], linewidth=1.8, label=f"p50 {label}")
        axes.plot(centres, found[1], color=ROLE_COLOURS[Role.DECODE], linewidth=1.8, label=f"p99 {label}")


def _draw_cdf(
    axes: Axes, values: series.Floats, x_label: str, colour: str, label: str, *, least: float = 0.0
) -> None:
    shown, share = series.cdf(values)
    axes.plot(shown, share, color=colour, linewidth=1.8, label=label)
    if values.size:
        found = percentiles(values, 50, 90, 99)
        axes.plot(found, (0.5, 0.9, 0.99), linestyle="none", marker="o", markersize=4, color=BLACK, zorder=4)
        text = "\n".join(
            f"p{rank}  {'≤ ' if at <= least else ''}{at:.3g} s"
            for rank, at in zip((50, 90, 99), found, strict=True)
        )
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
        axes.text(0.97, 0.05, text, ha="right", fontsize=9, transform=axes.transAxes, bbox=box)
        seconds_axis(axes, "x", values)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(x_label)
    axes.set_ylabel("share at or below")
    axes.grid(alpha=0.25)


def _target(over_time: Axes, spread: Axes, target_s: float | None) -> None:
    if target_s is not None:
        over_time.axhline(
            target_s, color=PURPLE, linestyle="--", linewidth=1.4, label=f"target {target_s:g} s"
        )
        spread.axvline(target_s, color=PURPLE, linestyle="--", linewidth=1.4)
