"""Turns the command line's options, and a manifest, into runs; runs them; gathers the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.api import GraphDeployment, Role, RouterConfig
from penstock.api.manifests import load_graph
from penstock.core.errors import ConfigError
from penstock.planner.decide.codec import to_plain
from penstock.router.policy.busy import admission_with, check_flags
from penstock.router.policy.registry import policy_names
from penstock.simulator.baselines import ALL, chosen_planners, planner_config
from penstock.simulator.observer import Recording
from penstock.simulator.options import SimulateOptions
from penstock.simulator.output import SCHEMA
from penstock.simulator.scenario import (
    DUALMAP_7B,
    DUALMAP_14B,
    Model,
    PoolSpec,
    ProfiledModel,
    RouterGroup,
    Scenario,
    graph_pools,
    graph_slo_s,
    unbounded_router,
    unsimulated,
)
from penstock.simulator.sweep import RunSpec, add_regrets, goodputs, run_all, simulate, summarise
from penstock.simulator.workload import WorkloadSpec, prepare

DEFAULT_PROFILE = "a100-llama-8b-bf16-tp1"
DEFAULT_REPLICAS = 4
DEFAULT_SLO_S = 5.0
DEFAULT_POLICY = "least-loaded"
MAX_ROUTERS = 256
"""Chosen: each knows all workers, so that memory grows with both."""
_SIMPLE = {model.name: model for model in (DUALMAP_7B, DUALMAP_14B)}


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What will be run."""

    runs: tuple[RunSpec, ...]
    shown: tuple[RunSpec, ...]
    notes: tuple[str, ...]
    compares_planners: bool = False


def make_plan(options: SimulateOptions, *, graph: GraphDeployment | None = None) -> RunPlan:
    """Return the runs that the options ask for.

    Raises:
        ConfigError: options contradict each other or the manifest, or name something unknown.
        InvalidSpecError: the manifest is wrong.
    """
    if graph is None and options.manifest is not None:
        graph = load_graph(options.manifest)
    pools = _pools(options, graph)
    slo_s = _slo_s(options, graph)
    config = planner_config(graph, pools, max_gpus=options.max_gpus, slo_s=slo_s)
    planners = chosen_planners(options.planners, config, pools, itl_slo_s=options.itl_slo_s)
    workload = WorkloadSpec(
        options.trace,
        options.spread,
        options.max_input_tokens,
        options.on_long,
        options.limit,
        options.warmup,
        tiers=options.tiers,
    )
    rates: tuple[float | None, ...] = options.qps or (None,)
    routers = _routers(options, graph)
    worlds = {
        _label(label, planner, routers, planners): Scenario(
            pools=pools,
            router=router,
            routers=group,
            planner=config,
            resizes=options.resizes,
            failures=options.failures,
            faults=options.faults,
            cold_start_s=options.cold_start_s,
            max_gpus=config.max_gpu_budget if config is not None else options.max_gpus,
            slo_s=slo_s,
            itl_slo_s=options.itl_slo_s,
        )
        for label, (router, group) in routers.items()
        for planner, config in planners.items()
    }
    runs = tuple(
        RunSpec(name, scenario, workload, rate, seed)
        for name, scenario in worlds.items()
        for rate in rates
        for seed in range(options.seeds)
    )
    shown = tuple(RunSpec(name, scenario, workload, rates[-1], 0) for name, scenario in worlds.items())
    return RunPlan(runs, shown, _notes(workload, pools, graph), compares_planners=len(planners) > 1)


def _routers(
    options: SimulateOptions, graph: GraphDeployment | None
) -> dict[str, tuple[RouterConfig, RouterGroup]]:
    """Return every router that is compared, by its label."""
    groups = _router_groups(options)
    return {
        name if len(groups) == 1 else routers_label(name, count): (_router(options, name, graph), group)
        for name in _policy_names(options, graph)
        for count, group in groups.items()
    }


def run_plan(
    plan: RunPlan, *, processes: int | None = None, on_done: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Run everything and return the result as plain data, the same for the same plan."""
    first = plan.runs[0]
    workload = prepare(first.workload, seed=first.seed, qps=first.qps)
    runs = run_all(plan.runs, processes=processes, on_done=on_done)
    router = first.scenario.router.model_copy(update={"policy": "(each)"})
    scenario = replace(first.scenario, router=router)
    if plan.compares_planners:
        scenario = replace(first.scenario, planner=None, max_gpus=None)
    summary = summarise(runs)
    if plan.compares_planners:
        add_regrets(summary)
    return {
        "schema": SCHEMA,
        "notes": list(plan.notes),
        "compares_planners": plan.compares_planners,
        "slo_s": first.scenario.slo_s,
        "workload": {
            "name": workload.name,
            "requests": len(workload.requests),
            "warmup": workload.warmup,
            "rate_rps": workload.rate_rps,
            "truncated": workload.truncated,
            "dropped": workload.dropped,
            "spread": workload.spread.value,
        },
        "settings": to_plain(scenario),
        "summary": summary,
        "by_routers": shares_by_routers(plan.runs, summary),
        "goodput": goodputs(runs),
        "runs": runs,
    }


def routers_label(policy: str, count: int) -> str:
    """Return the label of a policy's runs with one of several numbers of routers."""
    return f"{policy}, {count} router{'' if count == 1 else 's'}"


def shares_by_routers(runs: Sequence[RunSpec], summary: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each policy's share in time by its number of routers, by rate; empty unless several numbers were run.

    ``behind_best`` is the largest gap to the best policy of the same rate and number, a fraction.
    """
    counts = {spec.label: spec.scenario.routers.count for spec in runs}
    if len(set(counts.values())) < 2:
        return []
    rows: dict[tuple[str, float | None], dict[str, float]] = {}
    best: dict[tuple[float | None, str], float] = {}
    for row in summary:
        count, share = str(counts[row["policy"]]), row["capacity"]
        policy = row["policy"].replace(routers_label("", counts[row["policy"]]), "")
        rows.setdefault((policy, row["qps"]), {})[count] = share
        best[row["qps"], count] = max(best.get((row["qps"], count), 0.0), share)
    return [
        {
            "policy": policy,
            "qps": qps,
            "in_time": shares,
            "behind_best": round(max(best[qps, count] - share for count, share in shares.items()), 6),
        }
        for (policy, qps), shares in rows.items()
    ]


def record(plan: RunPlan) -> dict[str, Recording]:
    """Return one recorded run of each policy, for pictures: the first seed at the last rate."""
    return {spec.label: simulate(spec)[0] for spec in plan.shown}


def _notes(
    workload: WorkloadSpec, pools: tuple[PoolSpec, ...], graph: GraphDeployment | None
) -> tuple[str, ...]:
    prepared = prepare(workload, seed=0)
    notes = [f"{prepared.name}: {len(prepared.requests)} requests"]
    if prepared.truncated or prepared.dropped:
        notes.append(
            f"prompts above {workload.max_input_tokens} tokens: {prepared.truncated} cut,"
            f" {prepared.dropped} requests left out"
        )
    if not isinstance(pools[0].model, ProfiledModel):
        notes.append(
            f"{pools[0].model.name}: prefill only, decode is not modelled; TTFT is the prefill's end"
        )
    ignored = [] if graph is None else unsimulated(graph.spec.router)
    if ignored:
        notes.append(f"{', '.join(ignored)}: set in the manifest, without effect in a simulation")
    return tuple(notes)


def _slo_s(options: SimulateOptions, graph: GraphDeployment | None) -> float:
    if options.slo_s is not None:
        return options.slo_s
    return DEFAULT_SLO_S if graph is None else graph_slo_s(graph)


def _router(options: SimulateOptions, policy: str, graph: GraphDeployment | None) -> RouterConfig:
    """Return the manifest's router section, or one whose queue has no bounds, with what the options say in its place."""
    base = unbounded_router(policy) if graph is None else graph.spec.router
    queue: dict[str, Any] = {
        "order": options.queue_order,
        "worker_tokens": options.slot_tokens,
        "max_requests": options.max_waiting,
        "max_wait_seconds": options.max_wait_s,
    }
    admission = admission_with(base.admission, options.admission)
    check_flags(admission, options.admission)
    section: dict[str, Any] = {
        "policy": policy,
        "admission": admission,
        "prefill_queue": base.prefill_queue.model_copy(update=_given(queue)),
        "ttft_slo_seconds": options.slo_s,
    }
    if options.no_rebalance:
        section["dualmap"] = base.dualmap.model_copy(update={"rebalance": False})
    # Another policy has other parameters.
    parameters = base.policy_parameters if policy == base.policy else None
    return base.model_copy(update={**_given(section), "policy_parameters": parameters})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _router_groups(options: SimulateOptions) -> dict[int, RouterGroup]:
    """Return the routers to try, by their number."""
    counts = tuple(dict.fromkeys(options.routers))
    if not counts or not all(1 <= count <= MAX_ROUTERS for count in counts):
        shown = ",".join(map(str, options.routers))
        raise ConfigError(f"--routers {shown}: must be numbers from 1 to {MAX_ROUTERS}")
    if options.picker_death and min(counts) == 1:
        raise ConfigError("--picker-death: behind one router nobody picks after it; give --routers 2 or more")
    return {
        count: RouterGroup(
            count,
            options.propagation_delay_s,
            options.pick_delay_s if count > 1 else 0.0,
            options.picker_death,
        )
        for count in counts
    }


def _pools(options: SimulateOptions, graph: GraphDeployment | None) -> tuple[PoolSpec, ...]:
    if options.aggregated is not None and (options.prefill is not None or options.decode is not None):
        raise ConfigError("--aggregated: excludes --prefill and --decode; give one kind")
    given = {Role.PREFILL: options.prefill, Role.DECODE: options.decode, Role.AGGREGATED: options.aggregated}
    simple = _SIMPLE.get(options.profile or "")
    if simple is not None:
        if options.prefill is not None or options.decode is not None or graph is not None:
            raise ConfigError(
                f"--profile {simple.name}: it only prefills; give --aggregated N and no manifest"
            )
        return (PoolSpec(Role.AGGREGATED, options.aggregated or 8, simple),)
    if graph is not None:
        return tuple(
            replace(pool, replicas=given[pool.role] or pool.replicas, model=_model(options, pool.model))
            for pool in graph_pools(graph)
        )
    model = _model(options, ProfiledModel(DEFAULT_PROFILE))
    if options.aggregated is not None:
        return (PoolSpec(Role.AGGREGATED, options.aggregated, model),)
    return tuple(
        PoolSpec(role, given[role] or DEFAULT_REPLICAS, model) for role in (Role.PREFILL, Role.DECODE)
    )


def _model(options: SimulateOptions, base: Model) -> Model:
    assert isinstance(base, ProfiledModel)  # noqa: S101 - the simple server takes no such options
    return replace(
        base,
        profile=options.profile or base.profile,
        kv_tokens=options.kv_tokens or base.kv_tokens,
        block_size=options.block_size,
    )


def _policy_names(options: SimulateOptions, graph: GraphDeployment | None) -> tuple[str, ...]:
    text = options.policy
    if text is None:
        # Planners are compared under one router, routers under one planner.
        single = DEFAULT_POLICY if graph is None else graph.spec.router.policy
        text = single if len(options.planners) > 1 or ALL in options.planners else ALL
    names = policy_names() if text == ALL else tuple(filter(None, text.split(",")))
    if not names or not set(names) <= set(policy_names()):
        raise ConfigError(f"--policy {text}: choose from {', '.join(policy_names())}, or all")
    return names


def _label(policy: str, planner: str, policies: Collection[str], planners: Mapping[str, object]) -> str:
    if len(planners) < 2:
        return policy
    return planner if len(policies) < 2 else f"{policy} + {planner}"
