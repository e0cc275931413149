"""Gives a planner the shadow fleet as its backend and the watched fleet's metrics as its source; refuses every change.

The planner runs in no-operation mode, so that it asks for no change. As an observer of its decisions, the backend lets the
shadow fleet follow them in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.api import Role
from penstock.assess.shadow.counters import Counts, Interval, Lengths, interval_of
from penstock.assess.shadow.fleet import Queue, ShadowFleet, shadow_queue
from penstock.assess.shadow.reader import WorldReader, WorldState
from penstock.core.errors import ClusterError
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import Demand, entry_role, kv_role
from penstock_planner.decide.demand.reading import Reading, assess, missing
from penstock_planner.observers import PlannerView
from penstock_planner.sources.base import Query, Readings
from penstock_planner.targets.base import TargetState


class ShadowBackend:
    """Backend, metrics source and observer of a shadow planner; the loop calls `observe`, then `read`, in each tick."""

    name = "prometheus"
    counts_demand = True

    def __init__(
        self, reader: WorldReader, fleet: ShadowFleet, *, now_s: Callable[[], float], speed: float
    ) -> None:
        """Create a backend.

        Args:
            reader: Reader of the watched fleet.
            fleet: Shadow fleet without replicas; it begins with those of the watched fleet.
            now_s: Simulated clock.
            speed: Time factor, simulated seconds per real second.
        """
        self._reader = reader
        self._fleet = fleet
        self._now_s = now_s
        self._speed = speed
        self._world: WorldState | None = None
        self._before: Mapping[Role, Counts] = {}
        self._lengths = Lengths()
        # What the watched fleet did in the newest interval between two scrapes, by role; empty before the first one.
        self._intervals: Mapping[Role, Interval] = {}
        self._queue = Queue()
        self._read_s: float | None = None

    # -- backend --------------------------------------------------------------------------------------

    async def observe(self) -> TargetState:
        """Return the shadow fleet; the watched one is in ``watched``.

        Raises:
            ObservationError, ClusterError: the watched fleet cannot be read.
        """
        self._world = world = await self._reader.read()
        now_s = self._now_s()
        if not self._fleet.ready_s:
            self._fleet = self._fleet.begun(world.replicas, now_s)
        pools = self._fleet.pools(now_s)
        watched = {role: replace(pool, gpus=pools[role].gpus) for role, pool in world.replicas.items()}
        return TargetState(
            pools=pools,
            is_adjusting=any(pool.starting for pool in pools.values()),
            endpoints=self._fleet.endpoints(now_s),
            watched=watched,
        )

    async def scale(self, role: Role, replicas: int, *, decision_id: str) -> None:
        """Refuse the change.

        Raises:
            ClusterError: always.
        """
        raise ClusterError(f"{decision_id}: a shadow planner scales nothing ({role.value} to {replicas})")

    async def switch(
        self, giver: Role, taker: Role, *, replicas: Mapping[Role, int], decision_id: str
    ) -> None:
        """Refuse the change.

        Raises:
            ClusterError: always.
        """
        raise ClusterError(
            f"{decision_id}: a shadow planner switches nothing ({giver.value} to {taker.value}, {replicas})"
        )

    # -- observer -------------------------------------------------------------------------------------

    def tick(self, view: PlannerView) -> None:
        """Do nothing."""

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Let the shadow fleet follow a decision."""
        for each in decision.roles:
            self._fleet = self._fleet.scaled(each.role, each.desired, view.at_s)

    # -- source ---------------------------------------------------------------------------------------

    async def read(self, query: Query) -> Readings:
        """Return the metrics of the watched fleet as the shadow fleet would have them.

        Arrivals and lengths are as measured. KV usage is the watched fleet's sum, spread evenly over the shadow's ready
        workers. Latencies are left out, since they are the other fleet's.
        """
        world = self._world
        assert world is not None  # noqa: S101 - the loop observes first
        self._follow(world)
        now_s = self._now_s()
        period_s = 0.0 if self._read_s is None else now_s - self._read_s
        self._read_s = now_s
        demand = self._demand(world, query, period_s) if self._intervals and period_s > 0 else None
        holder = kv_role(world.replicas)
        kv = world.counts[holder].total(self._reader.names.kv_usage)
        inside = 0.0 if holder is Role.AGGREGATED else world.counts[holder].total(self._reader.names.waiting)
        workers = query.kv_workers
        return Readings(
            {worker.name: self._fresh(min(1.0, kv / len(workers)), query) for worker in workers},
            missing("no demand yet", source=self.name)
            if demand is None
            else self._fresh(demand.waiting, query),
            demand=demand,
            worker_waiting={worker.name: self._fresh(inside / len(workers), query) for worker in workers},
        )

    def _fresh(self, value: float, query: Query) -> Reading:
        return assess(value, age_s=0.0, max_age_s=query.max_age_s, source=self.name)

    def _follow(self, world: WorldState) -> None:
        """Update the intervals and the mean lengths if every role has a newer sample than before."""
        if not self._before:
            self._before = world.counts
            return
        if any(counts.since(self._before[role]) <= 0 for role, counts in world.counts.items()):
            return
        names, entry = self._reader.names, entry_role(world.replicas)
        intervals = {
            role: interval_of(self._before[role], counts, names, self._speed)
            for role, counts in world.counts.items()
        }
        self._lengths = self._lengths.followed(
            self._before[entry], world.counts[entry], names, intervals[entry].period_s
        )
        self._intervals, self._before = intervals, world.counts

    def _demand(self, world: WorldState, query: Query, period_s: float) -> Demand | None:
        """Return the demand of ``period_s`` at the rates of the newest scrapes; None while prompt lengths are unknown."""
        entry, holder = entry_role(world.replicas), kv_role(world.replicas)
        came, served = self._intervals[entry], self._intervals[holder]
        prompt, uncached = self._lengths.prompt, self._lengths.uncached
        if prompt is None or uncached is None:
            if came.arrivals or came.waiting or came.running:
                return None
            prompt = uncached = 0.0
        scale = period_s / came.period_s
        self._queue = shadow_queue(
            self._queue,
            Queue(came.waiting, came.waiting * uncached),
            arrived=Queue(came.arrivals * scale, came.arrivals * scale * uncached),
            computed=Queue(came.first_tokens * scale, came.first_tokens * scale * uncached),
            shadow_ready=sum(each.role is entry for each in query.endpoints),
            watched_ready=world.replicas[entry].ready,
        )
        served_scale = period_s / served.period_s
        started_per_s = came.first_tokens / came.period_s
        waiting = self._queue.requests
        return Demand(
            period_s=period_s,
            arrivals=came.arrivals * scale,
            prompt_tokens=came.arrivals * scale * prompt,
            uncached_tokens=came.arrivals * scale * uncached,
            completed=served.completed * served_scale,
            output_tokens=served.output_tokens * served_scale,
            prefilled_tokens=came.first_tokens * scale * uncached,
            ttft_sum_s=came.ttft_s * scale,
            ttft_count=came.first_tokens * scale,
            itl_sum_s=served.gap_s * served_scale,
            itl_count=served.gaps * served_scale,
            waiting=waiting,
            waiting_tokens=self._queue.tokens,
            # Requests start in the order in which they came.
            oldest_wait_s=waiting / started_per_s if waiting and started_per_s else None,
            in_flight={role: each.running for role, each in self._intervals.items()},
            in_flight_tokens=came.prefilling * uncached,
            prefilling_workers=_busy(came.prefilling, came.processes),
        )


def _busy(requests: float, workers: int) -> float:
    """Return how many workers have at least one of ``requests`` that are spread over them at random."""
    return workers * -math.expm1(-requests / workers) if workers else 0.0
