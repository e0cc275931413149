"""Draws fleets by what they cost and what they keep in time; called by `charts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from penstock.report.counterfactual import Counterfactual, FleetKind, FleetOutcome
from penstock.report.drawing import BLACK, BLUE, GREEN, GREY, PURPLE, VERMILION, legend_beside

_LOOKS: Final = {
    FleetKind.PLANNER: ("o", BLUE),
    FleetKind.FIXED: ("s", VERMILION),
    FleetKind.AUTOSCALER: ("^", PURPLE),
    FleetKind.ORACLE: ("D", GREEN),
}

_CLOSE: Final = 0.025
"""Chosen: names of points nearer than this, as a share of the cost and in attainment, would hide each other."""


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
