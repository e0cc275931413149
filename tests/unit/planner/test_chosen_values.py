"""How many values of mode adaptive were chosen by what they do to figures: a policy that can be predicted has few."""

from __future__ import annotations

import ast
from pathlib import Path

from penstock_planner.decide import adaptive, by_demand

MOST = 32
"""So many were left when they were last counted; the goal is 20 (bench/planner/TRIED.md). It is lowered with them, never raised."""


def _chosen(source: str) -> list[str]:
    """Return the constants of a module that a docstring beginning with "Chosen" follows, those directly above it included."""
    found: list[str] = []
    above: list[str] = []
    last = 0
    for node in ast.parse(source).body:
        above = above if node.lineno == last + 1 else []
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.Assign | ast.AnnAssign):
            above.append(ast.unparse(node))
            continue
        words = (
            node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
        )
        found += above if str(words).startswith("Chosen") else []
        above = []
    return found


def test_no_more_values_are_chosen_than_were_counted():
    """Each needs figures of the scoreboard that show what it buys; bounds, which change no decision of a usual fleet, do not count."""
    files = [*sorted(Path(adaptive.__file__).parent.glob("*.py")), Path(by_demand.__file__)]
    found = [name for file in files for name in _chosen(file.read_text(encoding="utf-8"))]
    assert found, "nothing says that it was chosen"
    assert len(found) <= MOST, found


def test_values_are_counted_where_their_words_say_so():
    """Two above one docstring are two; what is measured, derived or stands apart is none."""
    source = 'E = 0\n\nA = 1\nB: float = 2\n"""Chosen: as said."""\n\nC = 3\n"""Measured."""\nD = 4\n'
    assert _chosen(source) == ["A = 1", "B: float = 2"]
