"""The scoreboard's pictures: attainment against cost, regret over time, and what one load looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from board import REFERENCES, Board, Row
from cells import BIN_S, LATER_BIN, Cell, record
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reference import HINDSIGHT
from workloads import Case

from penstock.report.drawing import DPI, GREY, LINE_COLOURS, blank_figure, legend_above, legend_right
from penstock.simulator.observer import Floats, Recording

SHOWN_CASE = "sine"
"""The case that is drawn over time."""
LATE_COSTS = 3.0
"""What a late request costs: this many times the GPU-hours that the fixed fleet spends on one. The goal weighs a point of
requests against 3% of the GPU-hours."""


def draw(board: Board, folder: Path) -> list[str]:
    """Write the pictures and return their names."""
    drawn = {"cost.png": cost(board), "attainment.png": attainment(board)}
    if (figure := regret(board)) is not None:
        drawn["regret.png"] = figure
    case = next((case for case in board.cases if case.name == SHOWN_CASE), None)
    if case is not None:
        runs = {policy: record(Cell(case, policy, 0)) for policy in board.policies if policy != "static"}
        drawn["over_time.png"] = over_time(case, runs)
    for name, figure in drawn.items():
        figure.savefig(folder / name, dpi=DPI, metadata={"Software": None})
    return list(drawn)


def cost(board: Board) -> Figure:
    """Draw every case's attainment against its GPU-hours as a multiple of the oracle's."""
    figure = blank_figure("In time against GPU-hours: a small point per case, a large one for their mean")
    axes = figure.subplots()
    for policy, look in _looks(board.policies).items():
        cases = [
            case for case in board.cases if case.kind == "load" and board.regret(case, policy) is not None
        ]
        points = [(board.regret(case, policy), _share(board, case, policy)) for case in cases]
        if points:
            xs, ys = np.array(points, dtype=np.float64).T
            axes.scatter(xs, ys, s=12, color=look, alpha=0.45, linewidths=0)
            axes.scatter(xs.mean(), ys.mean(), s=90, color=look, label=policy, edgecolors="white")
    axes.axvline(1.0, color=GREY, linestyle=":")
    axes.axhline(0.99, color=GREY, linestyle=":")
    axes.set_xlabel("GPU-hours / the oracle's")
    axes.set_ylabel("share of the requests in time")
    axes.set_xlim(0, max(2.0, axes.get_xlim()[1]))
    axes.set_ylim(0, 1.03)
    axes.grid(alpha=0.25)
    legend_right(axes)
    return figure


def attainment(board: Board) -> Figure:
    """Draw attainment as a table of colours, a row per case."""
    figure = blank_figure("Share of the requests in time")
    figure.set_size_inches(9, 1.5 + 0.27 * len(board.cases))
    axes = figure.subplots()
    columns = [
        *board.policies,
        *(name for name in REFERENCES if any(board.of(case, name) for case in board.cases)),
    ]
    values = np.array([[_share(board, case, policy) for policy in columns] for case in board.cases])
    axes.imshow(values, aspect="auto", cmap="RdYlGn", vmin=0.4, vmax=1.0)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(board.cases)), [case.name for case in board.cases], fontsize=7)
    return figure


def regret(board: Board) -> Figure | None:
    """Draw what the default has cost beyond the best fixed fleet in hindsight, a line per case of hours; None without any.

    The unit is all that the fixed fleet costs in GPU-hours; a line that ends flat has stopped to lose.
    """
    cases = [
        (case, own, best)
        for case in board.cases
        if (own := board.of(case, board.default)) and own["later"] and (best := board.of(case, HINDSIGHT))
    ]
    if not cases:
        return None
    figure = blank_figure(f"Regret of {board.default}: what it cost beyond the best fixed fleet in hindsight")
    axes = figure.subplots()
    for place, (case, own, best) in enumerate(cases):
        spent = [_spent(row, best) for row in (own, best)]
        number = min(map(len, spent))
        hours = np.arange(1, number + 1) * BIN_S / 3600
        colour = LINE_COLOURS[place % len(LINE_COLOURS)]
        style = "-" if place < len(LINE_COLOURS) else "--"
        axes.plot(hours, spent[0][:number] - spent[1][:number], style, color=colour, label=case.name)
    axes.axhline(0.0, color=GREY, linestyle=":")
    axes.axvline(LATER_BIN * BIN_S / 3600, color=GREY, linestyle=":")
    axes.set_xlabel("hours")
    axes.set_ylabel(f"(GPU-hours + {LATE_COSTS:g} x late requests' share) / the fixed fleet's GPU-hours")
    axes.grid(alpha=0.25)
    legend_right(axes)
    return figure


def _spent(row: Row, best: Row) -> Floats:
    """Return a run's cumulative cost by bin, in units of the fixed fleet's GPU-hours."""
    bins = {name: np.array(values) for name, values in row["bins"].items()}
    late = (bins["requests"] - bins["in_time"]) / bins["requests"].sum()
    return np.asarray(np.cumsum(bins["gpu_hours"] / best["gpu_hours"] + LATE_COSTS * late))


def over_time(case: Case, runs: Mapping[str, Recording]) -> Figure:
    """Draw GPUs and attainment of one case over time, a line per policy."""
    figure = blank_figure(f"{case.name}: {case.about}, {case.cold_start_s:g} s to start")
    gpus, shares = figure.subplots(2, 1, sharex=True)
    for (policy, recording), colour in zip(runs.items(), _looks(list(runs)).values(), strict=True):
        times = [sample.at_s for sample in recording.samples]
        gpus.step(
            times, [sample.gpus for sample in recording.samples], where="post", color=colour, label=policy
        )
        _draw_shares(shares, recording, case.slo_s, colour)
    gpus.set_ylabel("GPUs held")
    shares.set_ylabel("TTFT in time, by minute of arrival")
    shares.set_xlabel("time (virtual s)")
    shares.set_ylim(0, 1.03)
    for axes in (gpus, shares):
        axes.grid(alpha=0.25)
    legend_above(gpus)
    return figure


def _draw_shares(axes: Axes, recording: Recording, slo_s: float, colour: str) -> None:
    arrivals, ttft = recording.requests.arrival_s, recording.requests.ttft_s
    minutes = np.floor_divide(arrivals, 60).astype(np.int64)
    with np.errstate(invalid="ignore"):
        good = np.bincount(minutes, weights=(ttft < slo_s).astype(np.float64))
    total = np.bincount(minutes)
    known = total > 0
    axes.plot((np.flatnonzero(known) + 0.5) * 60, good[known] / total[known], color=colour, linewidth=1.2)


def _share(board: Board, case: Case, policy: str) -> float:
    row = board.of(case, policy)
    return float("nan") if row is None else float(row["in_time"]["both"])


def _looks(policies: Sequence[str]) -> dict[str, str]:
    return {name: LINE_COLOURS[place % len(LINE_COLOURS)] for place, name in enumerate(policies)}
