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

HOLD_DOWN_S = 60.0
"""Chosen: the least time between growing and shrinking; at least two start-ups besides, because a replica that is
wanted back costs a start-up of lateness."""

FLAP_S = 240.0
"""Chosen: growing back within this time after shrinking is a regret. Decode on steady arrivals was wanted back after
two to three minutes; a swing of ten minutes is no regret."""

SETTLE_S = 15.0
"""Chosen: the least time between two scale-downs, so that the first one shows in the signals; half a start-up at
least."""

CALM_S = 10.0
"""Chosen: for how long every decision must find a replica to spare before one goes, so that chance shrinks nothing. With
it day took 11 changes in place of 15; 15 s cost 1% more GPU-hours, 30 s 2%."""

_NEW_SHARE = 0.5
"""Chosen: weight of the newest start-up; three are enough to follow a slower image pull."""


def followed(memory: RoleMemory, pool: PoolCounts, at_s: float, *, hold_down_most_s: float) -> RoleMemory:
    """Return the role's memory after one pull.

    New starts are noted, finished ones timed, oldest first. A replica that is starting at the first pull has been
    so for an unknown time: its age counts from there. The workers of the first pull count as just added, because their
    caches may be empty and nothing is known of the load before it.

    Args:
        memory: Before.
        pool: Counts of the pull.
        at_s: Its time.
        hold_down_most_s: Longest hold-down that regrets lead to.
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
        return _grown(after, at_s, hold_down_most_s)
    return _shrunk(after, at_s) if pool.replicas < before else after


def _grown(memory: RoleMemory, at_s: float, hold_down_most_s: float) -> RoleMemory:
    """Note a scale-up; one soon after a scale-down is a regret and doubles the hold-down."""
    hold_down_s = memory.hold_down_s
    is_back = memory.shrunk_s is not None and (memory.grown_s is None or memory.grown_s < memory.shrunk_s)
    if is_back and memory.shrunk_s is not None and at_s - memory.shrunk_s <= FLAP_S:
        hold_down_s = min(hold_down_most_s, 2 * max(hold_down_s, _least_hold_down_s(memory.startup_s)))
    return replace(memory, grown_s=at_s, hold_down_s=hold_down_s)


def _shrunk(memory: RoleMemory, at_s: float) -> RoleMemory:
    """Note a scale-down; one that comes twice the hold-down after the last change halves it."""
    last_s = max((s for s in (memory.grown_s, memory.shrunk_s) if s is not None), default=at_s)
    is_calm = at_s - last_s > 2 * memory.hold_down_s
    return replace(
        memory, shrunk_s=at_s, hold_down_s=memory.hold_down_s / 2 if is_calm else memory.hold_down_s
    )


def _least_hold_down_s(startup_s: float | None) -> float:
    return max(HOLD_DOWN_S, 2 * (STARTUP_S if startup_s is None else startup_s))


def spared(memory: RoleMemory, at_s: float, *, is_spare: bool) -> RoleMemory:
    """Return the role's memory after a decision that found one replica to spare, or did not."""
    if not is_spare:
        return replace(memory, spare_s=None)
    return memory if memory.spare_s is not None else replace(memory, spare_s=at_s)


def held_s(memory: RoleMemory, expected_s: float, now_s: float) -> float:
    """Return for how long the role may not shrink yet, 0 when it may.

    Args:
        memory: Of the role.
        expected_s: Start-up to expect.
        now_s: Time of the decision.
    """
    until = [now_s if memory.spare_s is None else memory.spare_s + CALM_S]
    if memory.grown_s is not None:
        until.append(memory.grown_s + max(memory.hold_down_s, _least_hold_down_s(expected_s)))
    if memory.shrunk_s is not None:
        until.append(memory.shrunk_s + max(SETTLE_S, expected_s / 2))
    return max(until) - now_s


def is_rested(memory: AdaptiveMemory, role: Role, now_s: float) -> bool:
    """Tell whether the role neither grew nor shrank lately, so that a replica may go whatever there is to spare."""
    own = replace(memory.of(role), spare_s=None)
    return held_s(own, startup_s(memory, role, now_s), now_s) <= 0


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
