"""What other fleets would have cost and served on recorded traffic, by simulating it; called by the command line.

Fixed fleets are tried from the smallest on until one serves as well as what was served. The work is bounded in
simulated fleets and in processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock_api import GraphDeployment
from penstock_planner.decide.baselines.rhythm import in_mode
from penstock_planner.decide.config import Mode
from penstock_report.counterfactual import Counterfactual, FleetKind, FleetOutcome, outcome, served_outcome
from penstock_report.findings import RunReport
from penstock_simulator.baselines import configured
from penstock_simulator.counterfactual_setting import Setting, setting_of
from penstock_simulator.oracle import Aim
from penstock_simulator.oracle_search import with_schedule
from penstock_simulator.recorded import recorded_traffic
from penstock_simulator.scenario import Scenario
from penstock_simulator.world import World
from penstock_workload.traces import TraceRequest

_AIMS = tuple(Aim(deadline, 0.95) for deadline in (1.0, 0.75, 0.45))
"""Chosen: the oracle's queue from just in time to half of it, the cheapest schedule first."""

OnFleet = Callable[[str], None]
"""Told the name of each fleet that is about to be simulated."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The most work that a comparison may be.

    Attributes:
        fleets: Simulated, >= 1.
        cpu_s: Processor seconds, > 0; a fleet is begun only if one that takes as long as the last still fits.
    """

    fleets: int = 60
    cpu_s: float = 120.0


class _SpentError(Exception):
    """The effort is used up."""


class _Bench:
    """Simulates fleets on one traffic until its effort is used up."""

    def __init__(self, traffic: Sequence[TraceRequest], effort: Effort, on_fleet: OnFleet) -> None:
        self.traffic = traffic
        self._effort = effort
        self._on_fleet = on_fleet
        self._simulated = 0
        self._begun_s = time.process_time()
        self._last_s = 0.0

    def run(self, name: str, kind: FleetKind, scenario: Scenario) -> FleetOutcome:
        """Return what a scenario does.

        Raises:
            _SpentError: nothing may be simulated any more.
        """
        begun_s = time.process_time()
        is_late = begun_s - self._begun_s + self._last_s > self._effort.cpu_s
        if self._simulated == self._effort.fleets or is_late:
            raise _SpentError
        self._on_fleet(name)
        recording = World(scenario, self.traffic).run()
        self._simulated += 1
        self._last_s = time.process_time() - begun_s
        ttft = recording.requests.ttft_s
        return outcome(
            ttft[~np.isnan(ttft)],
            name=name,
            kind=kind,
            requests=len(self.traffic),
            slo_s=scenario.slo_s,
            gpu_hours=recording.gpu_s / 3600,
        )


@dataclass(slots=True)
class _Tried:
    """What was simulated so far.

    Attributes:
        same_gpus: Size of the fixed fleets that cost about as much as what was served; None: unknown.
        scaled: By the planner and by other autoscalers.
        fixed: With the GPUs that each holds, the fewest first.
        scheduled: By the oracle.
    """

    same_gpus: int | None = None
    scaled: list[FleetOutcome] = field(default_factory=list)
    fixed: list[tuple[int, FleetOutcome]] = field(default_factory=list)
    scheduled: list[FleetOutcome] = field(default_factory=list)


def compare(
    report: RunReport,
    graph: GraphDeployment,
    *,
    effort: Effort | None = None,
    on_fleet: OnFleet | None = None,
) -> Counterfactual:
    """Simulate the traffic of a run with other fleets, and return them beside what happened.

    Args:
        report: The run, with its planner if a ledger was given.
        graph: That served it.
        effort: Bound of the work; None: the defaults.
        on_fleet: See `OnFleet`.

    Raises:
        ConfigError: the run's log cannot be simulated; the message says why.
    """
    traffic = recorded_traffic(report.load)
    setting = setting_of(report, graph)
    served = served_outcome(
        report.load.results,
        report.use,
        name="as served" if report.planner is None else report.planner.config.mode.value,
        slo_s=setting.base.slo_s,
        duration_s=report.load.summary["throughput"]["duration_s"],
    )
    effort = effort or Effort()
    bench = _Bench(traffic, effort, on_fleet or (lambda _name: None))
    tried, notes = _Tried(), list(setting.notes)
    try:
        _simulate(bench, setting, served, tried)
    except _SpentError:
        notes.append(
            f"the search was ended after {effort.fleets} fleets or {effort.cpu_s:g} s of processor time;"
            f" {len(tried.fixed)} fixed fleets were tried, and cheaper or better ones may exist"
        )
    shown = (served, *tried.scaled, *_chosen_fixed(tried, served), *_chosen_schedule(tried, served))
    return Counterfactual(setting.base.slo_s, shown, tuple(each for _, each in tried.fixed), tuple(notes))


def _simulate(bench: _Bench, setting: Setting, served: FleetOutcome, tried: _Tried) -> None:
    """Fill ``tried``, the most telling fleets first.

    Raises:
        _SpentError: the effort is used up; what was simulated is there.
    """
    base, planner = setting.base, setting.planner
    if setting.has_ledger:
        config = replace(base, planner=planner)
        tried.scaled.append(bench.run(planner.mode.value, FleetKind.PLANNER, config))
    if planner.mode is not Mode.HPA:
        config = replace(base, planner=in_mode(planner, Mode.HPA))
        tried.scaled.append(bench.run(Mode.HPA.value, FleetKind.AUTOSCALER, config))
    _search_fixed(bench, setting, served, tried)
    oracle = replace(base, planner=configured(planner, Mode.ORACLE, base.pools))
    for aim in _AIMS:
        foreseen = with_schedule(oracle, bench.traffic, aim)
        tried.scheduled.append(bench.run(Mode.ORACLE.value, FleetKind.ORACLE, foreseen))
        if tried.scheduled[-1].in_time >= served.in_time:
            return


def _search_fixed(bench: _Bench, setting: Setting, served: FleetOutcome, tried: _Tried) -> None:
    """Try fixed fleets until one is as good as what was served, and those that cost as much."""
    by_size = setting.fleets(bench.traffic)
    tried.same_gpus = setting.nearest_gpus(by_size)
    is_enough = False
    for gpus, fleets in by_size.items():
        if is_enough and gpus != tried.same_gpus:
            continue
        for fleet in fleets:
            each = bench.run(setting.name_of(fleet), FleetKind.FIXED, setting.with_fleet(fleet))
            tried.fixed.append((gpus, each))
            is_enough |= each.in_time >= served.in_time


def _chosen_fixed(tried: _Tried, served: FleetOutcome) -> list[FleetOutcome]:
    """Return the cheapest fixed fleet that is as good, or else the best one, and the best that costs as much."""
    if not tried.fixed:
        return []
    _, best = max(tried.fixed, key=lambda each: (each[1].in_time, -each[0]))
    remarks = {best.name: ["the best fixed fleet tried; none served as well"]}
    as_good = [each for each in tried.fixed if each[1].in_time >= served.in_time]
    if as_good:
        _, cheapest = min(as_good, key=lambda each: (each[0], -each[1].in_time))
        remarks = {cheapest.name: ["the cheapest fixed fleet that serves as well"]}
    as_dear = [each for gpus, each in tried.fixed if gpus == tried.same_gpus]
    if as_dear:
        best = max(as_dear, key=lambda each: each.in_time)
        remarks.setdefault(best.name, []).append("the best fixed fleet at about the same GPU-hours")
    by_name = {each.name: each for _, each in tried.fixed}
    return [replace(by_name[name], remark="; ".join(remark)) for name, remark in remarks.items()]


def _chosen_schedule(tried: _Tried, served: FleetOutcome) -> list[FleetOutcome]:
    """Return the oracle's cheapest schedule that is as good, or else its best; a fixed fleet is one as well."""
    if not tried.scheduled:
        return []
    schedules = [
        *(replace(each, remark="knows every arrival") for each in tried.scheduled),
        *(
            replace(
                each, name="oracle", kind=FleetKind.ORACLE, remark=f"knows every arrival, keeps {each.name}"
            )
            for _, each in tried.fixed
        ),
    ]
    as_good = [each for each in schedules if each.in_time >= served.in_time]
    if as_good:
        return [min(as_good, key=lambda each: (each.gpu_hours or 0.0, -each.in_time))]
    return [max(schedules, key=lambda each: each.in_time)]
