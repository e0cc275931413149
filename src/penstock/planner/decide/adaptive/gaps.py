"""The gap between tokens as a target: what it will be on so many workers, for modes that can tell."""

from __future__ import annotations

from typing import Protocol

from penstock.planner.decide.adaptive.findings import RoleFinding, finding, grows
from penstock.planner.decide.decision import Reason, Step

AFTER = 0.95
"""Chosen: share of the ITL target that one worker fewer may reach, so that growing and shrinking do not meet."""


class GapsView(Protocol):
    """Gaps between tokens at the horizon."""

    @property
    def target_s(self) -> float:
        """Return the ITL to hold, seconds."""
        ...

    def itl_with(self, workers: int) -> float:
        """Return the ITL that the slowest request within the targeted share sees; infinite where they cannot keep up."""
        ...


def lacking(gaps: GapsView, workers: int) -> RoleFinding:
    """Return whether ``workers`` miss the target."""
    itl_s = gaps.itl_with(workers)
    inputs = {"itl_s_ahead": _finite(itl_s), "workers": workers}
    step = Step("itl", inputs, gaps.target_s, grows(itl_s > gaps.target_s))
    return finding(Reason.ITL_ABOVE_TARGET, _words(workers, itl_s, gaps.target_s), step)


def spare(gaps: GapsView, workers: int) -> RoleFinding:
    """Return whether ``workers``, one fewer than there are, would hold the target."""
    itl_s = gaps.itl_with(workers) if workers else float("inf")
    most_s = AFTER * gaps.target_s
    inputs = {"workers_after": workers, "itl_s_after": _finite(itl_s)}
    step = Step("itl_after", inputs, most_s, "shrink" if itl_s <= most_s else "hold")
    return finding(Reason.SPARE_CAPACITY, _words(workers, itl_s, gaps.target_s), step)


def _finite(itl_s: float) -> float | None:
    return itl_s if itl_s < float("inf") else None


def _words(workers: int, itl_s: float, target_s: float) -> str:
    told = f"{1000 * itl_s:.1f} ms" if itl_s < float("inf") else "without end"
    return f"ITL of {workers} workers will be {told}, to hold are {1000 * target_s:g} ms"
