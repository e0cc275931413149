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
from penstock.assess.manifest import GraphPlan
from penstock.assess.observed import Observed, filled
from penstock.simulator.executors import open_executor, run_all
from penstock.simulator.observer import Recording
from penstock.simulator.plan import SimulateOptions, make_plan
from penstock.simulator.scenario import MAX_WAIT_S, MAX_WAITING, Resize
from penstock.simulator.scoreboard import mean
from penstock.simulator.sweep import RunSpec, figures_of, simulate
from penstock.workload.traces import Trace
from penstock_planner.decide.config import Mode

SERVICE_POLICY: Final = "round-robin"
"""How a Kubernetes Service without a router spreads requests, near enough."""


class FleetKind(StrEnum):
    """What scales a fleet."""

    RAN = "ran"
    FIXED = "fixed"
    HPA = "hpa"
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
        lost: Requests that failed or were rejected, mean over the seeds.
        plan: Its graph; None: of fleets that Penstock does not run.
    """

    name: str
    kind: FleetKind
    in_time: Spread
    gpu_hours: Spread
    lost: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
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
        cold_start_s: From asking for a replica until it serves.
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
    """Return the fleet that ran, the best fixed one, an HPA's, Penstock's, and with ``with_oracle`` the oracle's.

    The fixed fleet is the smallest that reaches the target's share in time with the first seed. Runs that are ``done`` are
    not repeated.
    """
    known = dict(done or {})
    aggregated, apart = setting.plan(), setting.plan(is_disaggregated=True)
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
        scaled: list[tuple[str, FleetKind, GraphPlan, dict[str, Any]]] = [
            (
                "HPA on KV usage and waiting requests",
                FleetKind.HPA,
                aggregated,
                {"planners": (Mode.HPA,), **_SERVICE},
            ),
            ("Penstock, aggregated", FleetKind.PENSTOCK, aggregated, {"planners": (Mode.ADAPTIVE,)}),
        ]
        if setting.max_gpus >= 2 * setting.gpus:
            scaled.append(
                (
                    "Penstock, prefill and decode apart",
                    FleetKind.PENSTOCK,
                    apart,
                    {"planners": (Mode.ADAPTIVE,)},
                )
            )
        if with_oracle:
            scaled.append(("oracle, aggregated", FleetKind.ORACLE, aggregated, {"planners": (Mode.ORACLE,)}))
        for name, kind, plan, options in scaled:
            specs = setting.specs(plan, name, **options)
            own = plan if kind is FleetKind.PENSTOCK else None
            found.append(_fleet(name, kind, figures(name, specs), plan=own))
    return found


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
        sum(run["lost"] for run in runs) / len(runs),
        mean(run["ttft_s"]["p50"] for run in runs),
        mean(run["ttft_s"]["p99"] for run in runs),
        max(run["peak_gpus"] for run in runs),
        plan,
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(sum(values) / len(values), min(values), max(values))
