"""Simulates the observed load on the fleet that ran and on others, over seeds; the same bodies as `penstock simulate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np

from penstock.api import Role, SloConfig
from penstock.assess.manifest import GRAPH_FILE, GraphPlan
from penstock.assess.observed import Observed, filled
from penstock.simulator.executors import open_executor, run_all
from penstock.simulator.observer import Recording
from penstock.simulator.plan import SimulateOptions, make_plan
from penstock.simulator.scenario import MAX_WAIT_S, MAX_WAITING, Resize
from penstock.simulator.sweep import RunSpec, figures_of, simulate
from penstock.workload.traces import Trace
from penstock_planner.decide.config import Mode
from penstock_planner.decide.policies.baselines.hpa import HpaParameters

SERVICE_POLICY: Final = "round-robin"
"""How a Kubernetes Service without a router spreads requests, near enough."""


class FleetKind(StrEnum):
    """What scales a fleet."""

    RAN = "ran"
    FIXED = "fixed"
    HPA = "hpa"
    HPA_TUNED = "hpa tuned"
    KEDA = "keda"
    PENSTOCK = "penstock"
    ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the seeds."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a fleet would have served, and for what.

    Attributes:
        in_time: Share of the requests within the targets, 0-1.
        gpu_hours: From the request for a replica until it is gone.
        lost: Requests that failed or were rejected.
        ttft_p50_s, ttft_p99_s: None: nothing was served.
        plan: Its graph; None: of fleets that Penstock does not run.
    """

    name: str
    kind: FleetKind
    in_time: Spread
    gpu_hours: Spread
    lost: Spread
    ttft_p50_s: Spread | None
    ttft_p99_s: Spread | None
    peak_gpus: int
    plan: GraphPlan | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What every simulated fleet shares.

    Attributes:
        observed: The simulated window.
        traces: One for each seed.
        profile: Latency profile, by name or path.
        gpus: Of one replica.
        cold_start_s: Seconds from requesting a replica until it is ready.
        max_gpus: What the scaled fleets may hold.
    """

    observed: Observed
    traces: tuple[Trace, ...]
    profile: str
    slo: SloConfig
    gpus: int
    cold_start_s: float
    max_gpus: int

    @property
    def first_replicas(self) -> int:
        """Replicas at the beginning, at least one."""
        return max(1, round(float(filled(self.observed.replicas)[0])))

    def plan(self, *, is_disaggregated: bool = False) -> GraphPlan:
        """Return the graph of a fleet that Penstock runs."""
        return GraphPlan(
            self.observed.model,
            self.slo,
            self.gpus,
            is_disaggregated,
            min(self.first_replicas, max(1, self.max_gpus // self.gpus)),
            self.max_gpus,
        )

    def own_plans(self) -> list[GraphPlan]:
        """Return the graphs of Penstock's fleets: aggregated, and where two replicas fit also apart."""
        apart = [self.plan(is_disaggregated=True)] if self.max_gpus >= 2 * self.gpus else []
        return [self.plan(), *apart]

    def own(self, plan: GraphPlan) -> list[RunSpec]:
        """Return the runs of a fleet that Penstock routes to and scales."""
        name = "Penstock, prefill and decode apart" if plan.is_disaggregated else "Penstock, aggregated"
        if plan.bounds:
            name += f", as in {GRAPH_FILE}"
        return self.specs(plan, name, planners=(Mode.ADAPTIVE,))

    def specs(self, plan: GraphPlan, name: str, **options: Any) -> list[RunSpec]:
        """Return a run for each seed."""
        graph = plan.graph()
        chosen = SimulateOptions(
            profile=self.profile,
            cold_start_s=options.pop("cold_start_s", self.cold_start_s),
            calendar_start=datetime.fromtimestamp(self.observed.start_s, UTC),
            **options,
        )
        found = []
        for seed, trace in enumerate(self.traces):
            spec = make_plan(chosen, graph=graph, trace=trace).runs[0]
            found.append(replace(spec, label=name, seed=seed))
        return found

    def hpa(self, plan: GraphPlan, name: str, targets: HpaParameters) -> list[RunSpec]:
        """Return the runs of a fleet that an HPA scales, behind a plain Service."""
        found = []
        for spec in self.specs(plan, name, planners=(Mode.HPA,), **_SERVICE):
            config = spec.scenario.planner
            assert config is not None  # noqa: S101 - a planner was chosen
            scenario = replace(spec.scenario, planner=replace(config, parameters=targets))
            found.append(replace(spec, scenario=scenario))
        return found

    def fixed(self, replicas: int) -> list[RunSpec]:
        """Return the runs of a fleet that nothing scales, behind a plain Service."""
        plan = self.plan()
        return self.specs(plan, fixed_name(replicas), aggregated=replicas, **_SERVICE)

    def ran(self) -> list[RunSpec]:
        """Return the runs of the fleet that ran: its replicas, when they were there."""
        return self.specs(
            self.plan(),
            RAN,
            aggregated=self.first_replicas,
            resizes=resizes_of(self.observed),
            cold_start_s=0.0,
            **_SERVICE,
        )

    @property
    def starting_gpu_hours(self) -> float:
        """GPU-hours of the replicas of the fleet that ran while they started and were not counted yet."""
        counts = filled(self.observed.replicas)
        started = float(np.maximum(0.0, np.diff(counts)).sum())
        return started * self.gpus * self.cold_start_s / 3600


RAN: Final = "as it ran"
_SERVICE: Final[dict[str, Any]] = {
    "policy": SERVICE_POLICY,
    "max_waiting": MAX_WAITING,
    "max_wait_s": MAX_WAIT_S,
}


def fixed_name(replicas: int) -> str:
    """Return the name of a fixed fleet."""
    return f"{replicas} replica{'' if replicas == 1 else 's'}, fixed"


def resizes_of(observed: Observed) -> tuple[Resize, ...]:
    """Return when the observed replicas changed: in the middle of the replica step at whose end they had."""
    counts = np.rint(filled(observed.replicas)).astype(int)
    return tuple(
        Resize((step + 0.5) * observed.replica_step_s, Role.AGGREGATED, int(counts[step]))
        for step in range(1, len(counts))
        if counts[step] != counts[step - 1]
    )


def recorded(spec: RunSpec) -> Recording:
    """Return a run in full."""
    return simulate(spec)[0]


KnownRuns: TypeAlias = dict[tuple[str, int], dict[str, Any]]
"""Figures of runs by label and seed."""


OnFleet = Callable[[str], None]
"""Called with the name of what is simulated next."""


def compare_fleets(
    setting: Setting,
    *,
    processes: int | None,
    with_oracle: bool,
    on_fleet: OnFleet = lambda _name: None,
    done: KnownRuns | None = None,
) -> list[Fleet]:
    """Return the fleet that ran, the best fixed one, those of HPAs and KEDA, Penstock's, and with ``with_oracle`` the oracle's.

    The fixed fleet is the smallest that reaches the target's share in time with the first seed. Runs that are ``done`` are
    not repeated.
    """
    known = dict(done or {})
    with open_executor(processes=processes, cells=64, on=None) as executor:

        def figures(name: str, specs: Sequence[RunSpec]) -> list[dict[str, Any]]:
            missing = [each for each in specs if (each.label, each.seed) not in known]
            if missing:
                on_fleet(name)
                for each, made in zip(missing, run_all(figures_of, missing, executor), strict=True):
                    known[each.label, each.seed] = made
            return [known[each.label, each.seed] for each in specs]

        found = [
            _fleet(RAN, FleetKind.RAN, figures(RAN, setting.ran()), more_hours=setting.starting_gpu_hours)
        ]
        best, reaches = _best_fixed(setting, lambda specs: figures(specs[0].label, specs))
        name = fixed_name(best) if reaches else f"{fixed_name(best)}: no smaller fleet serves better"
        found.append(_fleet(name, FleetKind.FIXED, figures(name, setting.fixed(best))))
        for name, kind, runs in _autoscaled(setting):
            found.append(_fleet(name, kind, figures(name, runs)))
        tuned = _tuned(setting, lambda specs: figures(specs[0].label, specs))
        found.append(_fleet(tuned[0].label, FleetKind.HPA_TUNED, figures(tuned[0].label, tuned)))
        for plan in setting.own_plans():
            specs = setting.own(plan)
            found.append(
                _fleet(specs[0].label, FleetKind.PENSTOCK, figures(specs[0].label, specs), plan=plan)
            )
        if with_oracle:
            specs = setting.specs(setting.plan(), ORACLE, planners=(Mode.ORACLE,))
            found.append(_fleet(ORACLE, FleetKind.ORACLE, figures(ORACLE, specs)))
    return found


def run_own(setting: Setting, plan: GraphPlan, *, processes: int | None) -> tuple[Fleet, Recording]:
    """Return what Penstock's fleet of a graph would have served, and its run with the first seed."""
    specs = setting.own(plan)
    recording, _, first = simulate(specs[0])
    with open_executor(processes=processes, cells=len(specs), on=None) as executor:
        rest = run_all(figures_of, specs[1:], executor)
    return _fleet(specs[0].label, FleetKind.PENSTOCK, [first, *rest], plan=plan), recording


def _autoscaled(setting: Setting) -> list[tuple[str, FleetKind, list[RunSpec]]]:
    """Return the fleets of other autoscalers: the HPA as configured, or with common settings where that is unknown; KEDA."""
    known = setting.observed.autoscaler
    plan, targets, name = setting.plan(), HpaParameters(), HPA_COMMON
    if known is not None:
        # The HPA's own bounds hold even if its metrics are not simulated.
        most = max(setting.max_gpus, known.max_replicas * setting.gpus)
        bounds = {Role.AGGREGATED: (known.min_replicas, known.max_replicas)}
        plan = replace(plan, max_gpus=most, bounds=bounds)
        if known.targets is not None:
            targets, name = known.targets, f"HPA as configured: {known.words}"
    keda = setting.specs(setting.plan(), KEDA, planners=(Mode.KEDA,), **_SERVICE)
    return [
        (name, FleetKind.HPA, setting.hpa(plan, name, targets)),
        (KEDA, FleetKind.KEDA, keda),
    ]


def _tuned(setting: Setting, run: Callable[[Sequence[RunSpec]], list[dict[str, Any]]]) -> list[RunSpec]:
    """Return the runs of the best HPA of a small grid, by the first seed: the cheapest that reaches the target."""
    plan = setting.plan()
    trials = []
    for targets in HPA_GRID:
        name = f"HPA tuned: KV usage {targets.kv_usage:.0%}, {targets.waiting:g} waiting"
        specs = setting.hpa(plan, name, targets)
        figures = run(specs[:1])[0]
        in_time = figures["in_time"]["both"]
        # The best that misses the target comes after all that reach it.
        rank = (0.0, figures["gpu_hours"]) if in_time >= setting.slo.attainment else (1.0 - in_time, 0.0)
        trials.append((rank, specs))
    return min(trials, key=lambda trial: trial[0])[1]


HPA_COMMON: Final = "HPA: KV usage 50%, 1 waiting"
KEDA: Final = "KEDA: prompt work, KV usage 80%"
ORACLE: Final = "oracle, aggregated"
HPA_GRID: Final = tuple(
    HpaParameters(kv_usage, waiting) for kv_usage in (0.3, 0.5, 0.8) for waiting in (1.0, 5.0)
)
"""Chosen: around what guides recommend; each costs a simulation."""


def _best_fixed(
    setting: Setting, run: Callable[[Sequence[RunSpec]], list[dict[str, Any]]]
) -> tuple[int, bool]:
    """Return the fewest replicas that reach the target, and whether they do; else the most that may be held."""
    largest = max(1, setting.max_gpus // setting.gpus)

    def is_enough(replicas: int) -> bool:
        figures = run(setting.fixed(replicas)[:1])[0]
        return bool(figures["in_time"]["both"] >= setting.slo.attainment)

    low, high = 0, None
    trial = min(largest, max(1, math.ceil(float(filled(setting.observed.replicas).mean()))))
    while high is None or high - low > 1:
        if is_enough(trial):
            high = trial
        else:
            low = trial
            if low == largest:
                return largest, False
        trial = min(largest, 2 * trial) if high is None else (low + high) // 2
    return high, True


def _fleet(
    name: str,
    kind: FleetKind,
    runs: Sequence[dict[str, Any]],
    *,
    plan: GraphPlan | None = None,
    more_hours: float = 0.0,
) -> Fleet:
    return Fleet(
        name,
        kind,
        _spread([run["in_time"]["both"] for run in runs]),
        _spread([run["gpu_hours"] + more_hours for run in runs]),
        _spread([run["lost"] for run in runs]),
        _known_spread([run["ttft_s"]["p50"] for run in runs]),
        _known_spread([run["ttft_s"]["p99"] for run in runs]),
        max(run["peak_gpus"] for run in runs),
        plan,
    )


def _known_spread(values: Sequence[float | None]) -> Spread | None:
    known = [each for each in values if each is not None]
    return _spread(known) if known else None


def _spread(values: Sequence[float]) -> Spread:
    return Spread(sum(values) / len(values), min(values), max(values))
