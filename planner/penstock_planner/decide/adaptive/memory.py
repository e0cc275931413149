"""What modes ``adaptive`` and ``sla`` remember between decisions: work, KV, floors, and each role's supply.

Supply over time is when replicas that start will be ready, from how long the last ones took. Everything
follows from the counts of successive pulls, so that changes by other hands count like the planner's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.api import Role
from penstock_planner.decide.adaptive.hindsight import Growth, Hindsight
from penstock_planner.decide.adaptive.served import Served
from penstock_planner.decide.adaptive.signals import LEVEL_TAU_S, STARTUP_S, KvLoad, Trend, Work
from penstock_planner.decide.adaptive.trial import Trial
from penstock_planner.decide.adaptive.week import Week
from penstock_planner.decide.codec import from_plain
from penstock_planner.decide.decision import Memory
from penstock_planner.decide.observation import PoolCounts

SETTLE_S = LEVEL_TAU_S
"""The least time between two scale-downs: the first one shows in the signals."""

HOLD_S = 2 * STARTUP_S
"""A replica is kept idle for a start-up, and this long at least: fetched back within it, it would have cost as many
GPU-seconds and late requests as well. It goes only if demand this long after two start-ups from now allows it."""

STARTUPS_KEPT = 2
"""Chosen: of this many newest start-ups the longest is expected: of a mean every other one takes longer. Of
four it costs 5% more GPU-hours where start-ups take 40 to 300 s, for nothing."""


def hold_s(expected_s: float) -> float:
    """Return how long an idle replica is kept, from the start-up to expect."""
    return max(HOLD_S, expected_s)


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Supply and restraint of one role.

    Attributes:
        ready: At the newest pull; None before the first.
        begun_s: When each replica that starts now was first seen, oldest first.
        startups_s: Times from asked for to ready, newest last, at most `STARTUPS_KEPT`.
        grown_s: When replicas were last added; None before that.
        shrunk_s: When replicas were last removed; None before that.
    """

    ready: int | None = None
    begun_s: tuple[float, ...] = ()
    startups_s: tuple[float, ...] = ()
    grown_s: float | None = None
    shrunk_s: float | None = None

    @property
    def startup_s(self) -> float | None:
        """Return the start-up to expect, the longest seen recently; None before the first."""
        return max(self.startups_s, default=None)

    def followed(self, pool: PoolCounts, at_s: float) -> RoleMemory:
        """Return the role's memory after one pull.

        New starts are recorded, finished ones timed, oldest first; a worker that switches roles is supply at
        once. A replica that is starting at the first pull has been so for an unknown time: its age counts
        from there. The workers of the first pull count as just added, because their caches may be empty and
        nothing is known of the load before it.
        """
        if pool.switching:
            pool = replace(pool, ready=pool.ready + pool.switching, starting=pool.begun, switching=0)
        if self.ready is None:
            return replace(self, ready=pool.ready, begun_s=(at_s,) * pool.starting, grown_s=at_s)
        before = self.ready + len(self.begun_s)
        begun = self.begun_s
        finished = max(0, min(pool.ready - self.ready, len(begun)))
        startups_s = (*self.startups_s, *(at_s - begun_s for begun_s in begun[:finished]))[-STARTUPS_KEPT:]
        # What was taken back are the newest starts.
        begun = begun[finished:][: pool.starting]
        begun += (at_s,) * (pool.starting - len(begun))
        after = replace(self, ready=pool.ready, begun_s=begun, startups_s=startups_s)
        if pool.replicas > before:
            return replace(after, grown_s=at_s)
        return replace(after, shrunk_s=at_s) if pool.replicas < before else after

    def held_s(self, expected_s: float, now_s: float) -> float:
        """Return for how long the role may not shrink yet, 0 when it may; ``expected_s`` is the start-up to expect."""
        until = [now_s]
        if self.grown_s is not None:
            until.append(self.grown_s + max(HOLD_S, 2 * expected_s))
        if self.shrunk_s is not None:
            until.append(self.shrunk_s + SETTLE_S)
        return max(until) - now_s

    def arrivals_s(self, expected_s: float, at_s: float) -> tuple[float, ...]:
        """Return in how many seconds each replica that starts will be ready, soonest first, 0 at the earliest."""
        return tuple(max(0.0, begun_s + expected_s - at_s) for begun_s in self.begun_s)


@dataclass(frozen=True, slots=True)
class AdaptiveMemory:
    """Everything.

    Attributes:
        pulled_s: Time of the newest pull that was followed; None before the first.
        work: Of the prefill (or aggregated) workers.
        kv: Of the decode (or aggregated) workers.
        roles: By role.
        hindsight: Which floor would have been best, by role.
        quiet_since_s: Since when nothing has been at the frontend; None: something was at the newest pull, it
            is not known, or the graph does not scale to zero.
        unserved_s: When a role was last seen without a ready replica; None: not so far.
        served: How right the shadow fleets' model is.
        trials: What was late for no reason that it knows, by role.
        week: Demand by time of day and day of the week.
        learnt_from: As of `DecideConfig.learns_from`; empty: unknown.
        stated_s: As of `DecideConfig.startups_s`.
        startup_timeout_s: As of `DecideConfig.startup_timeout_s`.
    """

    pulled_s: float | None = None
    work: Work = field(default_factory=Work)
    kv: KvLoad = field(default_factory=KvLoad)
    roles: Mapping[Role, RoleMemory] = field(default_factory=dict)
    hindsight: Mapping[Role, Hindsight] = field(default_factory=dict)
    quiet_since_s: float | None = None
    unserved_s: float | None = None
    served: Served = field(default_factory=Served)
    trials: Mapping[Role, Trial] = field(default_factory=dict)
    week: Week = field(default_factory=Week)
    learnt_from: str = ""
    stated_s: Mapping[Role, float] = field(default_factory=dict)
    startup_timeout_s: float = 600.0

    @classmethod
    def read(cls, memory: Memory) -> AdaptiveMemory:
        """Return a state's memory as a decision left it or a ledger gives it back; a blank one where it has none.

        Raises:
            AttributeError, TypeError, ValueError: the data is not such a memory.
        """
        known = memory.get("adaptive", {})
        if isinstance(known, cls):
            return known
        # Floors of a version with other fleets are learnt again.
        kept = {
            role: each
            for role, each in known.get("hindsight", {}).items()
            if "since_s" in each and each["fleets"].keys() == set(Growth)
        }
        return from_plain(cls, {**known, "hindsight": kept}, skips_unknown=True)

    def is_of(self, learns_from: str) -> bool:
        """Return whether it was learnt from the same model, engine, profile and time scale, as far as both are known."""
        return not self.learnt_from or not learns_from or self.learnt_from == learns_from

    @property
    def seen_s(self) -> float:
        """Return how many seconds of demand are remembered."""
        return max((each.seen_s for each in self.hindsight.values()), default=0.0)

    def of(self, role: Role) -> RoleMemory:
        """Return the role's memory, a blank one if there is none."""
        return self.roles.get(role, RoleMemory())

    def startup_s(self, role: Role, at_s: float) -> float:
        """Return the start-up to expect of a role: the one that is known, and never below a start's present age."""
        return max(self.known_startup_s(role), *(at_s - begun_s for begun_s in self.of(role).begun_s), 0.0)

    @property
    def half_timeout_s(self) -> float:
        """Return the mean of a start-up of which nothing is known but that it ends within ``startupTimeoutSeconds``.

        That is 300 s of 600, the longest that engines of 8 to 70 billion parameters take.
        """
        return self.startup_timeout_s / 2

    def change_startup_s(self, role: Role) -> float:
        """Return the start-up that a change of the floor is reckoned with.

        Until one has been seen or stated it is `half_timeout_s`.
        """
        is_known = self.stated_s or any(each.startup_s is not None for each in self.roles.values())
        return self.known_startup_s(role) if is_known else self.half_timeout_s

    def known_startup_s(self, role: Role) -> float:
        """Return the start-up seen of a role, else of another one, else the one stated.

        A start that hangs is not a reason to keep replicas longer.
        """
        known = self.of(role).startup_s
        if known is not None:
            return known
        seen = [each.startup_s for each in self.roles.values() if each.startup_s is not None]
        stated_s = self.stated_s.get(role, max(self.stated_s.values(), default=STARTUP_S))
        return max(seen, default=stated_s)

    def hold_startup_s(self, role: Role, at_s: float) -> float:
        """Return the start-up for which a role's idle replicas are held.

        Until one has been seen, starts under way bound it from below: a replica that was asked for 105 s ago and is not
        ready takes longer than that. That bound ends at `half_timeout_s`, because a start that hangs is no reason to keep
        replicas longer.
        """
        known_s = self.known_startup_s(role)
        if any(each.startup_s is not None for each in self.roles.values()):
            return known_s
        ages_s = [at_s - begun_s for each in self.roles.values() for begun_s in each.begun_s]
        return max(known_s, min(max(ages_s, default=0.0), self.half_timeout_s))

    def held_s(self, role: Role, now_s: float) -> float:
        """Return for how long a role may not shrink yet, 0 when it may."""
        return self.of(role).held_s(self.hold_startup_s(role, now_s), now_s)

    def resumed(self, by_s: float, now_s: float) -> AdaptiveMemory:
        """Return the memory after a restart, on a clock that shows ``by_s`` more; no time is after ``now_s``.

        Starts in progress count from now, because their end was not observed.
        """

        def moved(at_s: float | None) -> float | None:
            return None if at_s is None else min(at_s + by_s, now_s)

        roles = {
            role: replace(
                each,
                begun_s=(now_s,) * len(each.begun_s),
                grown_s=moved(each.grown_s),
                shrunk_s=moved(each.shrunk_s),
            )
            for role, each in self.roles.items()
        }
        return replace(
            self,
            pulled_s=moved(self.pulled_s),
            roles=roles,
            quiet_since_s=moved(self.quiet_since_s),
            unserved_s=moved(self.unserved_s),
        )

    def carried(self) -> AdaptiveMemory:
        """Return what another graph of the same model starts from: durations and speeds, not this fleet nor its traffic."""
        return AdaptiveMemory(
            work=replace(self.work, rate=Trend(), level=0.0),
            kv=replace(self.kv, load=Trend()),
            roles={role: RoleMemory(startups_s=each.startups_s) for role, each in self.roles.items()},
            hindsight={role: each.carried() for role, each in self.hindsight.items()},
            served=self.served.carried(),
        )
