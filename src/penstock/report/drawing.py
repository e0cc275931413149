"""Parts that all charts share, in the report and the simulator: colours, legends, and axes in seconds.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish; each role has the same colour in every chart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from penstock.api import Role
from penstock.report.series import Floats

BLACK: Final = "#000000"
GREY: Final = "#7F7F7F"
SKY: Final = "#56B4E9"
PURPLE: Final = "#CC79A7"
YELLOW: Final = "#E69F00"
BLUE: Final = "#0072B2"
VERMILION: Final = "#D55E00"
GREEN: Final = "#009E73"
WINE: Final = "#882255"
ROLE_COLOURS: Final = {Role.PREFILL: BLUE, Role.DECODE: VERMILION, Role.AGGREGATED: GREEN}
LINE_COLOURS: Final = (BLUE, VERMILION, GREEN, PURPLE, YELLOW, SKY, BLACK, GREY, WINE)
"""Colours of lines without an assigned colour, in this order."""
SIZE_INCHES: Final = (10.0, 5.6)
DPI: Final = 120


def blank_figure(title: str, *, colour: str = BLACK) -> Figure:
    """Return an empty figure of the standard size with a title in ``colour``."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    figure.suptitle(title, fontsize=12, color=colour)
    return figure


def save_all(pictures: Iterable[tuple[str, Callable[[], Figure]]], directory: Path) -> list[Path]:
    """Draw each picture and write it as a file; return the paths.

    Args:
        pictures: Pairs of a file name and a function that draws the picture.
        directory: Existing folder to write to.
    """
    paths = []
    for name, draw in pictures:
        paths.append(directory / name)
        draw().savefig(paths[-1], dpi=DPI, metadata={"Software": None})
    return paths


def columns(points: Sequence[tuple[float, float | None]]) -> tuple[Floats, Floats]:
    """Return the x and the y values of (x, y) points as two arrays; a None becomes NaN, at which a drawn line is interrupted."""
    found = np.array(points, dtype=np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def legend_right(axes: Axes) -> None:
    """Put a legend to the right of the axes; does nothing if nothing drawn in the axes has a label."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)


def legend_above(axes: Axes) -> None:
    """Put a legend above the axes; does nothing if nothing drawn in the axes has a label."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=5,
            fontsize=8,
            frameon=False,
            columnspacing=1.2,
            handlelength=1.6,
        )


def legend_below(figure: Figure, axes: Axes) -> None:
    """Put the legend of ``axes``, one of several axes next to each other, below all axes of the figure, where it takes no width from them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=6,
            fontsize=8,
            frameon=False,
            columnspacing=1.2,
            handlelength=1.6,
        )


def seconds_axis(axes: Axes, which: Literal["x", "y"], values: Floats) -> None:
    """Scale an axis logarithmically, with ticks in seconds that do not overlap; does nothing if a value is 0 or less.

    Args:
        axes: Axes to change.
        which: The x or the y axis.
        values: Values that the axis shows.
    """
    if not values.size or values.min() <= 0:
        return
    if which == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(_SecondsLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


class _SecondsLocator(LogLocator):
    """Chooses ticks by the range shown, since each curve on the axes can widen it."""

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        decades = np.log10(vmax / vmin) if 0 < vmin < vmax else 0.0
        self.set_params(subs=(1.0, 2.0, 5.0) if decades < 1.3 else (1.0, 3.0) if decades < 3 else (1.0,))
        return super().tick_values(vmin, vmax)
