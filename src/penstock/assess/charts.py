"""Draws an assessment over time as inline SVG: load, replicas, share in time. It needs no library and follows the page's colours. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np

from penstock.api import SloConfig
from penstock.assess.observed import Floats, Observed, filled
from penstock.core.histogram import share_within
from penstock.report.html_parts import text
from penstock.simulator.observer import Recording

BLUE, VERMILION, _GREEN = "#1f83c4", "#d55e00", "#009e73"
"""Okabe-Ito's colours, the blue a little lighter: legible on white and on the dark ground."""
_WIDTH, _HEIGHT = 480.0, 170.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 10.0, 34.0, 26.0
_FEW_S: Final = 6 * 3600.0
"""Length below which shares are drawn by ten minutes rather than by hours."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of one chart.

    Attributes:
        at_s: Seconds from the beginning, rising.
        values: At each time; NaN interrupts the line.
        is_stepped: A value holds until the next time.
    """

    name: str
    colour: str
    at_s: Floats
    values: Floats
    is_stepped: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Time that a chart shows.

    Attributes:
        start_s: Real seconds since 1970.
        duration_s: Seconds.
    """

    start_s: float
    duration_s: float


def charts(
    window: Observed, slo: SloConfig, recommended: Recording | None, ran: Recording | None
) -> list[str]:
    """Return the charts of the simulated window as HTML, one figure each.

    Args:
        window: As observed.
        slo: What is in time.
        recommended: Run of the recommended fleet; None: nothing is recommended.
        ran: Run of the fleet that ran, drawn where the observed share in time is unknown; None: it was not kept.
    """
    begins = np.arange(window.steps, dtype=np.float64) * window.step_s
    load = Curve("requests a second", BLUE, begins, window.arrivals / window.step_s, is_stepped=True)
    counts = filled(window.replicas)
    fleets = [
        Curve(
            "ran",
            BLUE,
            np.arange(len(counts), dtype=np.float64) * window.replica_step_s,
            counts,
            is_stepped=True,
        )
    ]
    shares = []
    seen = observed_shares(window, slo)
    if seen is not None:
        shares.append(Curve("served", BLUE, *seen))
    elif ran is not None:
        shares.append(Curve("as it ran, simulated", BLUE, *simulated_shares(window, slo, ran)))
    if recommended is not None:
        shares.append(Curve("recommended", VERMILION, *simulated_shares(window, slo, recommended)))
        samples = [each for each in recommended.samples if each.at_s <= window.duration_s]
        own = [sum(ready for ready, _, _ in each.replicas.values()) for each in samples]
        at_s = np.array([each.at_s for each in samples])
        fleets.append(
            Curve("recommended, ready", VERMILION, at_s, np.array(own, dtype=float), is_stepped=True)
        )
    found = [figure("Load", [load], window), figure("Replicas", fleets, window)]
    by = "hour" if bin_s(window) == 3600 else "ten minutes"
    if shares:
        found.append(figure(f"In time, % by {by}", shares, window, goal=100 * slo.attainment, is_share=True))
    return found


def bin_s(window: Observed) -> float:
    """Return the length of the bins of shares, seconds."""
    return 600.0 if window.duration_s < _FEW_S else 3600.0


def observed_shares(window: Observed, slo: SloConfig) -> tuple[Floats, Floats] | None:
    """Return the middles of the bins and what share had its first token in time, percent; None: not observed."""
    if window.ttft is None:
        return None
    size = max(1, round(bin_s(window) / window.step_s))
    firsts = range(0, window.steps, size)
    found = []
    for first in firsts:
        part = window.ttft.cut(first, first + size).cumulative()
        share = share_within(part, slo.ttft_seconds) if part and part[-1][1] > 0 else None
        found.append(math.nan if share is None else 100 * share)
    return np.array([(first + size / 2) * window.step_s for first in firsts]), np.array(found)


def simulated_shares(window: Observed, slo: SloConfig, recording: Recording) -> tuple[Floats, Floats]:
    """Return the same of a simulated run: a request without a first token is late."""
    size_s = bin_s(window)
    count = max(1, math.ceil(window.duration_s / size_s))
    requests = recording.requests
    places = np.minimum((requests.arrival_s // size_s).astype(np.int64), count - 1)
    in_time = np.nan_to_num(requests.ttft_s, nan=math.inf) <= slo.ttft_seconds
    every = np.bincount(places, minlength=count)
    good = np.bincount(places[in_time], minlength=count)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(every > 0, 100.0 * good / every, math.nan)
    return (np.arange(count, dtype=np.float64) + 0.5) * size_s, shares.astype(np.float64)


def figure(
    title: str,
    curves: Sequence[Curve],
    window: Observed | Span,
    *,
    goal: float | None = None,
    is_share: bool = False,
) -> str:
    """Return one chart as HTML, with its axes and its legend.

    Args:
        title: Title above the chart.
        curves: Lines, whose times count from the beginning.
        window: Time that is shown.
        goal: Target, drawn as a dashed line; None: there is none.
        is_share: The values are percentages.
    """
    values = np.concatenate([each.values[np.isfinite(each.values)] for each in curves])
    high = 100.0 if is_share else _round_up(float(values.max(initial=0.0)))
    low = min(95.0, math.floor(float(values.min(initial=100.0)) / 5) * 5) if is_share else 0.0
    across, down = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(at_s: float) -> float:
        return _LEFT + across * min(1.0, at_s / window.duration_s)

    def y(value: float) -> float:
        return _TOP + down * (1 - (value - low) / (high - low))

    parts = [f'<text x="2" y="13" font-weight="600">{text(title)}</text>']
    for value in (low, (low + high) / 2, high):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="currentColor" opacity=".2"/>'
        )
        parts.append(f'<text x="{_LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        when = datetime.fromtimestamp(window.start_s + part * window.duration_s, UTC)
        label = when.strftime("%a %H:%M")
        parts.append(
            f'<text x="{_LEFT + across * part:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{label}</text>'
        )
    if goal is not None and goal >= low:
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(goal):.1f}" y2="{y(goal):.1f}" stroke="{_GREEN}" stroke-dasharray="5 4"/>'
        )
    spans = "".join(
        f'<tspan dx="{12 if number else 0}" fill="{each.colour}">{text(each.name)}</tspan>'
        for number, each in enumerate(curves)
    )
    parts.append(f'<text x="{_WIDTH - _RIGHT:g}" y="13" text-anchor="end">{spans}</text>')
    for each in curves:
        for points in _runs(each):
            path = " ".join(f"{x(at_s):.1f},{y(value):.1f}" for at_s, value in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{each.colour}" stroke-width="1.8"/>')
    names = ", ".join(each.name for each in curves)
    return (
        f'<figure><svg role="img" aria-label="{text(f"{title}: {names}")}" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}"'
        ' style="width:100%;max-width:44rem;fill:currentColor;stroke:none;font-size:13px">'
        f'<g stroke-linejoin="round">{"".join(parts)}</g></svg></figure>'
    )


def _runs(curve: Curve) -> list[list[tuple[float, float]]]:
    """Return the points of a line in parts without unknown values; a stepped value holds until the next time."""
    found: list[list[tuple[float, float]]] = [[]]
    for place, (at_s, value) in enumerate(zip(curve.at_s.tolist(), curve.values.tolist(), strict=True)):
        if not math.isfinite(value):
            found.append([])
            continue
        found[-1].append((at_s, value))
        if curve.is_stepped and place + 1 < len(curve.at_s):
            found[-1].append((float(curve.at_s[place + 1]), value))
    return [each for each in found if each]


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 5, 6, 8 or 10 times a power of ten, at least 1e-3."""
    unit = 10.0 ** math.floor(math.log10(max(value, 1e-3)))
    return next(step * unit for step in (1, 2, 4, 5, 6, 8, 10) if step * unit >= value * (1 - 1e-9))
