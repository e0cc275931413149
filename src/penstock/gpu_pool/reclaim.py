"""When a drain is cut because the pool takes the GPU back, and how that is said. Pure.

Operator, local supervisor and simulator ask here; each ends the worker in its own way.
"""

from __future__ import annotations

from typing import Final

CUT_SHOWN_S: Final = 180.0
"""For this long a planner's sentences repeat that a drain was cut, seconds. Chosen: as long as a bid counts."""


def drain_grace_s(own_s: float, *, reclaim_s: float | None, is_above: bool) -> float:
    """Return the longest drain of a graph's worker, seconds.

    Args:
        own_s: Its terminationGracePeriodSeconds; infinite where drains are not bounded.
        reclaim_s: The pool's reclaim.graceSeconds; None: none.
        is_above: The graph holds more than its grant.
    """
    return min(own_s, reclaim_s) if is_above and reclaim_s is not None else own_s


def cut_sentence(worker: str, reclaim_s: float) -> str:
    """Return what is said of a worker that ends before it has drained."""
    return (
        f"{worker} has drained for {reclaim_s:g} s, the pool's reclaim.graceSeconds, and ends; its streams continue elsewhere or "
        "are lost"
    )


def with_cut(note: str, sentence: str, ago_s: float) -> str:
    """Return what a pool says to a graph, with what was said of its last cut, ``ago_s`` seconds ago; empty: none was."""
    return f"{note}; {sentence}" if sentence and ago_s <= CUT_SHOWN_S else note
