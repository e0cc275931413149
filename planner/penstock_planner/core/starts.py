"""Which replicas start, and since when. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.api import Role
from penstock_planner.core.changes import ReplicaChange

Starts = Mapping[Role, tuple[float, ...]]
"""By role: simulated seconds at which each starting replica was requested, oldest first."""


def added(starts: Starts, role: Role, count: int, asked_s: float) -> Starts:
    """Return the starts after ``count`` more replicas were requested; below 0: the newest are taken back."""
    begun = starts.get(role, ())
    return {**starts, role: begun[:count] if count < 0 else begun + (asked_s,) * count}


def without_oldest(starts: Starts, role: Role, count: int = 1) -> Starts:
    """Return the starts after the ``count`` oldest of a role became ready or failed."""
    return {**starts, role: starts.get(role, ())[count:]}


def finished(starts: Starts, role: Role, starting: int) -> tuple[float, ...]:
    """Return when the replicas of a role were requested that are ready now: the oldest beyond ``starting``."""
    begun = starts.get(role, ())
    return begun[: max(0, len(begun) - starting)]


def starts_after(starts: Starts, change: ReplicaChange) -> Starts:
    """Return the replicas that start after the backend took a change.

    A roll-back goes below the number that was asked for: what it takes back is out of ``starts`` already. A worker that
    switches does not start.
    """
    count = change.desired - change.current
    return (
        starts
        if change.is_roll_back or change.is_switch
        else added(starts, change.role, count, change.decided_s)
    )
