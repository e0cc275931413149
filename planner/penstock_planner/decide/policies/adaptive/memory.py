"""Learned state of modes ``adaptive`` and ``sla``: prefill work, KV usage, floors, and each role's ready and starting replicas over time.

A floor is the minimum number of replicas that the planner keeps, see `shadow_fleets`. When each starting replica will be
ready is estimated from the duration of earlier start-ups. It is derived only from the replica counts of successive
pulls (metrics scrapes), so changes by other clients count like the planner's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from penstock.api import Role
from penstock_planner.decide.codec import from_plain
from penstock_planner.decide.demand.load import LEVEL_TAU_S, KvLoad, Work
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.demand.trend import STARTUP_S, Trend
from penstock_planner.decide.demand.week import Week
from penstock_planner.decide.objective.model_comparison import ModelComparison
from penstock_planner.decide.objective.shadow_fleets import Growth, Hindsight
from penstock_planner.decide.objective.trial import Trial
from penstock_planner.decide.state import PolicyState

SETTLE_S = LEVEL_TAU_S
"""Minimum simulated seconds between two scale-downs (6 s), so that the effect of the first one is visible in the load
averages."""

HOLD_S = 2 * STARTUP_S
"""Minimum simulated seconds for which an idle replica is kept: one minute, or one start-up time if that is longer.

A replica that is needed again within this time would have cost as many GPU-seconds to start again, and late requests
as well. It is removed only if the demand forecast for this long after two start-up times allows it."""

STARTUPS_KEPT = 2
"""Chosen: number of newest start-ups of which the longest is expected for the next one.

With their mean, every other start-up would take longer than expected. With four instead of two, GPU-hours
rise by 5% if start-ups take 40 to 300 s, without benefit."""


def hold_s(expected_s: float) -> float:
    """Return the simulated seconds for which an idle replica is kept: the start-up time, but at least one minute (`HOLD_S`).

    Args:
        expected_s: Expected start-up time of a replica, in simulated seconds.
    """
    return max(HOLD_S, expected_s)


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Learned state of one role: its replicas, their start-up times, and its last changes. Times are simulated seconds.

    Attributes:
        ready: Number of ready replicas at the newest pull (metrics scrape); None before the first pull.
        start_times_s: Time at which each replica that is now starting was first observed, oldest first.
        startups_s: Durations of the newest start-ups from request to ready, newest last; at most two (`STARTUPS_KEPT`).
        grown_s: Time at which replicas were last added; None if never. The first pull counts as adding replicas.
        shrunk_s: Time at which replicas were last removed; None if never.
    """

    ready: int | None = None
    start_times_s: tuple[float, ...] = ()
    startups_s: tuple[float, ...] = ()
    grown_s: float | None = None
    shrunk_s: float | None = None

    @property
    def startup_s(self) -> float | None:
        """Return the expected start-up time of a replica in simulated seconds: the longer of the last two.

        Returns None before the first start-up was observed.
        """
        return max(self.startups_s, default=None)

    def followed(self, pool: PoolCounts, at_s: float) -> RoleMemory:
        """Return the role's state after one pull (metrics scrape).

        New starts are recorded. Of the starts that were completed, the durations are recorded, with the oldest starts
        counted as completed first. A worker that changes from the other role to this role without a restart counts as
        ready. A replica that is already starting at the first pull has been starting for an unknown time, so its age
        counts from that pull. The workers of the first pull count as just added, because their caches can be empty and
        the load before the pull is unknown.

        Args:
            pool: Replica counts of the role at the pull.
            at_s: Time of the pull, in simulated seconds.
        """
        if pool.switching:
            pool = replace(pool, ready=pool.ready + pool.switching, starting=pool.loading, switching=0)
        if self.ready is None:
            return replace(self, ready=pool.ready, start_times_s=(at_s,) * pool.starting, grown_s=at_s)
        before = self.ready + len(self.start_times_s)
        begun = self.start_times_s
        finished = max(0, min(pool.ready - self.ready, len(begun)))
        startups_s = (*self.startups_s, *(at_s - begun_s for begun_s in begun[:finished]))[-STARTUPS_KEPT:]
        # Starts that were cancelled are the newest ones.
        begun = begun[finished:][: pool.starting]
        begun += (at_s,) * (pool.starting - len(begun))
        after = replace(self, ready=pool.ready, start_times_s=begun, startups_s=startups_s)
        if pool.replicas > before:
            return replace(after, grown_s=at_s)
        return replace(after, shrunk_s=at_s) if pool.replicas < before else after

    def hold_down_s(self, expected_s: float, now_s: float) -> float:
        """Return the simulated seconds for which the role must not shrink yet after its last change; 0 if it can shrink now.

        It must not shrink for two start-up times (at least a minute) after replicas were added, nor for 6 s after some
        were removed.

        Args:
            expected_s: Expected start-up time of a replica, in simulated seconds.
            now_s: Present time, in simulated seconds.
        """
        until = [now_s]
        if self.grown_s is not None:
            until.append(self.grown_s + max(HOLD_S, 2 * expected_s))
        if self.shrunk_s is not None:
            until.append(self.shrunk_s + SETTLE_S)
        return max(until) - now_s

    def arrivals_s(self, expected_s: float, at_s: float) -> tuple[float, ...]:
        """Return the simulated seconds from ``at_s`` until each starting replica is expected to be ready, soonest first.

        The value of a replica that should be ready already is 0.

        Args:
            expected_s: Expected start-up time of a replica, in simulated seconds.
            at_s: Present time, in simulated seconds.
        """
        return tuple(max(0.0, begun_s + expected_s - at_s) for begun_s in self.start_times_s)


@dataclass(frozen=True, slots=True)
class AdaptiveMemory(PolicyState):
    """Learned state of modes adaptive and sla for all roles. Times are simulated seconds.

    Attributes:
        pulled_s: Time of the newest pull (metrics scrape) that is included; None before the first one.
        work: Prefill work: arrival rate, prompt lengths, and the throughput of the prefill (or aggregated) workers.
        kv: KV usage of the decode (or aggregated) workers, and the KV usage that one prompt token causes.
        roles: Number of ready replicas, start-up times and times of the last changes, by role.
        hindsight: Costs of the possible floors (minimum numbers of replicas), by role.
        quiet_since_s: Time since which neither the frontend nor a worker has had a request. None if there was a request
            at the newest pull, if that is unknown, or if the graph does not scale to zero.
        unserved_s: Newest time at which some role had no ready replica; None if there was none.
        served: Comparison of the late requests that the planner's latency model predicts with the requests that really
            were late (over the TTFT target).
        trials: By role, the number of late requests beyond the number that the latency model predicts, and the trial of
            one more replica, which shows whether that replica reduces the number.
        week: Demand by quarter of an hour of the week.
        learnt_from: Text that identifies the model, engine, profile and time scale from which the state was learned, so
            that it is not used for others; empty if unknown.
        stated_s: Start-up times in seconds that the manifest states, by role; used until a start-up was observed.
        startup_timeout_s: Longest start-up of a replica to wait for, in seconds (``startupTimeoutSeconds``).
    """

    KEY: ClassVar[str] = "adaptive"

    pulled_s: float | None = None
    work: Work = field(default_factory=Work)
    kv: KvLoad = field(default_factory=KvLoad)
    roles: Mapping[Role, RoleMemory] = field(default_factory=dict)
    hindsight: Mapping[Role, Hindsight] = field(default_factory=dict)
    quiet_since_s: float | None = None
    unserved_s: float | None = None
    served: ModelComparison = field(default_factory=ModelComparison)
    trials: Mapping[Role, Trial] = field(default_factory=dict)
    week: Week = field(default_factory=Week)
    learnt_from: str = ""
    stated_s: Mapping[Role, float] = field(default_factory=dict)
    startup_timeout_s: float = 600.0

    @classmethod
    def from_stored(cls, plain: Any) -> AdaptiveMemory:
        """Return the state that a ledger (the planner's decision log) has stored as plain data, a mapping of values by field name.

        Floors that another version learned with other kinds of fleets are dropped and learned again.

        Raises:
            AttributeError, TypeError, ValueError: The data does not have this form.
        """
        kept = {
            role: each
            for role, each in plain.get("hindsight", {}).items()
            if "since_s" in each and each["fleets"].keys() == set(Growth)
        }
        return from_plain(cls, {**plain, "hindsight": kept}, skips_unknown=True)

    def is_of(self, learning_identity: str) -> bool:
        """Return whether the state was learned by a planner with the same identity.

        Also True if either identity is empty (unknown).

        Args:
            learning_identity: Identity that names the present model, engine, profile and time scale.
        """
        return not self.learnt_from or not learning_identity or self.learnt_from == learning_identity

    @property
    def seen_s(self) -> float:
        """Return the simulated seconds of demand from which the floors (minimum numbers of replicas) were learned.

        It is the largest value of all roles; 0 if nothing has been learned yet.
        """
        return max((each.seen_s for each in self.hindsight.values()), default=0.0)

    def of(self, role: Role) -> RoleMemory:
        """Return what was observed of one role: ready replicas, start-up times, and when replicas were last added or removed.

        Returns a `RoleMemory` with default values (nothing observed yet) if the role has no entry.
        """
        return self.roles.get(role, RoleMemory())

    def startup_s(self, role: Role, at_s: float) -> float:
        """Return the expected start-up time of a role's replicas in simulated seconds.

        It is at least the age of each replica that is still starting.

        Args:
            role: Role to look up.
            at_s: Present time, in simulated seconds.
        """
        return max(
            self.known_startup_s(role), *(at_s - begun_s for begun_s in self.of(role).start_times_s), 0.0
        )

    @property
    def half_timeout_s(self) -> float:
        """Return the start-up time, in simulated seconds, to assume if only its upper limit is known: half of the limit.

        The limit is ``startupTimeoutSeconds``. With its default of 600 s the result is 300 s, the longest that engines
        of 8 to 70 billion parameters take.
        """
        return self.startup_timeout_s / 2

    def change_startup_s(self, role: Role) -> float:
        """Return the start-up time, in simulated seconds, from which the cost of a change of a role's floor is calculated.

        A floor is the minimum number of replicas that the planner keeps. Until a start-up has been observed or is
        stated in the manifest, the result is half of the limit ``startupTimeoutSeconds``.
        """
        is_known = self.stated_s or any(each.startup_s is not None for each in self.roles.values())
        return self.known_startup_s(role) if is_known else self.half_timeout_s

    def known_startup_s(self, role: Role) -> float:
        """Return the best known start-up time of a role, in simulated seconds.

        It is the first of these that is known: the observed one of the role, the observed one of another role, the one
        that the manifest states. If none is known, it is 30 s (`STARTUP_S`). Starts in progress do not count, because a
        start that hangs is not a reason to keep replicas longer.
        """
        known = self.of(role).startup_s
        if known is not None:
            return known
        seen = [each.startup_s for each in self.roles.values() if each.startup_s is not None]
        stated_s = self.stated_s.get(role, max(self.stated_s.values(), default=STARTUP_S))
        return max(seen, default=stated_s)

    def hold_startup_s(self, role: Role, at_s: float) -> float:
        """Return the start-up time, in simulated seconds, that determines for how long a role's idle replicas are kept.

        Until a start-up has been observed, the starts in progress are a lower bound: a replica that was requested 105 s
        ago and is not ready takes longer than 105 s. This bound is at most half of the limit ``startupTimeoutSeconds``,
        because a start that hangs is not a reason to keep replicas longer.

        Args:
            role: Role to look up.
            at_s: Present time, in simulated seconds.
        """
        known_s = self.known_startup_s(role)
        if any(each.startup_s is not None for each in self.roles.values()):
            return known_s
        ages_s = [at_s - begun_s for each in self.roles.values() for begun_s in each.start_times_s]
        return max(known_s, min(max(ages_s, default=0.0), self.half_timeout_s))

    def hold_down_s(self, role: Role, now_s: float) -> float:
        """Return the simulated seconds for which a role must not shrink yet after its last change; 0 if it can shrink now.

        It must not shrink for two start-up times (at least a minute) after replicas were added, nor for 6 s after some
        were removed.

        Args:
            role: Role to look up.
            now_s: Present time, in simulated seconds.
        """
        return self.of(role).hold_down_s(self.hold_startup_s(role, now_s), now_s)

    def resumed(self, by_s: float, now_s: float) -> AdaptiveMemory:
        """Return the learned state after a restart of the planner, with all times in it converted to the current clock.

        Replicas that were starting count as requested now, because the end of their start was not observed.

        Args:
            by_s: Seconds to add to each time, which is measured on the clock of the previous run; can be negative.
            now_s: Present time, in simulated seconds; no converted time is later.
        """

        def moved(at_s: float | None) -> float | None:
            return None if at_s is None else min(at_s + by_s, now_s)

        roles = {
            role: replace(
                each,
                start_times_s=(now_s,) * len(each.start_times_s),
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

    def for_other_graph(self) -> AdaptiveMemory:
        """Return the state with which another graph of the same model can start.

        It keeps start-up times, throughput, prompt lengths, what each floor (minimum number of replicas) would have
        cost, and the fraction of the measured throughput that a simulated worker is assumed to do. It drops the traffic
        and the replicas of this graph.
        """
        return AdaptiveMemory(
            work=replace(self.work, rate=Trend(), level=0.0),
            kv=replace(self.kv, load=Trend()),
            roles={role: RoleMemory(startups_s=each.startups_s) for role, each in self.roles.items()},
            hindsight={role: each.for_other_graph() for role, each in self.hindsight.items()},
            served=self.served.for_other_graph(),
        )
