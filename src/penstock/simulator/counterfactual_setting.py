"""What a counterfactual keeps of a run: its traffic, the graph's engines and router, planner, budget, start-up times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from penstock.api import GraphDeployment, Role
from penstock.core.errors import ConfigError
from penstock.performance.profile import PerformanceProfile
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.options import join
from penstock.report.findings import RunReport
from penstock.report.ledger_view import PlannerRun
from penstock.simulator.baselines import performance_profile
from penstock.simulator.oracle import Utilisation, needs
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, graph_pools, graph_slo_s
from penstock.workload.results import RESULTS_FILE, LoadRun
from penstock.workload.traces import TraceFormat, TraceRequest


def recorded_traffic(load: LoadRun) -> tuple[TraceRequest, ...]:
    """Return the requests of a run in the order in which they were sent, rejected and failed ones included.

    An answer is as long as it was, and where it did not come, as long as it was asked for.
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
    if summary["trace"].get("format") == TraceFormat.MOONCAKE and not has_ids:
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
class Setting:
    """What every simulated fleet shares.

    Attributes:
        base: The graph as the run found it, with nothing that scales.
        planner: The ledger's, or else the graph's.
        has_ledger: Whether that planner was at work.
        notes: What a reader must know of it.
    """

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


def setting_of(report: RunReport, graph: GraphDeployment) -> Setting:
    """Return what a run and its graph say of the fleets that could have served it."""
    run = report.planner
    replicas = {} if run is None else _replicas_at_zero(run)
    pools = tuple(_pool(pool, replicas) for pool in graph_pools(graph))
    config = join(given={}, graph=graph).decide_config(graph) if run is None else run.config
    budget = _budget(report, config, sum(pool.replicas * pool.gpus for pool in pools))
    start_up_s, note = _start_up(run, graph)
    slo_s = graph_slo_s(graph)
    return Setting(
        base=Scenario(pools, graph.spec.router, cold_start_s=start_up_s, max_gpus=budget, slo_s=slo_s),
        planner=replace(
            config,
            max_gpu_budget=budget,
            no_operation=False,
            ttft_slo_s=slo_s,
            performance=config.performance or _performance(config, pools),
        ),
        has_ledger=run is not None,
        notes=(note, *_engine_notes(graph)),
    )


def _performance(config: DecideConfig, pools: Sequence[PoolSpec]) -> PerformanceProfile | None:
    return performance_profile(pools) if config.mode == Mode.SLA else None


def _pool(pool: PoolSpec, replicas: Mapping[Role, int]) -> PoolSpec:
    assert isinstance(pool.model, ProfiledModel)  # noqa: S101 - a graph's workers have profiles
    model = replace(pool.model, block_size=BLOCK_SIZE)
    return replace(pool, replicas=max(1, replicas.get(pool.role, pool.replicas)), model=model)


def _replicas_at_zero(run: PlannerRun) -> dict[Role, int]:
    """Return the replicas that were ready or starting when the load began; empty where no pull tells."""
    before = [sample for sample in run.samples if sample.at_s <= 0] or list(run.samples[:1])
    return {role: pool.ready + pool.starting for each in before[-1:] for role, pool in each.pools.items()}


def _budget(report: RunReport, config: DecideConfig, held: int) -> int:
    """Return the GPUs that fleets may hold: the budget, else what the run held at most, else twice its beginning."""
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
