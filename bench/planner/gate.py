"""The quick run's condition: the default alongside the best fixed fleet that costs no more, workload by workload."""

from __future__ import annotations

from board import Board, Row
from reference import EQUAL

MARGIN = 0.01
"""Chosen: a point less than the fixed fleet is as good."""
ALLOWED: dict[str, float] = {"flash": 0.345, "mooncake": 0.065}
"""Where the default is known to serve less than a fixed fleet of its cost: by how much of the requests it may."""
SLACK = 0.02
"""Chosen: from here on an allowance that is not used any more is to be lowered."""


def gate(board: Board) -> tuple[list[str], list[str]]:
    """Return where the default serves too little, and where it does better than is asked of it; in sentences."""
    missed, better = [], []
    for name, (_, fixed, gap) in _gaps(board).items():
        allowed = ALLOWED.get(name, MARGIN)
        found = (
            f"{name}: {board.default} serves {100 * gap:.1f} points less in time than the fixed fleet"
            f" {'+'.join(map(str, fixed['fleet']))} of no more GPU-hours, {100 * allowed:.1f} are allowed"
        )
        if gap > allowed:
            missed.append(found)
        elif name in ALLOWED and gap < allowed - SLACK:
            better.append(f"{found}: lower the allowance in bench/planner/gate.py")
    return missed, better


def table(board: Board, before: Board | None) -> list[str]:
    """Return the default alongside the fixed fleet of its cost, in Markdown, with an earlier run's figures where given."""
    earlier = {} if before is None else _gaps(before)
    lines = [
        "| case | before | points behind | now | fixed fleet of no more GPU-hours | points behind | allowed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (own, fixed, gap) in _gaps(board).items():
        was = [_figures(earlier[name][0]), f"{100 * earlier[name][2]:.1f}"] if name in earlier else ["-", "-"]
        cells = [name, *was, _figures(own), f"{'+'.join(map(str, fixed['fleet']))}: {_figures(fixed)}"]
        lines.append(f"| {' | '.join(cells)} | {100 * gap:.1f} | {100 * ALLOWED.get(name, MARGIN):.1f} |")
    return lines


def _gaps(board: Board) -> dict[str, tuple[Row, Row, float]]:
    """Return the default, the fixed fleet and the share by which it serves more, by case."""
    gaps = {}
    for case in board.cases:
        own, fixed = board.of(case, board.default), board.of(case, EQUAL)
        if own is not None and fixed is not None:
            share, other = ((row["later"] or row)["in_time"]["both"] for row in (own, fixed))
            gaps[case.name] = own, fixed, other - share
    return gaps


def _figures(row: Row) -> str:
    shown = row["later"] or row
    return f"{100 * shown['in_time']['both']:.1f}% for {shown['gpu_hours']:.2f}"
