"""The planner's place in a run: what it sees, what it asks for, and what goes wrong with either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.api import Role
from penstock.planner.core.records import Change
from penstock.planner.decide.config import DecideConfig
from penstock.simulator.faults import Fault
from penstock.simulator.fleet import State
from penstock.simulator.kernel import Order
from penstock.simulator.planning import DEADLINE_S, SimulatedObservation, VirtualPlanner
from penstock.simulator.state import SimulationState

UNPLACED_AFTER_S = 15.0
"""The Kubernetes backend's ``--unschedulable-after``: from then on a pod without a node has failed."""

UNPLACED = "unschedulable: no node has the GPUs"


class Control:
    """Runs one planner in a run.

    Attributes:
        planner: With every decision it took.
    """

    def __init__(
        self, state: SimulationState, config: DecideConfig, scale: Callable[[Role, int], None]
    ) -> None:
        self._state = state
        self._scale_pool = scale
        self._scenario = state.scenario
        # Twice the cold start where that is longer than the default, as a user would set it.
        deadline_s = max(DEADLINE_S, 2 * self._scenario.cold_start_s)
        self.planner = VirtualPlanner(config, deadline_s=deadline_s)
        self._known: SimulatedObservation | None = None

    def start(self) -> None:
        """Schedule the first pull and the restarts."""
        kernel, faults = self._state.kernel, self._scenario.faults
        kernel.at(self.planner.next_s, Order.PLANNER, self._tick)
        for at_s in faults.restarts:
            kernel.at(at_s, Order.FLEET, self.planner.restart, at_s)
        for change in faults.budget:
            kernel.at(change.at_s, Order.FLEET, self.planner.set_budget, change.gpus)

    def _tick(self) -> None:
        now_s, kernel, planner = self._state.kernel.now_s, self._state.kernel, self.planner
        if self._scenario.faults.is_on(Fault.PLANNER_DOWN, now_s):
            planner.miss(now_s)
        else:
            planner.tick(now_s, self._observation(now_s), self._scale)
        kernel.at(planner.next_s, Order.PLANNER, self._tick)

    def _scale(self, change: Change) -> None:
        self._scale_pool(change.role, change.desired)

    # -- what a pull sees -----------------------------------------------------------------------------

    def _observation(self, now_s: float) -> SimulatedObservation:
        true = self._true_observation(now_s)
        faults, known = self._scenario.faults, self._known
        stale_since_s = faults.since_s(Fault.METRICS_STALE, now_s)
        if stale_since_s is not None and known is not None:
            kept = {name: known.kv.get(name) for name in true.kv}
            age_s = now_s - stale_since_s
            return replace(
                true, kv=kept, waiting=known.waiting, demand=None, worker_waiting=None, age_s=age_s
            )
        for kind, value in _VALUES.items():
            if faults.is_on(kind, now_s):
                return _with_every_value(true, value)
        if faults.is_on(Fault.ROUTER_DOWN, now_s):
            has_queue = self._scenario.is_disaggregated
            return replace(true, waiting=float("nan") if has_queue else None, demand=None)
        self._known = true
        return true

    def _true_observation(self, now_s: float) -> SimulatedObservation:
        state, scenario, fleet = self._state, self._scenario, self._state.fleet
        roles = [pool.role for pool in scenario.pools]
        holders = fleet.of(Role.DECODE if scenario.is_disaggregated else Role.AGGREGATED, State.READY)
        in_flight = {role: float(sum(len(each.jobs) for each in fleet.of(role, *State))) for role in roles}
        return SimulatedObservation(
            pools={role: fleet.counts(role) for role in roles},
            is_adjusting=any(fleet.of(role, State.STARTING, State.DRAINING) for role in roles),
            kv={each.name: each.server.kv_usage_fraction(now_s) for each in holders},
            waiting=float(state.waiting) if scenario.is_disaggregated else None,
            age_s=scenario.routers.propagation_delay_s,
            demand=state.frontend.take(now_s, in_flight, state.turned_away()),
            worker_waiting={each.name: float(each.server.waiting) for each in holders},
            never_ready=self._never_ready(roles, now_s),
        )

    def _never_ready(self, roles: list[Role], now_s: float) -> dict[Role, str]:
        fleet = self._state.fleet
        return {
            role: UNPLACED
            for role in roles
            if any(
                not worker.is_placed and now_s - worker.joined_s >= UNPLACED_AFTER_S
                for worker in fleet.of(role, State.STARTING)
            )
        }


_VALUES = {
    Fault.METRICS_MISSING: None,
    Fault.METRICS_NAN: float("nan"),
    Fault.METRICS_ZERO: 0.0,
}


def _with_every_value(seen: SimulatedObservation, value: float | None) -> SimulatedObservation:
    """Return the observation with every gauge replaced; counters that went wrong give no demand."""
    queue = float("nan") if value is None else value
    return replace(
        seen,
        kv=dict.fromkeys(seen.kv, value),
        waiting=queue if seen.waiting is not None else None,
        worker_waiting=dict.fromkeys(seen.worker_waiting or {}, value),
        demand=None,
    )
