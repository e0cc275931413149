"""The replicas that are starting, and the times at which they were requested. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.api import Role
from penstock_planner.core.changes import ReplicaChange

Starts = Mapping[Role, tuple[float, ...]]
"""By role, the simulated seconds at which each starting replica was requested, oldest first."""


def added(starts: Starts, role: Role, count: int, asked_s: float) -> Starts:
    """Return the request times of replicas that are not ready yet, after ``count`` more replicas of a role were requested.

    If ``count`` is negative, the newest ``-count`` times of the role are removed.

    Args:
        starts: Request times so far, by role, oldest first, in simulated seconds.
        role: Role whose replicas were requested.
        count: Number of replicas.
        asked_s: Time of the request, in simulated seconds.
    """
    begun = starts.get(role, ())
    return {**starts, role: begun[:count] if count < 0 else begun + (asked_s,) * count}


def without_oldest(starts: Starts, role: Role, count: int = 1) -> Starts:
    """Return the request times of replicas that are not ready yet, without a role's ``count`` oldest ones.

    Used if these replicas became ready or failed.

    Args:
        starts: Request times so far, by role, oldest first, in simulated seconds.
        role: Role of the replicas.
        count: Number of times to remove; all are removed if there are not as many.
    """
    return {**starts, role: starts.get(role, ())[count:]}


def finished(starts: Starts, role: Role, starting: int) -> tuple[float, ...]:
    """Return the times (simulated seconds) at which those replicas of a role were requested that have become ready.

    These are the oldest request times: all request times of the role except the newest ``starting`` ones.

    Args:
        starts: Request times of replicas that were not ready at the last check, by role, oldest first.
        role: Role to look up.
        starting: Number of replicas that are still starting.
    """
    begun = starts.get(role, ())
    return begun[: max(0, len(begun) - starting)]


def starts_after(starts: Starts, change: ReplicaChange) -> Starts:
    """Return the request times of replicas that are not ready yet, after the backend accepted a replica change.

    A roll-back changes nothing, because its replica has already been removed from ``starts``. Neither does a role
    switch, because its workers need no start.

    Args:
        starts: Request times before the change, by role, oldest first, in simulated seconds.
        change: Change that the backend (Kubernetes or local processes) accepted.
    """
    count = change.desired - change.current
    return (
        starts
        if change.is_roll_back or change.is_switch
        else added(starts, change.role, count, change.decided_s)
    )
