"""Draws a pool's run with matplotlib (the extra ``plots``): the GPUs that its graphs held and wanted over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.ticker import MaxNLocator

from penstock.report.drawing import BLACK, GREY, LINE_COLOURS, blank_figure, legend_above, save_all
from penstock.simulator.pool import PoolRun

_ROW_INCHES: Final = 1.5
"""Minimum height of each graph's axes in inches, so that their labels do not overlap."""


def draw_pool(result: Mapping[str, Any], run: PoolRun, path: Path) -> list[Path]:
    """Write the chart of a pool's run to ``path``, and return the written path in a list.

    Args:
        result: Result of `pool_plan.pool_result`.
        run: The simulated run, from which the GPUs over time are drawn.
        path: PNG file to write.
    """
    figure = blank_figure(f"GPUs of pool {result['pool']['name']}")
    rows = 1 + len(result["graphs"])
    figure.set_figheight(max(figure.get_figheight(), _ROW_INCHES * rows))
    held_axes, *wanted_axes = figure.subplots(rows, 1, sharex=True)
    hours = np.array([sample.at_s for sample in run.samples]) / 3600
    held = [[sample.held[row["graph"]] for sample in run.samples] for row in result["graphs"]]
    colours = [LINE_COLOURS[place % len(LINE_COLOURS)] for place in range(len(held))]
    names = [row["graph"] for row in result["graphs"]]
    held_axes.stackplot(hours, held, labels=names, colors=colours, step="post", linewidth=0)
    held_axes.axhline(result["pool"]["gpus"], color=BLACK, linestyle="--", linewidth=1.0, label="pool")
    held_axes.set_ylabel("GPUs held")
    legend_above(held_axes)
    for axes, row, values, colour in zip(wanted_axes, result["graphs"], held, colours, strict=True):
        wanted = [sample.grants[row["graph"]].wanted for sample in run.samples]
        axes.step(hours, wanted, where="post", color=GREY, linewidth=0.8, label="wanted")
        axes.step(hours, values, where="post", color=colour, linewidth=1.2, label="held")
        axes.axhline(row["guaranteed"], color=BLACK, linestyle=":", linewidth=0.8, label="guaranteed")
        axes.set_ylabel(f"{row['graph']},\nGPUs")
        axes.set_ylim(0, 1.1 * result["pool"]["gpus"])
    for axes in (held_axes, *wanted_axes):
        axes.margins(x=0.0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    legend_above(wanted_axes[0])
    wanted_axes[-1].set_xlabel("hours, virtual time")
    return save_all([(path.name, lambda: figure)], path.parent)
