"""The quick run's condition: the default beside the best fixed fleet that costs no more, workload by workload."""

from __future__ import annotations

from board import Board
from reference import EQUAL

MARGIN = 0.01
"""Chosen: a point less than the fixed fleet is as good."""
ALLOWED: dict[str, float] = {
    "aggregated-sine": 0.025,
    "flash": 0.33,
    "mooncake": 0.04,
    "recurring": 0.185,
    "sine": 0.05,
}
"""Where the default is known to serve less than a fixed fleet of its cost: by how much of the requests it may."""
SLACK = 0.02
"""Chosen: from here on an allowance that is not used any more is to be lowered."""


def gate(board: Board) -> tuple[list[str], list[str]]:
    """Return where the default serves too little, and where it does better than is asked of it; in sentences."""
    missed, better = [], []
    for case in board.cases:
        own, fixed = board.of(case, board.default), board.of(case, EQUAL)
        if own is None or fixed is None:
            continue
        gap = fixed["in_time"]["both"] - own["in_time"]["both"]
        allowed = ALLOWED.get(case.name, MARGIN)
        found = (
            f"{case.name}: {board.default} serves {100 * gap:.1f} points less in time than the fixed fleet"
            f" {'+'.join(map(str, fixed['fleet']))} of no more GPU-hours, {100 * allowed:.1f} are allowed"
        )
        if gap > allowed:
            missed.append(found)
        elif case.name in ALLOWED and gap < allowed - SLACK:
            better.append(f"{found}: lower the allowance in bench/planner/gate.py")
    return missed, better
