"""Replicas asked for and not ready yet: since when, and how long each took. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.api import Role

Starts = Mapping[Role, tuple[float, ...]]
"""By role: simulated seconds at which each replica that starts was asked for, oldest first."""


@dataclass(frozen=True, slots=True)
class ReadyReplica:
    """One replica that became ready.

    Attributes:
        role: prefill, decode or aggregated.
        asked_s: Time of the decision for it.
        ready_s: When it was first seen ready.
    """

    role: Role
    asked_s: float
    ready_s: float

    @property
    def took_s(self) -> float:
        """Return the simulated seconds from asked for to ready."""
        return self.ready_s - self.asked_s


def added(starts: Starts, role: Role, count: int, asked_s: float) -> Starts:
    """Return the starts after ``count`` more replicas were asked for; below 0: the newest are taken back."""
    begun = starts.get(role, ())
    return {**starts, role: begun[:count] if count < 0 else begun + (asked_s,) * count}


def without_oldest(starts: Starts, role: Role, count: int = 1) -> Starts:
    """Return the starts after the ``count`` oldest of a role became ready or failed."""
    return {**starts, role: starts.get(role, ())[count:]}


def finished(starts: Starts, role: Role, starting: int, now_s: float) -> tuple[ReadyReplica, ...]:
    """Return the replicas of a role that have become ready: the oldest, as many as start no longer.

    Args:
        starts: As followed so far; replicas that failed are taken out before.
        role: Whose.
        starting: Its replicas that are not ready now.
        now_s: Simulated seconds.
    """
    begun = starts.get(role, ())
    return tuple(ReadyReplica(role, asked_s, now_s) for asked_s in begun[: max(0, len(begun) - starting)])
