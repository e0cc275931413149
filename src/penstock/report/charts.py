"""Draws the report's charts with matplotlib (the extra ``plots``); the data are computed elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from penstock.report import series
from penstock.report.counterfactual import Counterfactual, FleetKind, FleetOutcome
from penstock.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    SIZE_INCHES,
    SKY,
    VERMILION,
    YELLOW,
    blank_figure,
    columns,
    legend_above,
    legend_right,
    save_all,
    seconds_axis,
)
from penstock.report.findings import RunReport
from penstock.report.ledger_view import PlannerRun
from penstock.report.planner_charts import Picture, planner_pictures
from penstock.workload.record import RequestStatus
from penstock.workload.statistics import percentiles

_TALL_INCHES, _TALL_PANELS = 9.0, 3
"""Number of panels above which a chart has the height `_TALL_INCHES`."""


_RED: Final = "#A00000"

_STYLES: Final = {
    FleetKind.PLANNER: (("o", BLUE),),
    FleetKind.FIXED: (("s", VERMILION), ("P", YELLOW)),
    FleetKind.AUTOSCALER: (("^", PURPLE),),
    FleetKind.ORACLE: (("D", GREEN),),
}
"""Markers and colours for the fleets of each kind, used in turn, so that the two fixed fleets differ."""


def draw_all(report: RunReport, directory: Path) -> list[Path]:
    """Write every chart that the report has data for as a PNG file into ``directory``, and return the paths in the order of the page."""
    run = report.planner
    pictures: list[tuple[str, Callable[[], Figure]]] = []
    if run is not None and run.pulls:
        pictures += [
            (f"{each.name}.png", partial(_over_time, report, run, each)) for each in planner_pictures(run)
        ]
    if report.counterfactual is not None:
        pictures.append(("counterfactual.png", partial(_fleets, report, report.counterfactual)))
    drawn = {"ttft.png": _ttft, "itl.png": _itl, "requests.png": _requests}
    pictures += [(name, partial(draw, report)) for name, draw in drawn.items()]
    return save_all(pictures, directory)


def _measured_figure(title: str, *, is_distorted: bool) -> Figure:
    """Return a figure for a measured quantity; its title is red if lag of the load generator has distorted the values."""
    mark = "  (DISTORTED: a process lagged behind its schedule)" if is_distorted else ""
    return blank_figure(title + mark, colour=_RED if is_distorted else BLACK)


def _over_time(report: RunReport, run: PlannerRun, picture: Picture) -> Figure:
    """Draw one of the planner's charts over time, with the times shaded at which replicas start or drain."""
    figure = blank_figure(picture.title)
    if picture.panels > _TALL_PANELS:
        figure.set_size_inches(SIZE_INCHES[0], _TALL_INCHES)
    panels = list(figure.subplots(picture.panels, 1, sharex=True, squeeze=False)[:, 0])
    picture.draw(run, report.load.results, panels)
    begin_s, end_s = series.shown_span(run, duration_s=report.duration_s)
    label = "adjusting" if run.config.policy.waits_for_adjustments else "replicas change"
    spans = [span for span in run.adjusting if span[1] >= begin_s and span[0] <= end_s]
    for axes in panels:
        for number, span in enumerate(spans):
            axes.axvspan(*span, color=YELLOW, alpha=0.15, linewidth=0, label=None if number else label)
        axes.set_xlim(begin_s, end_s)
        axes.grid(alpha=0.25)
        legend_right(axes)
    panels[-1].set_xlabel("time (simulated s)")
    return figure


def _over_load(report: RunReport, axes: Axes) -> None:
    axes.set_xlim(0, max(report.duration_s, 1.0))
    axes.grid(alpha=0.25)
    legend_above(axes)


def _fleets(report: RunReport, found: Counterfactual) -> Figure:
    """Draw every fleet with known cost; the measured one is a star, with lines through it for comparison."""
    figure = _measured_figure("The same traffic on other fleets", is_distorted=report.lag["is_distorted"])
    axes = figure.subplots()
    named, served = {each.name for each in found.outcomes}, found.served
    _points(axes, [each for each in found.fixed if each.name not in named], "other fixed fleets", ".", GREY)
    seen: Counter[FleetKind] = Counter()
    for each in found.outcomes:
        styles = (("*", BLACK),) if each.is_measured else _STYLES[each.kind]
        marker, colour = styles[seen[each.kind] % len(styles)]
        seen[each.kind] += not each.is_measured
        _points(axes, [each], f"{each.name}, {each.source}", marker, colour)
    axes.axhline(served.in_time, color=BLACK, linestyle=":", linewidth=1.0)
    if served.gpu_hours is not None:
        axes.axvline(served.gpu_hours, color=BLACK, linestyle=":", linewidth=1.0)
    axes.set(xlabel="GPU-hours", ylabel=f"share with TTFT below {found.slo_s:g} s")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    legend_right(axes)
    return figure


def _points(axes: Axes, fleets: Sequence[FleetOutcome], label: str, marker: str, colour: str) -> None:
    points = [(each.gpu_hours, each.in_time) for each in fleets if each.gpu_hours is not None]
    if points:
        size = 14 if marker == "*" else 8
        axes.plot(*columns(points), marker, markersize=size, color=colour, label=label, zorder=3)


def _ttft(report: RunReport) -> Figure:
    """Draw the TTFT of each request by arrival time, with running percentiles, and its distribution."""
    ok = [
        (result.arrival_s, result.ttft_s)
        for result in report.load.results
        if result.status is RequestStatus.OK and result.ttft_s is not None
    ]
    times, values = columns(ok)
    figure = _measured_figure("Time to first token", is_distorted=report.lag["is_distorted"])
    over_time, spread = figure.subplots(1, 2, width_ratios=(2, 1))
    over_time.scatter(times, values, s=8, color=SKY, alpha=0.6, linewidths=0, label="request")
    bad = [result.arrival_s for result in report.load.results if result.status is not RequestStatus.OK]
    if bad:
        foot = over_time.get_xaxis_transform()
        label = f"failed or rejected ({len(bad)})"
        over_time.plot(bad, [0.02] * len(bad), "x", color=_RED, transform=foot, label=label)
    over_time.set(xlabel="arrival (simulated s)", ylabel="TTFT (simulated s)")
    _draw_cdf(spread, values, BLUE, "requests")
    spread.set_xlabel("TTFT (simulated s)")
    _finish_latency(report, over_time, spread, (times, values), report.violations.ttft_target_s)
    return figure


def _itl(report: RunReport) -> Figure:
    """Draw inter-token latency over time, and its distribution together with the per-request TPOT."""
    times, gaps = series.token_gaps(report.load.results)
    shortest_s = report.lag["resolution_s"] if report.lag["is_itl_unresolved"] else 0.0
    gaps = np.maximum(gaps, shortest_s)  # shorter ones are below the client's timer resolution
    tpot = [r.tpot_s for r in report.load.results if r.status is RequestStatus.OK and r.tpot_s is not None]
    figure = _measured_figure("Inter-token latency", is_distorted=report.lag["is_itl_distorted"])
    over_time, spread = figure.subplots(1, 2, width_ratios=(2, 1))
    if shortest_s and gaps.size:
        least = f"timers tell gaps from {1000 * shortest_s:g} ms on apart"
        over_time.axhline(shortest_s, color=GREY, linestyle=":", linewidth=1.2, label=least)
    if not gaps.size:
        middle = {"ha": "center", "transform": over_time.transAxes}
        over_time.text(0.5, 0.5, "the run kept no inter-token gaps", **middle)
    over_time.set(xlabel="time of the token (simulated s)", ylabel="ITL (simulated s)")
    _draw_cdf(spread, gaps, VERMILION, "gaps (ITL)", least=shortest_s)
    spread.plot(*series.cdf(tpot), color=BLACK, linestyle="--", linewidth=1.2, label="requests (TPOT)")
    spread.set_xlabel("latency (simulated s)")
    _finish_latency(report, over_time, spread, (times, gaps), report.violations.itl_target_s)
    legend_above(spread)
    return figure


def _finish_latency(
    report: RunReport,
    over_time: Axes,
    spread: Axes,
    points: tuple[series.Floats, series.Floats],
    target_s: float | None,
) -> None:
    """Draw running percentiles and the target, and scale the axis."""
    window_s = series.window_for(report.duration_s)
    centres, found = series.running_percentiles(*points, ranks=(50, 99), window_s=window_s)
    for rank, line, colour in zip((50, 99), found, (BLUE, VERMILION), strict=True):
        over_time.plot(centres, line, color=colour, linewidth=1.8, label=f"p{rank} over {window_s:.0f} s")
    if target_s is not None:
        over_time.axhline(target_s, color=PURPLE, linestyle="--", label=f"target {target_s:g} s")
        spread.axvline(target_s, color=PURPLE, linestyle="--")
    seconds_axis(over_time, "y", points[1])
    _over_load(report, over_time)


def _draw_cdf(axes: Axes, values: series.Floats, colour: str, label: str, *, least: float = 0.0) -> None:
    axes.plot(*series.cdf(values), color=colour, linewidth=1.8, label=label)
    if values.size:
        found = percentiles(values, 50, 90, 99)
        axes.plot(found, (0.5, 0.9, 0.99), "o", markersize=4, color=BLACK, zorder=4)
        text = "\n".join(
            f"p{rank}  {'≤ ' if at <= least else ''}{at:.3g} s"
            for rank, at in zip((50, 90, 99), found, strict=True)
        )
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
        axes.text(0.97, 0.05, text, ha="right", fontsize=9, transform=axes.transAxes, bbox=box)
        seconds_axis(axes, "x", values)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share at or below")
    axes.grid(alpha=0.25)


def _requests(report: RunReport) -> Figure:
    """Draw arrivals per second and requests in flight."""
    figure = blank_figure("Arrivals and requests in flight")
    arrivals, flight = figure.subplots(2, 1, sharex=True)
    times = [result.arrival_s for result in report.load.results]
    width_s = np.ceil(max(report.duration_s, 1.0) / 120)
    bins = np.arange(0, max([report.duration_s, *times]) + width_s, width_s)
    share = np.full(len(times), 1 / width_s)
    arrivals.hist(times, bins, weights=share, color=SKY, label=f"arrivals, bins of {width_s:g} s")
    arrivals.set_ylabel("arrivals\n(requests / simulated s)")
    flight.step(*series.in_flight(report.load.results), where="post", color=BLUE, label="in flight")
    flight.set(xlabel="time (simulated s)", ylabel="requests in flight")
    for axes in (arrivals, flight):
        axes.set_ylim(bottom=0)
        _over_load(report, axes)
    return figure
