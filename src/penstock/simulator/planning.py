"""Runs the planner's core in virtual time: its observations, its scaling requests, and faults of either.

A planner with a ledger (decision log) keeps all its state over a restart, and rolls failed scale-ups back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.api import Role
from penstock.simulator.fleet import State
from penstock.simulator.kernel import Order
from penstock.simulator.scenario import Fault, PlannerTimeouts
from penstock.simulator.state import SimulationState
from penstock_planner.core.effects import (
    Append,
    AppendPull,
    BeginLedger,
    Checkpoint,
    Effect,
    Notify,
    ObserveAt,
    ReadMetrics,
    RecordDecision,
    Scale,
    Switch,
)
from penstock_planner.core.planner import Answer, PlannerCore
from penstock_planner.core.planner_settings import PlannerSettings
from penstock_planner.decide.bounds.pool import bid_sizes
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, summarise
from penstock_planner.decide.demand.reading import Reading, assess
from penstock_planner.decide.state import Learned, for_other_graph, resumed
from penstock_planner.ledger import Ledger
from penstock_planner.recorder import Recorder
from penstock_planner.served_shares import ServedShares, shares_of
from penstock_planner.targets.base import TargetState

_SOURCE = "simulator"
_TIMELINE = "simulated"

ScalePool = Callable[[Scale | Switch], str | None]
"""Callback that applies a change of replicas or a switch of roles. It returns the reason if the change is refused, else None."""

_ABOUT: Mapping[str, str | float | None] = {
    "namespace": "simulated",
    "environment": "simulated",
    "served_model_name": "simulated",
    "speed": 1.0,
    "graph_file": None,
}
"""Facts about a simulated planner in the header of its ledger (decision log), by the keys that a live planner uses."""

DEADLINE_S = 600.0
"""Simulated seconds that a replica may take to become ready before its scale-up is rolled back: the default of ``--adjustment-deadline``."""


@dataclass(frozen=True, slots=True)
class SimulatedObservation:
    """What the planner observes at one tick (a metrics scrape, possibly with a decision). Times are simulated seconds.

    Attributes:
        pools: Replica counts by role.
        is_adjusting: Whether a requested replica is not ready yet, or a replica is draining or switching, so that the planner may have to
            wait before it scales again. A dead replica that restarts is not an adjustment.
        kv: KV cache usage, 0-1, of each ready decode (or aggregated) worker, by name; None for a worker whose metrics are not available.
        waiting: Number of requests that wait for prefill; NaN if unknown, None in aggregated simulations.
        age_s: Age in seconds of the gauges (KV cache usage and waiting requests).
        demand: Counts of the requests at the routers since the last observation; None if unknown.
        worker_waiting: Number of requests that wait inside each ready decode (or aggregated) worker, by name; a number, or the entire
            mapping, is None if it is unknown.
        never_ready: Reason for which a replica will not become ready, for each role with such a replica.
        max_age_s: Age in seconds above which the gauges count as stale.
    """

    pools: Mapping[Role, PoolCounts]
    is_adjusting: bool
    kv: Mapping[str, float | None]
    waiting: float | None
    age_s: float
    demand: Demand | None = None
    worker_waiting: Mapping[str, float | None] | None = None
    never_ready: Mapping[Role, str] = field(default_factory=dict)
    max_age_s: float = PlannerTimeouts().max_age_s

    def pull(self, now_s: float) -> Pull:
        """Return the observation in the form in which a planner on a cluster gets its scraped metrics; ``now_s`` is the simulated time."""

        def reading(value: float | None, upper: float | None = None) -> Reading:
            return assess(value, age_s=self.age_s, max_age_s=self.max_age_s, source=_SOURCE, upper=upper)

        inside = self.worker_waiting
        return summarise(
            now_s,
            self.pools,
            kv={name: reading(value, 1.0) for name, value in self.kv.items()},
            queue=None if self.waiting is None else reading(self.waiting),
            demand=self.demand,
            worker_waiting=None
            if inside is None
            else {name: reading(count) for name, count in inside.items()},
        )


OnDecision = Callable[[Decision], None]
"""Callback that receives every decision of the planner, those without a change included."""


class VirtualPlanner:
    """Runs one planner in virtual time. Decisions are passed to a callback, not stored. Times are simulated seconds.

    Attributes:
        next_s: Time of the planner's next tick (metrics scrape).
    """

    def __init__(
        self,
        config: DecideConfig,
        on_decision: OnDecision,
        *,
        deadline_s: float = DEADLINE_S,
        memory: Learned | None = None,
        calendar_s: float = 0.0,
        recorder: Recorder | None = None,
    ) -> None:
        """Create a planner that starts at time 0.

        Args:
            config: Configuration of the planner.
            on_decision: Callback that receives every decision.
            deadline_s: Seconds that a replica may take to become ready before its scale-up is rolled back.
            memory: Learned state of an earlier planner to start with; None starts without any.
            calendar_s: Wall-clock time at time 0, seconds since 1970.
            recorder: Writes the ledger (decision log) that a live planner would write; None writes nothing.
        """
        self._calendar_s = calendar_s
        self._recorder = recorder
        self._settings = PlannerSettings(config, deadline_s, _TIMELINE, memory=memory or {})
        self._on_decision = on_decision
        self._start(0.0, first_sequence=0)

    def learnt(self, now_s: float) -> Learned:
        """Return what the planner has learned until the simulated time ``now_s``, by name, as a state from which another planner can start."""
        kinds = self._settings.config.policy.states
        return for_other_graph(resumed(self._core.decided, kinds, -now_s, 0.0).learned, kinds)

    def tick(self, now_s: float, seen: SimulatedObservation, scale: ScalePool) -> None:
        """Run one tick of the planner: process the observation and, if a decision is due, decide and scale.

        Args:
            now_s: Current simulated time; must be `next_s`.
            seen: The planner's observation at ``now_s``.
            scale: Callback that applies a change of replicas or a switch of roles; it returns why the change is refused, else None.
        """
        config = self._settings.config
        answer: Answer = TargetState(
            seen.pools,
            seen.is_adjusting,
            never_ready=seen.never_ready,
            grant=config.grant,
            grant_note=config.grant_note,
        )
        while True:
            match self._follow(self._core.answer(answer, now_s)):
                case ReadMetrics():
                    answer = self._pull(seen, now_s)
                case RecordDecision() as asked:
                    answer = self._recorder is None or self._recorder.record(asked)
                case Scale() | Switch() as asked:
                    answer = scale(asked)
                case _:
                    return

    def _pull(self, seen: SimulatedObservation, now_s: float) -> Pull:
        wall_s = self._calendar_s + now_s if self._settings.config.reads_calendar else None
        return replace(seen.pull(now_s), wall_s=wall_s)

    def restart(self, now_s: float) -> None:
        """Restart the planner's process at the simulated time ``now_s``.

        A planner that writes a ledger (decision log) continues from it; one without a ledger loses its learned state.
        """
        if not self._settings.config.policy.has_ledger:
            self._start(now_s, first_sequence=self._core.decided.sequence)

    def skip_tick(self, now_s: float) -> None:
        """Skip one tick (metrics scrape) of the planner at the simulated time ``now_s``, because the planner's process is down.

        A planner without a ledger (decision log) loses its learned state, since the process that comes back has nothing to read it
        from.
        """
        self.restart(now_s)
        self._follow(self._core.answer(None, now_s))

    def set_budget(self, gpus: int) -> None:
        """Set the planner's GPU budget from now on: the maximum number of GPUs that the replicas it requests may hold."""
        config = replace(self._settings.config, max_gpu_budget=gpus)
        self._core.settings = self._settings = replace(self._settings, config=config)

    def set_grant(self, gpus: int, note: str) -> None:
        """Set the number of GPUs that a GPU pool shared by several graphs grants to the planner's graph from now on.

        Args:
            gpus: Maximum number of GPUs that the graph may hold.
            note: Sentence for the planner's explanations that names the graphs holding GPUs which this graph lacks.
        """
        config = replace(self._settings.config, grant=gpus, grant_note=note)
        self._core.settings = self._settings = replace(self._settings, config=config)

    def _start(self, now_s: float, *, first_sequence: int) -> None:
        self._core = PlannerCore(replace(self._settings, first_sequence=first_sequence), now_s)
        self._follow(self._core.start(now_s))

    def _follow(self, effects: tuple[Effect, ...]) -> Effect:
        for effect in effects:
            match effect:
                case Notify(decision):
                    self._on_decision(decision)
                case Append() | AppendPull() | BeginLedger() | Checkpoint() if self._recorder is not None:
                    self._recorder.write(effect)
                case _:
                    pass
        if isinstance(effects[-1], ObserveAt):
            self.next_s = effects[-1].at_s
        return effects[-1]


UNPLACED_AFTER_S = 15.0
"""Simulated seconds after which a replica without a node counts as failed; the Kubernetes backend's ``--unschedulable-after``."""

UNPLACED = "unschedulable: no node has the GPUs"


@dataclass(slots=True)
class DecisionSummary:
    """The data of a run's decisions that the evaluation needs. Complete decisions of a simulated week would take a gigabyte.

    Attributes:
        count: Number of decisions, those without a change included.
        changed: Decisions that change a role's replicas.
        shares: Time of each decision that has both an observed and a predicted fraction of requests on time, with these two fractions.
        bid: Newest request of the planner for GPUs of a pool that several graphs share: the GPU count of every wanted replica, the most
            urgent first; empty before the first request.
    """

    count: int = 0
    changed: list[Decision] = field(default_factory=list)
    shares: list[tuple[float, ServedShares]] = field(default_factory=list)
    bid: tuple[int, ...] = ()

    def add(self, decision: Decision) -> None:
        """Store the parts of a planner decision from which a run is evaluated (changes, fractions on time, wanted GPUs), and discard the rest."""
        self.count += 1
        if not decision.is_hold:
            self.changed.append(decision)
        if (shares := shares_of(decision)) is not None:
            self.shares.append((decision.at_s, shares))
        self.bid = bid_sizes(decision) or self.bid


class Control:
    """Runs the planner of a simulation: calls it at its ticks, applies its decisions, and causes the faults that affect it.

    Attributes:
        planner: The planner, which runs in simulated time.
        taken: What is kept of the planner's decisions for the evaluation of the run.
        listeners: Callbacks that receive every decision, after it was added to ``taken``.
    """

    def __init__(
        self,
        state: SimulationState,
        config: DecideConfig,
        scale: Callable[[Role, int], None],
        switch: Callable[[Role, Role, int], None],
        *,
        ledger: Ledger | None = None,
    ) -> None:
        """Create the planner.

        Args:
            state: State of the simulation.
            config: Configuration of the planner.
            scale: Callback that sets the number of replicas of a role.
            switch: Callback that moves a number of workers from the first role to the second.
            ledger: Ledger (decision log) to write as a live planner does; None writes none.
        """
        self._state = state
        self._scale_pool = scale
        self._switch = switch
        self._scenario = state.scenario
        deadline_s = self._scenario.patience.deadline_s
        if deadline_s is None:
            deadline_s = max(DEADLINE_S, 2 * self._scenario.cold_start_s)
        self.taken = DecisionSummary()
        self.listeners: list[OnDecision] = []
        self.planner = VirtualPlanner(
            config,
            self._take,
            deadline_s=deadline_s,
            memory=self._scenario.memory,
            calendar_s=self._scenario.calendar_s,
            recorder=None if ledger is None else Recorder(ledger, _ABOUT, wall_s=self._wall_s),
        )
        self._known: SimulatedObservation | None = None

    def start(self) -> None:
        """Schedule the planner's first tick, its restarts, and the changes of its GPU budget that the scenario names."""
        kernel, faults = self._state.kernel, self._scenario.faults
        kernel.at(self.planner.next_s, Order.PLANNER, self._tick)
        for at_s in faults.restarts:
            kernel.at(at_s, Order.FLEET, self.planner.restart, at_s)
        for change in faults.budget:
            kernel.at(change.at_s, Order.FLEET, self.planner.set_budget, change.gpus)

    def _wall_s(self) -> float:
        """Return the time of the scenario's calendar, seconds since 1970."""
        return self._scenario.calendar_s + self._state.kernel.now_s

    def _tick(self) -> None:
        now_s, kernel, planner = self._state.kernel.now_s, self._state.kernel, self.planner
        if self._scenario.faults.is_on(Fault.PLANNER_DOWN, now_s):
            planner.skip_tick(now_s)
        else:
            planner.tick(now_s, self._observation(now_s), self._scale)
        kernel.at(planner.next_s, Order.PLANNER, self._tick)

    def _take(self, decision: Decision) -> None:
        self.taken.add(decision)
        for listen in self.listeners:
            listen(decision)

    def _scale(self, asked: Scale | Switch) -> None:
        if isinstance(asked, Switch):
            count = asked.taker.desired - asked.taker.current
            self._switch(asked.giver.role, asked.taker.role, count)
        else:
            self._scale_pool(asked.change.role, asked.change.desired)

    # -- observations ---------------------------------------------------------------------------------

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
            is_adjusting=any(
                fleet.of(role, State.STARTING, State.DRAINING, State.SWITCHING) for role in roles
            ),
            kv={each.name: each.server.kv_usage_fraction(now_s) for each in holders},
            waiting=float(state.waiting) if scenario.is_disaggregated else None,
            age_s=scenario.routers.propagation_delay_s,
            demand=state.frontend.collect(now_s, in_flight, state.turned_away()),
            worker_waiting={each.name: float(each.server.waiting) for each in holders},
            never_ready=self._never_ready(roles, now_s),
            max_age_s=scenario.patience.max_age_s,
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
    """Return the observation with every gauge replaced by ``value``, and without demand, since its counters are wrong, too."""
    queue = float("nan") if value is None else value
    return replace(
        seen,
        kv=dict.fromkeys(seen.kv, value),
        waiting=queue if seen.waiting is not None else None,
        worker_waiting=dict.fromkeys(seen.worker_waiting or {}, value),
        demand=None,
    )
