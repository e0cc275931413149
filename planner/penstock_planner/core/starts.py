"""The replicas that are starting, and the times at which they were requested. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.api import Role
from penstock_planner.core.changes import ReplicaChange

Starts = Mapping[Role, tuple[float, ...]]
"""By role, the simulated seconds at which each starting replica was requested, oldest first."""


def added(starts: Starts, role: Role, count: int, asked_s: float) -> Starts:
    """Return the starts after ``count`` more replicas of a role were requested at ``asked_s``.

    If ``count`` is negative, the newest ``-count`` starts of the role are removed.
    """
    begun = starts.get(role, ())
    return {**starts, role: begun[:count] if count < 0 else begun + (asked_s,) * count}


def without_oldest(starts: Starts, role: Role, count: int = 1) -> Starts:
    """Return the starts without the ``count`` oldest ones of a role, because these replicas became ready or failed."""
    return {**starts, role: starts.get(role, ())[count:]}


def finished(starts: Starts, role: Role, starting: int) -> tuple[float, ...]:
    """Return the times (simulated seconds) at which those replicas of a role were requested that have become ready.

    These are the oldest starts, all but ``starting`` of them.

    Args:
        starts: Starts known so far.
        role: Role to look up.
        starting: Number of replicas that are still starting.
    """
    begun = starts.get(role, ())
    return begun[: max(0, len(begun) - starting)]


def starts_after(starts: Starts, change: ReplicaChange) -> Starts:
    """Return the starts after the backend accepted a change.

    A roll-back changes nothing, because its replica has already been removed from ``starts``. Neither does a role
    switch, because its workers need no start.

    Args:
        starts: Starts before the change.
        change: Change that the backend accepted.
    """
    count = change.desired - change.current
    return (
        starts
        if change.is_roll_back or change.is_switch
        else added(starts, change.role, count, change.decided_s)
    )
