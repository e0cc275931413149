"""Simulates other fleets on the recorded traffic of a load run: their cost, and the fraction of requests they serve on time.

The command line calls `compare`. Fixed fleets are tried from the smallest upwards until one serves as well as the actual run, up to
a maximum number of fleets. A simulation takes the traffic, engines, router, planner, budget and start-up times of the actual run.
The result does not depend on the speed of the machine.
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
from penstock.simulator.baselines import configured, performance_profile, timeouts_of
from penstock.simulator.observer import Recording
from penstock.simulator.oracle import ScheduleTarget, Utilisation, needs, shared_tokens
from penstock.simulator.oracle_search import scheduled_gpu_s, with_schedule
from penstock.simulator.scenario import MONDAY_S, PoolSpec, ProfiledModel, Scenario, graph_pools
from penstock.simulator.simulation import Simulation
from penstock.workload.results import RESULTS_FILE, LoadRun
from penstock.workload.traces import TraceRequest
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.policies.baselines.oracle import Sizes
from penstock_planner.options import join


def recorded_traffic(load: LoadRun) -> tuple[TraceRequest, ...]:
    """Return the requests of a load run in the order in which they were sent, rejected and failed ones included.

    The output length of a request is the recorded one or, if the request failed, the one that the trace asked for.

    Raises:
        ConfigError: the run holds no request, was stopped early, limited its concurrency, or lacks the prefix ids of its prompts.
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
"""Number of replicas of each pool, in the order of the scenario's pools."""

BLOCK_SIZE = 128
"""Tokens per KV block, as in `penstock simulate`.

It takes a third of the time that the live block size of 16 takes, and the results differ only in partial last blocks.
"""

MOST_SPLITS = 7
"""Maximum number of fixed fleets tried per total GPU count. Chosen: all splits of eight GPUs between two roles."""

ASSUMED_START_UP_S = 30.0
"""Start-up time of a replica, in seconds, if neither the planner's decision log nor the graph has one: the default of `penstock simulate`."""

_LETTERS = {Role.PREFILL: "P", Role.DECODE: "D"}


@dataclass(frozen=True, slots=True)
class FleetSetting:
    """Settings that all simulated fleets of one comparison share.

    Attributes:
        base: Scenario of the graph with its replicas at the start of the run, and without a planner.
        planner: Configuration of the run's planner, or of the graph's planner if the run has no ledger (the planner's decision log).
        has_ledger: Whether the run has a ledger.
        notes: Sentences for the reader about the assumptions made.
    """

    base: Scenario
    planner: DecideConfig
    has_ledger: bool
    notes: tuple[str, ...]

    def fleets(self, requests: Sequence[TraceRequest]) -> dict[int, list[Fleet]]:
        """Return the fixed fleets (replicas of each pool) to simulate within the GPU budget, by their total GPUs, the smallest first.

        The smallest total is half of the GPUs that the mean load needs without prefix caching. For each total, at most 7 fleets
        (`MOST_SPLITS`) are returned, ordered by how close their split between the pools is to the split of the needed GPUs.

        Args:
            requests: Requests from which the mean load is computed.
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
        """Return the total number of GPUs of ``fleet``, the number of replicas of each worker pool."""
        return sum(count * pool.gpus for count, pool in zip(fleet, self.base.pools, strict=True))

    def with_fleet(self, fleet: Fleet) -> Scenario:
        """Return the scenario in which the graph runs ``fleet`` (the number of replicas of each pool) from start to end, without a planner."""
        pools = zip(self.base.pools, fleet, strict=True)
        return replace(self.base, pools=tuple(replace(pool, replicas=count) for pool, count in pools))

    def name_of(self, fleet: Fleet) -> str:
        """Return a display name of ``fleet`` (replicas of each worker pool), such as ``3P+1D``, or ``fleet of 3`` for aggregated workers."""
        if not self.base.is_disaggregated:
            return f"fleet of {fleet[0]}"
        pools = zip(self.base.pools, fleet, strict=True)
        return "+".join(f"{count}{_LETTERS[pool.role]}" for pool, count in pools)


def setting_of(report: RunReport, graph: GraphDeployment) -> FleetSetting:
    """Return the settings with which other fleets (numbers of replicas) are simulated on the traffic of a recorded run.

    Args:
        report: The recorded run, with its planner's ledger (decision log) if there is one.
        graph: Graph that served the run.
    """
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
            patience=timeouts_of(graph),
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
    """Return the time at which the load began, in seconds since 1970; `MONDAY_S` if no metrics scrape has a wall-clock time."""
    pulls = () if run is None else run.pulls
    return next((each.wall_s - each.at_s for each in pulls if each.wall_s is not None), MONDAY_S)


def _pool(pool: PoolSpec, replicas: Mapping[Role, int]) -> PoolSpec:
    assert isinstance(pool.model, ProfiledModel)  # noqa: S101 - a graph's workers have profiles
    model = replace(pool.model, block_size=BLOCK_SIZE)
    return replace(pool, replicas=max(1, replicas.get(pool.role, pool.replicas)), model=model)


def _replicas_at_zero(run: PlannerRun) -> dict[Role, int]:
    """Return the number of ready and starting replicas at the start of the load by role; empty if the ledger has no metrics scrape."""
    before = [pull for pull in run.pulls if pull.at_s <= 0] or list(run.pulls[:1])
    return {role: pool.ready + pool.starting for each in before[-1:] for role, pool in each.pools.items()}


def _budget(report: RunReport, config: DecideConfig, held: int) -> int:
    """Return the maximum GPUs of a fleet: the planner's budget, else the run's peak, else twice the GPUs at its start."""
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
"""Chosen: queueing deadlines of the oracle's schedules, as multiples of the TTFT target, the cheapest schedule first."""

_KV = 0.95
"""Fraction of the KV cache that the oracle's schedules plan to fill."""

_MIN_HIT_RATE = 0.1
"""Chosen: below this hit rate, caching changes no pool by a full replica, so no separate schedules are made for it."""

_TRIMS = (1.5, 1.25)
"""Chosen: deadlines, as multiples of the TTFT target, with which spans are cut out of the best run; each costs one more simulation."""

_COST_TOLERANCE = 1.005
"""A fixed fleet that costs up to half a percent more counts as costing the same, as on the scoreboard."""

OnFleet = Callable[[str], None]
"""Callback that receives the name of each fleet before its simulation starts."""


MAX_FLEETS = 60
"""Maximum number of fixed fleets in a comparison. Chosen: a budget of 12 GPUs has up to 66, and most loads need 20 or 30."""


class _Comparison:
    """Simulates fleets on one traffic and collects the results. The same input tries the same fleets on every machine.

    Attributes:
        reference: Outcome with which the fixed fleets and the oracle are compared.
        affordable_gpus: Total GPUs of the largest fixed fleets that cost no more than the reference; None if unknown or if there are none.
        scaled: Outcomes of the fleets that a planner or autoscaler scaled.
        fixed: Outcomes of the fixed fleets, each with its total GPUs, the smallest first.
        scheduled: Outcomes of the oracle's schedules.
        is_complete: Whether the search did not stop at the maximum number of fixed fleets.
    """

    def __init__(
        self,
        traffic: Sequence[TraceRequest],
        reference: FleetOutcome,
        *,
        cached: float,
        max_fleets: int,
        on_fleet: OnFleet,
    ) -> None:
        self._traffic = traffic
        self._cached = cached
        self._on_fleet = on_fleet
        self._max_fleets = max_fleets
        self.reference = reference
        self.affordable_gpus: int | None = None
        self.scaled: list[FleetOutcome] = []
        self.fixed: list[tuple[int, FleetOutcome]] = []
        self.scheduled: list[FleetOutcome] = []
        self.is_complete = True
        self._sizes: list[tuple[FleetOutcome, Mapping[Role, Sizes]]] = []

    def simulate(self, setting: FleetSetting, duration_s: float, *, is_distorted: bool) -> None:
        """Simulate the planner, the HPA, fixed fleets and the oracle.

        Args:
            setting: Settings that the fleets share.
            duration_s: Duration of the measured run, in seconds.
            is_distorted: Whether the load generator lagged too much; the simulated planner then replaces the measured run as the reference.
        """
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
        """Return whether a fleet serves at least the same fraction of requests on time as the reference."""
        return other.in_time >= self.reference.in_time

    def _search_fixed(self, setting: FleetSetting, duration_s: float) -> None:
        """Simulate fixed fleets until one is as good as the reference, and those of the same cost as the reference."""
        by_size = setting.fleets(self._traffic)
        if self.reference.gpu_hours is not None and duration_s:
            mean = self.reference.gpu_hours * 3600 / duration_s
            self.affordable_gpus = max(
                (gpus for gpus in by_size if gpus <= mean * _COST_TOLERANCE), default=None
            )
        is_enough = False
        for gpus, fleets in by_size.items():
            if is_enough and gpus != self.affordable_gpus:
                continue
            for fleet in fleets:
                if len(self.fixed) == self._max_fleets:
                    self.is_complete = False
                    return
                each = self._run(setting.name_of(fleet), FleetKind.FIXED, setting.with_fleet(fleet))
                self.fixed.append((gpus, each))
                is_enough |= self.is_as_good(each)

    def _search_schedules(self, oracle: Scenario) -> None:
        """Simulate schedules made from the load until one is as good as the reference; then cut spans out of the best run found.

        Schedules that hold more GPU-hours than the cheapest run that is as good are not tried.
        """
        known = [*self.scaled, *(each for _, each in self.fixed)]
        most = min((_hours_of(each) for each in known if self.is_as_good(each)), default=inf)
        last_s = self._traffic[-1].arrival_s
        for cached in sorted({0.0, self._cached}, reverse=True):
            for deadline in _DEADLINES:
                scheduled = with_schedule(oracle, self._traffic, ScheduleTarget(deadline, _KV, cached=cached))
                if scheduled_gpu_s(scheduled, last_s) / 3600 >= most:
                    break
                found = self._run(Mode.ORACLE.value, FleetKind.ORACLE, scheduled)
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
    """Return the GPU-hours of an outcome; infinity if they are unknown, so that such an outcome is never the cheapest."""
    return inf if each.gpu_hours is None else each.gpu_hours


def _sizes_of(scenario: Scenario, recording: Recording) -> dict[Role, Sizes]:
    """Return the requested number of replicas over time of a run, by role."""
    sizes = {pool.role: {0.0: pool.replicas} for pool in scenario.pools}
    for change in recording.changes:
        sizes[change.role][change.at_s] = change.desired
    return {role: tuple(each.items()) for role, each in sizes.items()}


def compare(
    report: RunReport,
    graph: GraphDeployment,
    *,
    max_fleets: int = MAX_FLEETS,
    on_fleet: OnFleet | None = None,
) -> Counterfactual:
    """Simulate the traffic of a run with other fleets (numbers of replicas), and return their outcomes next to the actual run's.

    Args:
        report: The recorded run.
        graph: Graph that served the run.
        max_fleets: Maximum number of fixed fleets to simulate.
        on_fleet: Callback that receives the name of each fleet before its simulation; None calls nothing.

    Returns:
        The outcomes (cost, fraction of requests on time) of the actual run and of the simulated fleets, with notes about the assumptions.

    Raises:
        ConfigError: the run's log cannot be simulated; the message gives the reason.
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
        max_fleets=max_fleets,
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
    """Return the fraction, 0-1, of repeated prompt tokens that the run found in caches.

    A prompt token is repeated if an earlier prompt had the same prefix. Returns 0 if the hits were less than `_MIN_HIT_RATE` of all prompt
    tokens.
    """
    shared, tokens = sum(shared_tokens(traffic)), sum(request.input_tokens for request in traffic)
    found = sum(result.cached_tokens or 0 for result in load.results)
    return min(1.0, found / shared) if shared and found >= _MIN_HIT_RATE * tokens else 0.0


def _cheapest_equal(tried: _Comparison) -> FleetOutcome | None:
    """Return the fixed fleet with the fewest GPUs that is as good as the reference, or None; of several, the best one."""
    as_good = [each for each in tried.fixed if tried.is_as_good(each[1])]
    return min(as_good, key=lambda each: (each[0], -each[1].in_time))[1] if as_good else None


def _chosen_fixed(tried: _Comparison) -> list[FleetOutcome]:
    """Return the fixed fleets to show: the cheapest that is as good, or else the best one, and the best that costs no more."""
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
    """Return the oracle's cheapest schedule that is as good as the reference, or else its best, as a list of at most one.

    An oracle that knows every arrival could have repeated any other fleet. It therefore never costs more than any of them, the reference
    included, for the same fraction on time.
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
