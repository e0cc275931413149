"""Supply over time: when replicas that start will be ready, from how long the last ones took; and restraint.

Everything follows from the counts of successive pulls, so that changes by other hands count like the planner's own.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide.adaptive.memory import AdaptiveMemory, RoleMemory
from penstock.planner.decide.observation import PoolCounts

STARTUP_S = 30.0
"""Chosen: the start-up assumed until one has been seen: a process with its model on a local disk."""

SETTLE_S = 10.0
"""Chosen: the least time between two scale-downs, so that the first one shows in the signals."""

HOLD_S = 60.0
"""Chosen: a replica is kept idle for a start-up, and this long at least: fetched back within it, it would have cost as many
GPU-seconds and late requests as well."""

_NEW_SHARE = 0.5
"""Chosen: weight of the newest start-up; three are enough to follow a slower image pull."""


def followed(memory: RoleMemory, pool: PoolCounts, at_s: float) -> RoleMemory:
    """Return the role's memory after one pull.

    New starts are noted, finished ones timed, oldest first. A replica that is starting at the first pull has been
    so for an unknown time: its age counts from there. The workers of the first pull count as just added, because their
    caches may be empty and nothing is known of the load before it.

    Args:
        memory: Before.
        pool: Counts of the pull.
        at_s: Its time.
    """
    if memory.ready is None:
        return replace(memory, ready=pool.ready, begun_s=(at_s,) * pool.starting, grown_s=at_s)
    before = memory.ready + len(memory.begun_s)
    begun, startup_s = memory.begun_s, memory.startup_s
    finished = max(0, min(pool.ready - memory.ready, len(begun)))
    for begun_s in begun[:finished]:
        took_s = at_s - begun_s
        startup_s = took_s if startup_s is None else startup_s + _NEW_SHARE * (took_s - startup_s)
    # What was taken back are the newest starts.
    begun = begun[finished:][: pool.starting]
    begun += (at_s,) * (pool.starting - len(begun))
    after = replace(memory, ready=pool.ready, begun_s=begun, startup_s=startup_s)
    if pool.replicas > before:
        return replace(after, grown_s=at_s)
    return replace(after, shrunk_s=at_s) if pool.replicas < before else after


def hold_s(expected_s: float) -> float:
    """Return how long an idle replica is kept, from the start-up to expect."""
    return max(HOLD_S, expected_s)


def held_s(memory: RoleMemory, expected_s: float, now_s: float) -> float:
    """Return for how long the role may not shrink yet, 0 when it may.

    Args:
        memory: Of the role.
        expected_s: Start-up to expect.
        now_s: Time of the decision.
    """
    until = [now_s]
    if memory.grown_s is not None:
        until.append(memory.grown_s + max(HOLD_S, 2 * expected_s))
    if memory.shrunk_s is not None:
        until.append(memory.shrunk_s + SETTLE_S)
    return max(until) - now_s


def is_rested(memory: AdaptiveMemory, role: Role, now_s: float) -> bool:
    """Return whether the role has not scaled lately, so that a replica may be removed regardless of spare capacity."""
    return held_s(memory.of(role), startup_s(memory, role, now_s), now_s) <= 0


def startup_s(memory: AdaptiveMemory, role: Role, at_s: float) -> float:
    """Return the start-up to expect of a role: its own, else another role's; never below a start's present age."""
    own = memory.of(role)
    known = own.startup_s
    if known is None:
        others = [each.startup_s for each in memory.roles.values() if each.startup_s is not None]
        known = max(others, default=STARTUP_S)
    return max(known, *(at_s - begun_s for begun_s in own.begun_s), 0.0)


def arrivals_s(memory: RoleMemory, expected_s: float, at_s: float) -> tuple[float, ...]:
    """Return in how many seconds each replica that starts will be ready, soonest first, 0 at the earliest."""
    return tuple(max(0.0, begun_s + expected_s - at_s) for begun_s in memory.begun_s)
