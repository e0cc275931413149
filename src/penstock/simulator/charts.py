"""Draws the simulator's charts with matplotlib (the extra ``plots``), with the figure layout and colours of the load report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from penstock.report import series
from penstock.report.drawing import (
    BLACK,
    GREY,
    LINE_COLOURS,
    PURPLE,
    ROLE_COLOURS,
    SKY,
    blank_figure,
    legend_above,
    legend_below,
    legend_right,
    save_all,
    seconds_axis,
)
from penstock.simulator.observer import Recording
from penstock.simulator.scoreboard import attainment_over_time


def draw_all(result: Mapping[str, Any], recordings: Mapping[str, Recording], directory: Path) -> list[Path]:
    """Write every chart for which there are data as a PNG file, and return the paths of the files.

    Args:
        result: Result of `plan.run_plan`.
        recordings: One recorded run of each policy, by the policy's label; if empty, only the charts of the summary are drawn.
        directory: Folder to write to.
    """
    drawn: list[tuple[str, Callable[[], Figure]]] = [
        ("capacity.png", lambda: capacity(result["summary"], slo_s=result["slo_s"])),
        ("hits.png", lambda: hits(result["summary"])),
    ]
    if recordings:
        drawn += [
            ("ttft_cdf.png", lambda: ttft_cdf(recordings, slo_s=result["slo_s"])),
            ("imbalance.png", lambda: imbalance(recordings)),
            ("replicas.png", lambda: replicas(next(iter(recordings.values())), slo_s=result["slo_s"])),
        ]
    return save_all(drawn, directory)


def capacity(summary: Sequence[Mapping[str, Any]], *, slo_s: float) -> Figure:
    """Draw the fraction of requests with a TTFT within its target, and the 90th percentile of the TTFT, each against the request rate.

    Args:
        summary: Rows that `sweep.summarise` returns.
        slo_s: TTFT target in seconds, drawn as a line.
    """
    figure = blank_figure("Effective request capacity")
    share, latency = figure.subplots(1, 2)
    shown = [slo_s]
    for label, style, rows in _lines(summary):
        rates = [_rate(row) for row in rows]
        share.plot(rates, [row["on_time"] for row in rows], label=label, **style)
        low, high = [row["on_time_min"] for row in rows], [row["on_time_max"] for row in rows]
        share.fill_between(rates, low, high, color=style["color"], alpha=0.12, linewidth=0)
        p90 = [np.nan if row["ttft_s"]["p90"] is None else row["ttft_s"]["p90"] for row in rows]
        latency.plot(rates, p90, label=label, **style)
        shown += [each for each in p90 if each > 0]
    share.axhline(0.9, color=GREY, linestyle=":", linewidth=1.0)
    share.set_ylabel(f"share with TTFT below {slo_s:g} s")
    share.set_ylim(0, 1.02)
    latency.axhline(slo_s, color=PURPLE, linestyle="--", linewidth=1.2)
    latency.set_ylabel("P90 TTFT (simulated s)")
    seconds_axis(latency, "y", np.array(shown))
    _finish_rates(figure, share, latency)
    return figure


def hits(summary: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the cache hit rate with its upper bound, and the load imbalance between workers, each against the request rate.

    ``summary`` are the rows that `sweep.summarise` returns.
    """
    figure = blank_figure("Cache hits and balance")
    rate, balance = figure.subplots(1, 2)
    bounds: dict[float, float] = {}
    for label, style, rows in _lines(summary):
        rates = [_rate(row) for row in rows]
        rate.plot(rates, [_or_nan(row["hit_rate"]) for row in rows], label=label, **style)
        balance.plot(rates, [_or_nan(row["imbalance_cv"]) for row in rows], label=label, **style)
        bounds |= {_rate(row): _or_nan(row["hit_bound"]) for row in rows}
    order = sorted(bounds)
    rate.plot(order, [bounds[at] for at in order], color=BLACK, linestyle="--", label="bound")
    rate.set_ylabel("prompt tokens found in a cache")
    rate.set_ylim(bottom=0)
    balance.set_ylabel("CV of pending tokens over workers")
    balance.set_ylim(bottom=0)
    _finish_rates(figure, rate, balance)
    return figure


def ttft_cdf(recordings: Mapping[str, Recording], *, slo_s: float) -> Figure:
    """Draw the cumulative distribution of the TTFT, one curve per policy.

    Args:
        recordings: One recorded run by policy label.
        slo_s: TTFT target in seconds, drawn as a line.
    """
    figure = blank_figure("Time to first token")
    axes = figure.subplots()
    every = [np.empty(0)]
    for (label, recording), colour in zip(recordings.items(), _colours(len(recordings)), strict=True):
        ttft = recording.requests.ttft_s
        served = ttft[~np.isnan(ttft)]
        shown, share = series.cdf(served)
        axes.plot(shown, share * served.size / max(1, ttft.size), color=colour, linewidth=1.6, label=label)
        every.append(served)
    axes.axvline(slo_s, color=PURPLE, linestyle="--", linewidth=1.2)
    seconds_axis(axes, "x", np.concatenate(every))
    axes.set_xlabel("TTFT (simulated s)")
    axes.set_ylabel("share of all requests at or below")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25)
    legend_right(axes)
    return figure


def imbalance(recordings: Mapping[str, Recording]) -> Figure:
    """Draw the prompt tokens still to be computed over simulated time: their coefficient of variation over the workers, and their sum.

    ``recordings`` holds one recorded run of each policy, by the policy's label.
    """
    figure = blank_figure("Load over time")
    spread, total = figure.subplots(2, 1, sharex=True)
    for (label, recording), colour in zip(recordings.items(), _colours(len(recordings)), strict=True):
        times = np.array([sample.at_s for sample in recording.samples])
        cv = np.array([_or_nan(sample.imbalance) for sample in recording.samples])
        pending = np.array([float(sum(sample.pending_tokens)) for sample in recording.samples])
        spread.plot(*_smooth(times, cv), color=colour, linewidth=1.2, label=label)
        total.plot(*_smooth(times, pending), color=colour, linewidth=1.2, label=label)
    spread.set_ylabel("CV over workers")
    total.set_ylabel("pending prompt tokens")
    total.set_xlabel("time (simulated s)")
    for axes in (spread, total):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    legend_above(spread)
    return figure


def replicas(recording: Recording, *, slo_s: float) -> Figure:
    """Draw the run in ``recording`` over simulated time: replicas by role, GPUs held, and the fraction of requests on time.

    A request is on time if its TTFT is below ``slo_s`` seconds.
    """
    figure = blank_figure("Replicas, GPUs and requests in time")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    times = [sample.at_s for sample in recording.samples]
    for role, colour in ROLE_COLOURS.items():
        counts = [sample.replicas[role] for sample in recording.samples if role in sample.replicas]
        if counts:
            top.step(
                times, [ready for ready, _, _ in counts], where="post", color=colour, label=f"{role} ready"
            )
            existing = [sum(each) for each in counts]
            top.step(times, existing, where="post", color=colour, linewidth=0.8, linestyle=":")
    middle.step(
        times, [sample.gpus for sample in recording.samples], where="post", color=SKY, label="GPUs held"
    )
    window_s = series.window_for(times[-1] if times else 1.0)
    ends, shares = attainment_over_time(recording, slo_s, window_s=window_s)
    bottom.plot(ends, shares, color=BLACK, label=f"in time, over {window_s:.0f} s")
    bottom.set_ylim(0, 1.02)
    bottom.set_xlabel("time (simulated s)")
    for axes, name in ((top, "replicas"), (middle, "GPUs"), (bottom, "share in time")):
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        legend_right(axes)
    for axes in (top, middle):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _lines(summary: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any], list[Mapping[str, Any]]]]:
    """Return each label with its line style and its rows; when there are more labels than colours, further lines are dashed."""
    labels = list(dict.fromkeys(row["label"] for row in summary))
    return [
        (
            label,
            {
                "color": colour,
                "marker": "o" if place < len(LINE_COLOURS) else "s",
                "linestyle": "-" if place < len(LINE_COLOURS) else "--",
            },
            sorted((row for row in summary if row["label"] == label), key=_rate),
        )
        for place, (label, colour) in enumerate(zip(labels, _colours(len(labels)), strict=True))
    ]


def _colours(count: int) -> list[str]:
    return [LINE_COLOURS[place % len(LINE_COLOURS)] for place in range(count)]


def _rate(row: Mapping[str, Any]) -> float:
    rate = row["qps"] if row["qps"] is not None else row["rate_rps"]
    return float("nan") if rate is None else float(rate)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _finish_rates(figure: Figure, left: Axes, right: Axes) -> None:
    for axes in (left, right):
        axes.set_xlabel("requests / simulated s")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 5, 10)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.25)
    legend_below(figure, left)


def _smooth(times: series.Floats, values: series.Floats) -> tuple[series.Floats, series.Floats]:
    """Return the times and running medians of ``values``, so that a thousand samples form a readable line."""
    known = ~np.isnan(values)
    times, values = times[known], values[known]
    if times.size == 0:
        return times, values
    window_s = series.window_for(float(times[-1]))
    centres, found = series.running_percentiles(times, values, ranks=(50,), window_s=window_s)
    return centres, found[0]
