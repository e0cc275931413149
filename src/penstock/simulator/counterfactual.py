"""What other fleets would have cost and served on recorded traffic, by simulating it; called by the command line.

Fixed fleets are tried from the smallest on until one serves as well as what was served. The work is bounded in
simulated fleets and in processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.api import GraphDeployment
from penstock.planner.decide.config import Mode
from penstock.report.counterfactual import Counterfactual, FleetKind, FleetOutcome, outcome, served_outcome
from penstock.report.findings import RunReport
from penstock.simulator.baselines import configured
from penstock.simulator.counterfactual_setting import Setting, recorded_traffic, setting_of
from penstock.simulator.oracle import ScheduleTarget
from penstock.simulator.oracle_search import with_schedule
from penstock.simulator.scenario import Scenario
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest

_AIMS = tuple(ScheduleTarget(deadline, 0.95) for deadline in (2.0, 1.5, 1.0, 0.75, 0.45))
"""Chosen: the oracle's queue from twice the SLO to half of it, the cheapest schedule first."""

OnFleet = Callable[[str], None]
"""Told the name of each fleet that is about to be simulated."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The most work that a comparison may be.

    Attributes:
        fleets: Simulated, >= 1.
        cpu_s: Processor seconds, > 0; a fleet is begun only if one that takes as long as the last still fits, and
            given up where it does not fit after all.
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

    def require(self) -> None:
        """Check that one more fleet fits."""
        is_late = time.process_time() - self._begun_s + self._last_s > self._effort.cpu_s
        if self._simulated == self._effort.fleets or is_late:
            raise _SpentError

    def run(self, name: str, kind: FleetKind, scenario: Scenario) -> FleetOutcome:
        """Return what a scenario does."""
        self.require()
        begun_s = time.process_time()
        self._on_fleet(name)
        recording = Simulation(scenario, self.traffic).run(self._watch)
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

    def _watch(self, _ended: int) -> None:
        """Give a fleet up that takes longer than everything may."""
        if time.process_time() - self._begun_s > self._effort.cpu_s:
            raise _SpentError


@dataclass(slots=True)
class _Tried:
    """What was simulated so far.

    Attributes:
        reference: What the fixed fleets and the oracle are held against.
        duration_s: Of the measured run.
        same_gpus: Size of the fixed fleets that cost about as much as the reference; None: unknown.
        scaled: By the planner and by other autoscalers.
        fixed: With the GPUs that each holds, the fewest first.
        scheduled: By the oracle.
    """

    reference: FleetOutcome
    duration_s: float
    same_gpus: int | None = None
    scaled: list[FleetOutcome] = field(default_factory=list)
    fixed: list[tuple[int, FleetOutcome]] = field(default_factory=list)
    scheduled: list[FleetOutcome] = field(default_factory=list)

    def is_as_good(self, other: FleetOutcome) -> bool:
        """Tell whether a fleet keeps as many requests in time as the reference."""
        return other.in_time >= self.reference.in_time

    def nearest_gpus(self, sizes: Iterable[int]) -> int | None:
        """Return the size that costs about as much as the reference, the smaller of two as near; None: unknown."""
        if self.reference.gpu_hours is None or not self.duration_s:
            return None
        mean = self.reference.gpu_hours * 3600 / self.duration_s
        return min(sizes, key=lambda gpus: (abs(gpus - mean), gpus), default=None)


def compare(
    report: RunReport,
    graph: GraphDeployment,
    *,
    effort: Effort | None = None,
    on_fleet: OnFleet | None = None,
) -> Counterfactual:
    """Simulate the traffic of a run with other fleets, and return them beside what happened.

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
        slo_s=setting.base.slo_s,
        duration_s=duration_s,
    )
    effort = effort or Effort()
    bench = _Bench(traffic, effort, on_fleet or (lambda _name: None))
    tried, notes = _Tried(served, duration_s), list(setting.notes)
    try:
        _simulate(bench, setting, tried, is_distorted=report.load.summary["lag"]["is_distorted"])
    except _SpentError:
        notes.append(
            f"the search was ended after {effort.fleets} fleets or {effort.cpu_s:g} s of processor time;"
            f" {len(tried.fixed)} fixed fleets were tried, and cheaper or better ones may exist"
        )
    if not tried.reference.is_measured:
        notes.append(
            f"the run was DISTORTED by lag, so that fixed fleets and the oracle are held against {served.name} as it"
            " was simulated, not as it was measured"
        )
    shown = (served, *tried.scaled, *_chosen_fixed(tried), *_chosen_schedule(tried))
    return Counterfactual(setting.base.slo_s, shown, tuple(each for _, each in tried.fixed), tuple(notes))


def _simulate(bench: _Bench, setting: Setting, tried: _Tried, *, is_distorted: bool) -> None:
    """Fill ``tried``, the most telling fleets first."""
    base, planner = setting.base, setting.planner

    def planned(mode: str) -> Scenario:
        return replace(base, planner=configured(planner, mode, base.pools))

    if setting.has_ledger:
        tried.scaled.append(bench.run(planner.mode, FleetKind.PLANNER, planned(planner.mode)))
        if is_distorted:
            tried.reference = tried.scaled[-1]
    if planner.mode != Mode.HPA:
        tried.scaled.append(bench.run(Mode.HPA.value, FleetKind.AUTOSCALER, planned(Mode.HPA)))
    _search_fixed(bench, setting, tried)
    for aim in _AIMS:
        bench.require()
        foreseen = with_schedule(planned(Mode.ORACLE), bench.traffic, aim)
        tried.scheduled.append(bench.run(Mode.ORACLE.value, FleetKind.ORACLE, foreseen))
        if tried.is_as_good(tried.scheduled[-1]):
            return


def _search_fixed(bench: _Bench, setting: Setting, tried: _Tried) -> None:
    """Try fixed fleets until one is as good as the reference, and those that cost as much."""
    by_size = setting.fleets(bench.traffic)
    tried.same_gpus = tried.nearest_gpus(by_size)
    is_enough = False
    for gpus, fleets in by_size.items():
        if is_enough and gpus != tried.same_gpus:
            continue
        for fleet in fleets:
            each = bench.run(setting.name_of(fleet), FleetKind.FIXED, setting.with_fleet(fleet))
            tried.fixed.append((gpus, each))
            is_enough |= tried.is_as_good(each)


def _chosen_fixed(tried: _Tried) -> list[FleetOutcome]:
    """Return the cheapest fixed fleet that is as good, or else the best one, and the best that costs as much."""
    if not tried.fixed:
        return []
    _, best = max(tried.fixed, key=lambda each: (each[1].in_time, -each[0]))
    remarks = {best.name: ["the best fixed fleet tried; none served as well"]}
    as_good = [each for each in tried.fixed if tried.is_as_good(each[1])]
    if as_good:
        _, cheapest = min(as_good, key=lambda each: (each[0], -each[1].in_time))
        remarks = {cheapest.name: ["the cheapest fixed fleet that serves as well"]}
    as_dear = [each for gpus, each in tried.fixed if gpus == tried.same_gpus]
    if as_dear:
        best = max(as_dear, key=lambda each: each.in_time)
        remarks.setdefault(best.name, []).append("the best fixed fleet at about the same GPU-hours")
    by_name = {each.name: each for _, each in tried.fixed}
    return [replace(by_name[name], remark="; ".join(remark)) for name, remark in remarks.items()]


def _chosen_schedule(tried: _Tried) -> list[FleetOutcome]:
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
    as_good = [each for each in schedules if tried.is_as_good(each)]
    if as_good:
        return [min(as_good, key=lambda each: (each.gpu_hours or 0.0, -each.in_time))]
    return [max(schedules, key=lambda each: each.in_time)]
