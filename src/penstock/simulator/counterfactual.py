"""What other fleets would have cost and served on recorded traffic, by simulating it; called by the command line.

Fixed fleets are tried from the smallest on until one serves as well as what was served, up to a number of them. A
simulation keeps of the run its traffic, engines, router, planner, budget and start-up times. Nothing depends on how fast
the machine is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from statistics import fmean

import numpy as np

from penstock.api import GraphDeployment, Role
from penstock.core.errors import ConfigError
from penstock.report.counterfactual import Counterfactual, FleetKind, FleetOutcome, outcome, served_outcome
from penstock.report.findings import RunReport
from penstock.report.ledger_view import PlannerRun
from penstock.simulator.baselines import configured, patience_of, performance_profile
from penstock.simulator.observer import Recording
from penstock.simulator.oracle import ScheduleTarget, Utilisation, needs, shared_tokens
from penstock.simulator.oracle_search import scheduled_gpu_s, with_schedule
from penstock.simulator.scenario import MONDAY_S, PoolSpec, ProfiledModel, Scenario, graph_pools
from penstock.simulator.simulation import Simulation
from penstock.workload.results import RESULTS_FILE, LoadRun
from penstock.workload.traces import TraceRequest
from penstock_planner.decide.baselines.oracle import Sizes
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.options import join


def recorded_traffic(load: LoadRun) -> tuple[TraceRequest, ...]:
    """Return the requests of a run in the order in which they were sent, rejected and failed ones included.

    An answer has its recorded length or, if it failed, the requested one.
    """
    _check(load)
    requests = [
        TraceRequest(
            arrival_s=max(0.0, result.sent_s),
            input_tokens=result.trace_input_tokens,
            output_tokens=max(1, result.output_tokens or result.trace_output_tokens),
            block_ids=result.block_ids,
            line=result.line,
            tier=result.tier,
        )
        for result in load.results
    ]
    return tuple(sorted(requests, key=lambda request: (request.arrival_s, request.line)))


def _check(load: LoadRun) -> None:
    summary = load.summary
    if not load.results:
        raise ConfigError(f"{RESULTS_FILE} holds no request")
    if summary["is_partial"]:
        raise ConfigError("the load run was stopped early, and what was in flight then is in no log")
    concurrency = summary["settings"]["concurrency"]
    if concurrency is not None:
        raise ConfigError(
            f"the load run had at most {concurrency} requests in flight, so that its arrivals waited for its"
            " answers and another fleet would have met others; leave out --concurrency"
        )
    has_ids = any(result.block_ids is not None for result in load.results)
    if summary["trace"].get("has_block_ids") and not has_ids:
        raise ConfigError(
            f"{RESULTS_FILE} lacks block_ids, the prefixes that prompts share; run `penstock load` again, this"
            " version records them"
        )


Fleet = tuple[int, ...]
"""Replicas of each pool, in the scenario's order."""

BLOCK_SIZE = 128
"""Tokens per KV block, as `penstock simulate`: a third of the time of the live 16, and only last blocks differ."""

MOST_SPLITS = 7
"""Fixed fleets tried of one size. Chosen: all of eight GPUs."""

ASSUMED_START_UP_S = 30.0
"""Where neither ledger nor graph knows a start-up time: the default of `penstock simulate`."""

_LETTERS = {Role.PREFILL: "P", Role.DECODE: "D"}


@dataclass(frozen=True, slots=True)
class FleetSetting:
    """What every simulated fleet shares; ``base`` is the graph as the run found it, with nothing that scales."""

    base: Scenario
    planner: DecideConfig
    has_ledger: bool
    notes: tuple[str, ...]

    def fleets(self, requests: Sequence[TraceRequest]) -> dict[int, list[Fleet]]:
        """Return fleets within the budget by the GPUs that they hold, the cheapest first.

        The smallest have half of what the mean load needs without any prefix cached; of each size those whose pools
        share it most like that need come first, `MOST_SPLITS` at most.
        """
        need = needs(requests, self.base, Utilisation(1.0, 1.0))
        last_s = int(requests[-1].arrival_s) + 1
        means = [float(need[pool.role][:last_s].mean()) for pool in self.base.pools]
        budget, pools = self.base.max_gpus or 0, self.base.pools
        least = sum(mean * pool.gpus for mean, pool in zip(means, pools, strict=True)) / 2
        by_size: dict[int, list[Fleet]] = {}
        for fleet in product(*(range(1, budget // pool.gpus + 1) for pool in pools)):
            if self.gpus_of(fleet) <= budget:
                by_size.setdefault(self.gpus_of(fleet), []).append(fleet)
        least = min(least, max(by_size))
        share = means[0] / sum(means)
        return {
            gpus: sorted(by_size[gpus], key=lambda fleet: abs(fleet[0] / sum(fleet) - share))[:MOST_SPLITS]
            for gpus in sorted(by_size)
            if gpus >= least
        }

    def gpus_of(self, fleet: Fleet) -> int:
        """Return the GPUs that a fleet holds."""
        return sum(count * pool.gpus for count, pool in zip(fleet, self.base.pools, strict=True))

    def with_fleet(self, fleet: Fleet) -> Scenario:
        """Return the graph with a fleet that nothing scales."""
        pools = zip(self.base.pools, fleet, strict=True)
        return replace(self.base, pools=tuple(replace(pool, replicas=count) for pool, count in pools))

    def name_of(self, fleet: Fleet) -> str:
        """Return ``3P+1D``, or ``fleet of 3`` where each worker does both."""
        if not self.base.is_disaggregated:
            return f"fleet of {fleet[0]}"
        pools = zip(self.base.pools, fleet, strict=True)
        return "+".join(f"{count}{_LETTERS[pool.role]}" for pool, count in pools)


def setting_of(report: RunReport, graph: GraphDeployment) -> FleetSetting:
    """Return the setting of alternative fleets from a run and its graph."""
    run = report.planner
    replicas = {} if run is None else _replicas_at_zero(run)
    pools = tuple(_pool(pool, replicas) for pool in graph_pools(graph))
    config = join(given={}, graph=graph).decide_config(graph) if run is None else run.config
    budget = _budget(report, config, sum(pool.replicas * pool.gpus for pool in pools))
    start_up_s, note = _start_up(run, graph)
    slo = graph.spec.slo
    return FleetSetting(
        base=Scenario(
            pools,
            graph.spec.router,
            patience=patience_of(graph),
            cold_start_s=start_up_s,
            max_gpus=budget,
            slo=slo,
            calendar_s=_calendar_s(run),
        ),
        planner=replace(
            config,
            max_gpu_budget=budget,
            no_operation=False,
            ttft_slo_s=slo.ttft_seconds,
            itl_slo_s=slo.itl_seconds,
            performance=config.performance
            or (performance_profile(pools) if config.mode == Mode.SLA else None),
        ),
        has_ledger=run is not None,
        notes=(note, *_engine_notes(graph)),
    )


def _calendar_s(run: PlannerRun | None) -> float:
    """Return the real seconds since 1970 at which the load began; those of a simulation where no pull has them."""
    pulls = () if run is None else run.pulls
    return next((each.wall_s - each.at_s for each in pulls if each.wall_s is not None), MONDAY_S)


def _pool(pool: PoolSpec, replicas: Mapping[Role, int]) -> PoolSpec:
    assert isinstance(pool.model, ProfiledModel)  # noqa: S101 - a graph's workers have profiles
    model = replace(pool.model, block_size=BLOCK_SIZE)
    return replace(pool, replicas=max(1, replicas.get(pool.role, pool.replicas)), model=model)


def _replicas_at_zero(run: PlannerRun) -> dict[Role, int]:
    """Return the replicas that were ready or starting when the load began; empty where no pull shows them."""
    before = [pull for pull in run.pulls if pull.at_s <= 0] or list(run.pulls[:1])
    return {role: pool.ready + pool.starting for each in before[-1:] for role, pool in each.pools.items()}


def _budget(report: RunReport, config: DecideConfig, held: int) -> int:
    """Return the GPUs that fleets may hold: the budget, else the run's peak, else twice its initial number."""
    if config.max_gpu_budget is not None:
        return max(config.max_gpu_budget, held)
    return max(held, 2 * held if report.use is None else report.use.peak_gpus)


def _start_up(run: PlannerRun | None, graph: GraphDeployment) -> tuple[float, str]:
    if run is not None and run.start_ups_s:
        mean_s = fmean(run.start_ups_s)
        return mean_s, f"replicas start in {mean_s:.1f} s, the mean of {len(run.start_ups_s)} in the ledger"
    stated_s = max(each.startup_seconds for each in graph.spec.workers.values())
    if stated_s > 0:
        return stated_s, f"replicas start in {stated_s:g} s, as the graph says"
    return (
        ASSUMED_START_UP_S,
        f"replicas are assumed to start in {ASSUMED_START_UP_S:g} s; the ledger saw none start",
    )


def _engine_notes(graph: GraphDeployment) -> tuple[str, ...]:
    if graph.spec.traits.is_simulated:
        return ()
    profiles = sorted({each.profile or graph.spec.engine.profile for each in graph.spec.workers.values()})
    note = (
        f"workers ran {graph.spec.runtime}, but are simulated with latency profile {', '.join(profiles)}:"
        " compare the simulated planner with the measured row before you believe the others"
    )
    return (note,)


_DEADLINES = (2.0, 1.5, 1.0, 0.75, 0.45)
"""Chosen: the oracle's queue from twice the SLO to half of it, the cheapest schedule first."""

_KV = 0.95
"""Share of the KV cache that the oracle's schedules plan with."""

_LITTLE = 0.1
"""Chosen: a hit rate below this changes no pool by a replica, and schedules need not be made for it."""

_TRIMS = (1.5, 1.25)
"""Chosen: deadlines, as above, for which spans are cut out of the best run found; each is one more simulation."""

_EQUAL = 1.005
"""A fixed fleet that costs half a percent more counts as costing no more, as on the scoreboard."""

OnFleet = Callable[[str], None]
"""Called with the name of each fleet before its simulation."""


MOST_FLEETS = 60
"""Fixed fleets of a comparison. Chosen: a budget of 12 GPUs has up to 66, and most loads need 20 or 30."""


class _Comparison:
    """Simulates fleets on one traffic and keeps the results; the same input tries the same ones on every machine.

    Attributes:
        reference: What the fixed fleets and the oracle are held against.
        affordable_gpus: Size of the largest fixed fleets that cost no more than the reference; None: unknown, or none.
        fixed: With the GPUs that each holds, the fewest first.
        is_complete: No fixed fleet was left out because there were too many.
    """

    def __init__(
        self,
        traffic: Sequence[TraceRequest],
        reference: FleetOutcome,
        *,
        cached: float,
        most_fleets: int,
        on_fleet: OnFleet,
    ) -> None:
        self._traffic = traffic
        self._cached = cached
        self._on_fleet = on_fleet
        self._most_fleets = most_fleets
        self.reference = reference
        self.affordable_gpus: int | None = None
        self.scaled: list[FleetOutcome] = []
        self.fixed: list[tuple[int, FleetOutcome]] = []
        self.scheduled: list[FleetOutcome] = []
        self.is_complete = True
        self._sizes: list[tuple[FleetOutcome, Mapping[Role, Sizes]]] = []

    def simulate(self, setting: FleetSetting, duration_s: float, *, is_distorted: bool) -> None:
        """Simulate the planner, the HPA, fixed fleets and the oracle; ``duration_s`` is the measured run's."""
        base, planner = setting.base, setting.planner

        def planned(mode: str) -> Scenario:
            return replace(base, planner=configured(planner, mode, base.pools))

        if setting.has_ledger:
            self.scaled.append(self._run(planner.mode, FleetKind.PLANNER, planned(planner.mode)))
            if is_distorted:
                self.reference = self.scaled[-1]
        if planner.mode != Mode.HPA:
            self.scaled.append(self._run(Mode.HPA.value, FleetKind.AUTOSCALER, planned(Mode.HPA)))
        self._search_fixed(setting, duration_s)
        self._search_schedules(planned(Mode.ORACLE))

    def is_as_good(self, other: FleetOutcome) -> bool:
        """Return whether a fleet keeps as many requests in time as the reference."""
        return other.in_time >= self.reference.in_time

    def _search_fixed(self, setting: FleetSetting, duration_s: float) -> None:
        """Try fixed fleets until one is as good as the reference, and others of equal cost."""
        by_size = setting.fleets(self._traffic)
        if self.reference.gpu_hours is not None and duration_s:
            mean = self.reference.gpu_hours * 3600 / duration_s
            self.affordable_gpus = max((gpus for gpus in by_size if gpus <= mean * _EQUAL), default=None)
        is_enough = False
        for gpus, fleets in by_size.items():
            if is_enough and gpus != self.affordable_gpus:
                continue
            for fleet in fleets:
                if len(self.fixed) == self._most_fleets:
                    self.is_complete = False
                    return
                each = self._run(setting.name_of(fleet), FleetKind.FIXED, setting.with_fleet(fleet))
                self.fixed.append((gpus, each))
                is_enough |= self.is_as_good(each)

    def _search_schedules(self, oracle: Scenario) -> None:
        """Try schedules made from the load until one is as good; then cut spans out of the best run found so far.

        Schedules that hold more GPUs than that run are not tried.
        """
        known = [*self.scaled, *(each for _, each in self.fixed)]
        most = min((_hours_of(each) for each in known if self.is_as_good(each)), default=inf)
        last_s = self._traffic[-1].arrival_s
        for cached in sorted({0.0, self._cached}, reverse=True):
            for deadline in _DEADLINES:
                foreseen = with_schedule(oracle, self._traffic, ScheduleTarget(deadline, _KV, cached=cached))
                if scheduled_gpu_s(foreseen, last_s) / 3600 >= most:
                    break
                found = self._run(Mode.ORACLE.value, FleetKind.ORACLE, foreseen)
                self.scheduled.append(found)
                if self.is_as_good(found):
                    most = min(most, _hours_of(found))
                    break
        as_good = [each for each in self._sizes if self.is_as_good(each[0])]
        if not as_good:
            return
        _, sizes = min(as_good, key=lambda each: _hours_of(each[0]))
        for deadline in _TRIMS:
            target = ScheduleTarget(deadline, _KV, cached=self._cached, sizes=sizes)
            trimmed = with_schedule(oracle, self._traffic, target)
            self.scheduled.append(self._run(Mode.ORACLE.value, FleetKind.ORACLE, trimmed))

    def _run(self, name: str, kind: FleetKind, scenario: Scenario) -> FleetOutcome:
        self._on_fleet(name)
        recording = Simulation(scenario, self._traffic).run()
        ttft = recording.requests.ttft_s
        found = outcome(
            ttft[~np.isnan(ttft)],
            name=name,
            kind=kind,
            requests=len(self._traffic),
            slo_s=scenario.slo.ttft_seconds,
            gpu_hours=recording.gpu_s / 3600,
        )
        self._sizes.append((found, _sizes_of(scenario, recording)))
        return found


def _hours_of(each: FleetOutcome) -> float:
    """Return the GPU-hours of an outcome; unknown ones are never the fewest."""
    return inf if each.gpu_hours is None else each.gpu_hours


def _sizes_of(scenario: Scenario, recording: Recording) -> dict[Role, Sizes]:
    """Return the sizes that a run had asked for over time, by role."""
    sizes = {pool.role: {0.0: pool.replicas} for pool in scenario.pools}
    for change in recording.changes:
        sizes[change.role][change.at_s] = change.desired
    return {role: tuple(each.items()) for role, each in sizes.items()}


def compare(
    report: RunReport,
    graph: GraphDeployment,
    *,
    most_fleets: int = MOST_FLEETS,
    on_fleet: OnFleet | None = None,
) -> Counterfactual:
    """Simulate the traffic of a run with other fleets, and return them next to the actual run.

    Args:
        report: The run.
        graph: What served it.
        most_fleets: Maximum number of fixed fleets to simulate.
        on_fleet: Called with the name of each fleet before its simulation.

    Raises:
        ConfigError: the run's log cannot be simulated; the message says why.
    """
    traffic = recorded_traffic(report.load)
    setting = setting_of(report, graph)
    duration_s = report.load.summary["throughput"]["duration_s"]
    served = served_outcome(
        report.load.results,
        report.use,
        name="as served" if report.planner is None else report.planner.config.mode,
        slo_s=setting.base.slo.ttft_seconds,
        duration_s=duration_s,
    )
    tried = _Comparison(
        traffic,
        served,
        cached=_cached_fraction(report.load, traffic),
        most_fleets=most_fleets,
        on_fleet=on_fleet or (lambda _name: None),
    )
    notes = list(setting.notes)
    tried.simulate(setting, duration_s, is_distorted=report.load.summary["lag"]["is_distorted"])
    if not tried.is_complete:
        notes.append(
            f"the search ended after {len(tried.fixed)} fixed fleets; cheaper or better ones may exist;"
            " --counterfactual-fleets raises the limit"
        )
    if not tried.reference.is_measured:
        notes.append(
            f"the run was DISTORTED by lag, so that fixed fleets and the oracle are held against {served.name} as it"
            " was simulated, not as it was measured"
        )
    shown = (served, *tried.scaled, *_chosen_fixed(tried), *_chosen_schedule(tried))
    return Counterfactual(
        setting.base.slo.ttft_seconds,
        shown,
        fixed=tuple(each for _, each in tried.fixed),
        notes=tuple(notes),
        equal=_cheapest_equal(tried),
        is_complete=tried.is_complete,
    )


def _cached_fraction(load: LoadRun, traffic: Sequence[TraceRequest]) -> float:
    """Return the fraction that the run found in caches, 0-1, of the tokens that an earlier prompt had too.

    0 where caches had less than `_LITTLE` of all prompt tokens.
    """
    shared, tokens = sum(shared_tokens(traffic)), sum(request.input_tokens for request in traffic)
    found = sum(result.cached_tokens or 0 for result in load.results)
    return min(1.0, found / shared) if shared and found >= _LITTLE * tokens else 0.0


def _cheapest_equal(tried: _Comparison) -> FleetOutcome | None:
    """Return the fixed fleet of the fewest GPUs that is as good, of several the best."""
    as_good = [each for each in tried.fixed if tried.is_as_good(each[1])]
    return min(as_good, key=lambda each: (each[0], -each[1].in_time))[1] if as_good else None


def _chosen_fixed(tried: _Comparison) -> list[FleetOutcome]:
    """Return the cheapest fixed fleet that is as good, or else the best one, and the best that costs no more."""
    if not tried.fixed:
        return []
    _, best = max(tried.fixed, key=lambda each: (each[1].in_time, -each[0]))
    remarks = {best.name: ["the best fixed fleet tried; none served as well"]}
    cheapest = _cheapest_equal(tried)
    if cheapest is not None:
        remarks = {cheapest.name: ["the cheapest fixed fleet that serves as well"]}
    affordable = [each for gpus, each in tried.fixed if gpus == tried.affordable_gpus]
    if affordable:
        best = max(affordable, key=lambda each: each.in_time)
        remarks.setdefault(best.name, []).append("the best fixed fleet for no more GPU-hours")
    by_name = {each.name: each for _, each in tried.fixed}
    return [replace(by_name[name], remark="; ".join(remark)) for name, remark in remarks.items()]


def _chosen_schedule(tried: _Comparison) -> list[FleetOutcome]:
    """Return the oracle's cheapest schedule that is as good, or else its best.

    Whatever another fleet did, one that knows every arrival could have done too: it never costs more than any of them for
    the same share in time, the reference included.
    """
    known = [tried.reference, *tried.scaled, *(each for _, each in tried.fixed)]
    schedules = [
        *(replace(each, remark="knows every arrival") for each in tried.scheduled),
        *(
            replace(each, name="oracle", kind=FleetKind.ORACLE, remark=f"knows every arrival, {_kept(each)}")
            for each in known
            if each.gpu_hours is not None
        ),
    ]
    if not schedules:
        return []
    as_good = [each for each in schedules if tried.is_as_good(each)]
    if as_good:
        return [min(as_good, key=lambda each: (_hours_of(each), -each.in_time))]
    return [max(schedules, key=lambda each: each.in_time)]


def _kept(each: FleetOutcome) -> str:
    if each.kind is FleetKind.FIXED:
        return f"keeps {each.name}"
    return f"does what {each.name} did; no cheaper schedule was found"
