"""Draws the chart of a trace: rate and prefix reuse over time, and lengths of prompts and answers; needs the extra ``plots``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.report.drawing import BLUE, GREEN, VERMILION, blank_figure, columns
from penstock.workload.trace_info import TraceInfo
from penstock.workload.traces import TraceRequest


def draw_trace(name: str, info: TraceInfo, requests: Sequence[TraceRequest]) -> Figure:
    """Return the chart of a trace; a trace without block ids has no panel for reuse, and its title says why.

    Args:
        name: Name of the trace.
        info: Figures that describe the trace, such as its mean rate.
        requests: Requests of the trace.
    """
    unknown = "" if info.reuse is not None else "; no ids, so reuse is unknown"
    figure = blank_figure(f"{name}: {info.requests:,} requests{unknown}")
    rate, *middle, lengths = figure.subplots(1, 2 if unknown else 3)
    _over_time(rate, [(each.start_s, each.rps) for each in info.windows], BLUE)
    rate.set(title="Arrivals", xlabel="seconds", ylabel="requests / s")
    for reuse in middle:
        _over_time(reuse, [(each.start_s, each.reused_fraction) for each in info.windows], GREEN)
        reuse.set(title="Prompt tokens seen before", xlabel="seconds", ylabel="share", ylim=(0, 1))
    for what, values, colour in (
        ("prompts", [each.input_tokens for each in requests], BLUE),
        ("answers", [each.output_tokens for each in requests], VERMILION),
    ):
        ordered = np.sort(np.array(values))
        lengths.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), color=colour, label=what)
    lengths.set(title="Lengths", xlabel="tokens", ylabel="share of requests", xscale="log", ylim=(0, 1))
    lengths.legend(fontsize=8, frameon=False, loc="lower right")
    for axes in (rate, *middle, lengths):
        axes.grid(alpha=0.25)
    return figure


def _over_time(axes: Axes, points: Sequence[tuple[float, float | None]], colour: str) -> None:
    axes.plot(*columns(points), drawstyle="steps-post", color=colour)
    axes.set_ylim(bottom=0)
