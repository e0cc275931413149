"""Options of `penstock simulate`, the runs that they and a manifest describe, and the combined result of these runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.api import GraphDeployment, QueueOrder, Role, RouterConfig, SloConfig
from penstock.api.manifests import load_graph
from penstock.core.closest import did_you_mean
from penstock.core.errors import ConfigError, unwritable
from penstock.core.flags import attainment_flag, check_bounds, duration_flag, flag
from penstock.router.policy.busy import check_flags
from penstock.router.policy.registry import policy_names
from penstock.simulator.baselines import ALL, DEFAULT_PLANNER, chosen_planners, planner_config, timeouts_of
from penstock.simulator.beyond import beyond_every_fleet
from penstock.simulator.cells import CellJournal
from penstock.simulator.executors import open_executor, run_all
from penstock.simulator.observer import Recording
from penstock.simulator.output import SCHEMA
from penstock.simulator.scenario import (
    DUALMAP_7B,
    DUALMAP_14B,
    MONDAY_S,
    Faults,
    Model,
    PlannerTimeouts,
    PoolSpec,
    ProfiledModel,
    Resize,
    Scenario,
    SimulatedRouters,
    WorkerFailure,
    graph_pools,
    unbounded_router,
    unsimulated,
)
from penstock.simulator.sweep import RunSpec, add_regrets, figures_of, goodputs, simulate, summarise
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock.workload.arrivals import OnLong, Spread
from penstock.workload.traces import BLOCK_TOKENS_HELP, BLOCK_TOKENS_UNSET, Trace
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.policy import policy_names as planner_names
from penstock_planner.ledger import FILE_NAME


def _resize(text: str) -> Resize:
    at_s, _, change = text.partition(":")
    role, _, replicas = change.partition("=")
    return Resize(float(at_s), Role(role), int(replicas))


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _failure(text: str) -> WorkerFailure:
    times, _, worker = text.partition(":")
    at_s, _, back_s = times.partition("-")
    return WorkerFailure(float(at_s), worker, float(back_s) if back_s else None)


DEFAULT_TRACE = "mooncake"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of the command line of `penstock simulate`, by their names.

    An option that is not set is None; ``admission`` holds only the flags that are set.
    """

    trace: str = flag(
        "A trace file (JSON lines as Mooncake's, AIPerf's or Bailian's; CSV as Azure's, BurstGPT's, splitwise-sim's or ServeGen's), the "
        "packaged `mooncake`, or a synthetic process: "
        "poisson|gamma|bursts|tenants|constant|sine|step|ramp|regimes|day|sawtooth|week with :KEY=VALUE,… as "
        "poisson:rate=4,count=2000,input_tokens=2048,share=0.5; requests=TRACE takes a trace's prompts.",
        default=DEFAULT_TRACE,
    )
    policy: str | None = flag(
        "Router policies to compare, by their names in a manifest.",
        metavar="all|NAME[,NAME…]",
        unset="all; with several planners the manifest's, or the router's default",
    )
    rate_rps: tuple[float, ...] = flag(
        "Mean rates to try, requests/s.",
        name="--rate",
        default=(),
        gt=0,
        is_separated=True,
        metavar="RPS[,RPS…]",
        unset="the trace's",
    )
    seeds: int = flag("Number of runs of each combination, with seeds 0, 1, …", default=1, ge=1)
    prefill: int | None = flag("Prefill workers at time 0.", ge=1, unset="4, or the manifest's")
    decode: int | None = flag("Decode workers at time 0.", ge=1, unset="4, or the manifest's")
    aggregated: int | None = flag("Aggregated workers instead.", ge=1, unset="prefill and decode workers")
    profile: str | None = flag(
        "Latency profile, or dualmap-7b|dualmap-14b: the artefact's prefill-only server, aggregated.",
        unset="a100-llama-8b-bf16-tp1, or the manifest's",
    )
    kv_tokens: int | None = flag("KV capacity of one worker, tokens.", ge=1, unset="the profile's")
    block_size: int = flag("Tokens per KV block; divides 512.", default=128, ge=1, le=512)
    manifest: Path | None = flag(
        "Take workers, profile, router and planner from a graph.", default=None, path="existing file"
    )
    planners: tuple[str, ...] = flag(
        "Let the planner scale, with the manifest's rules or the defaults; with names, compare planners: "
        f"{', '.join(planner_names())}.",
        name="--planner",
        default=(),
        is_separated=True,
        bare=DEFAULT_PLANNER,
        metavar="[all|NAME[,NAME…]]",
        unset="nothing scales",
    )
    ledger: Path | None = flag(
        "Folder for the planner's ledger, written as a live planner writes it, for `penstock planner explain` and `replay`; needs "
        "exactly one run with a planner.",
        default=None,
        path="folder",
        unset="no ledger is written",
    )
    max_gpus: int | None = flag(
        "Maximum GPUs that all workers hold together.", ge=1, unset="the planner's, else none"
    )
    calendar_start: datetime | None = flag(
        "Date and time of second 0, for planner.schedule, as 2026-01-05T08:00+01:00.",
        convert=_moment,
        metavar="TIME",
        form="an ISO date and time, as 2026-01-05T08:00+01:00",
        unset="2024-01-01T00:00Z, a Monday",
    )
    cold_start_s: float = flag(
        "Time from requesting a replica until it is ready, virtual seconds.", default=30.0
    )
    resizes: tuple[Resize, ...] = flag(
        "Set a pool's size at a time; repeatable.",
        name="--resize",
        default=(),
        metavar="S:ROLE=N",
        convert=_resize,
        form="SECONDS:ROLE=REPLICAS, as 74:prefill=8",
    )
    failures: tuple[WorkerFailure, ...] = flag(
        "Kill a worker, and bring it back; repeatable.",
        name="--fail",
        default=(),
        metavar="S[-BACK]:WORKER",
        convert=_failure,
        form="SECONDS[-BACK]:WORKER, as 60-120:prefill-0",
    )
    faults: Faults = field(default_factory=Faults)
    ttft_slo_s: float | None = duration_flag(
        "TTFT that counts as on time.", name="--ttft-slo", gt=0, unset="5s, or the manifest's"
    )
    itl_slo_s: float | None = duration_flag(
        "Mean gap between a request's tokens that counts as on time.",
        name="--itl-slo",
        gt=0,
        unset="any, or the manifest's",
    )
    attainment: float | None = attainment_flag(
        "Fraction of the requests that the planner aims to serve on time.", unset="0.99, or the manifest's"
    )
    tiers: str | None = flag(
        "Let requests ask for priority tiers in these proportions, as premium=20,standard=50,background=30; the "
        "manifest says what the router makes of them.",
        metavar="TIER=WEIGHT[,...]",
        unset="they ask for none",
    )
    propagation_delay_s: float = flag(
        "Age of what the picker knows of caches and loads, apart from its own dispatches, virtual seconds.",
        default=0.0,
    )
    routers: tuple[int, ...] = flag(
        "Number of routers, one of which picks workers for all. Give several numbers to compare them.",
        default=(1,),
        is_separated=True,
        metavar="N[,N…]",
    )
    pick_delay_s: float = flag(
        "Time that a request of another router takes to the picker and back, virtual seconds.", default=0.0005
    )
    picker_death: tuple[float, ...] = flag(
        "Time at which the router that picks workers dies, seconds; repeatable; needs two routers or more.",
        default=(),
        metavar="S",
        unset="never",
    )
    queue_order: QueueOrder | None = flag(
        "Order of each worker's queue in the router.", unset="in-time-first, or the manifest's"
    )
    no_rebalance: bool = flag("Turn off moving queued requests (dualmap).", default=False)
    slot_tokens: int | None = flag(
        "Maximum prompt tokens dispatched to one worker at a time; a longer prompt is dispatched alone.",
        ge=1,
        unset="8192, or the manifest's",
    )
    max_waiting: int | None = flag(
        "Maximum number of requests that wait in the router; more are rejected.", ge=1, unset="no bound"
    )
    max_wait_s: float | None = flag("Maximum wait in the router, virtual seconds.", unset="no bound")
    admission: Mapping[str, Any] = field(default_factory=dict)
    warmup: int = flag("Number of requests at the start that are served but not measured.", default=0, ge=0)
    limit: int | None = flag("Maximum number of requests.", ge=1, unset="all")
    max_input_tokens: int | None = flag("Maximum prompt length, tokens.", ge=1, unset="no limit")
    on_long: OnLong = flag("Cut longer prompts, or leave their requests out.", default=OnLong.TRUNCATE)
    block_tokens: int | None = flag(BLOCK_TOKENS_HELP, ge=1, unset=BLOCK_TOKENS_UNSET)
    spread: Spread | None = flag(
        "How a batch of equal arrival times is placed in its 3 s.",
        unset="poisson for a trace of batches, as Mooncake's, else none",
    )

    def __post_init__(self) -> None:
        check_bounds(self)


DEFAULT_PROFILE = "a100-llama-8b-bf16-tp1"
DEFAULT_REPLICAS = 4
MAX_ROUTERS = 256
"""Maximum number of simulated routers. Chosen: each tracks all workers, so memory grows with routers times workers."""
_SIMPLE = {model.name: model for model in (DUALMAP_7B, DUALMAP_14B)}


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Runs to simulate.

    Attributes:
        runs: One entry per policy, planner, rate and seed.
        notes: Sentences about the workload for the reader.
        compares_planners: Whether several planners are compared.
    """

    runs: tuple[RunSpec, ...]
    notes: tuple[str, ...]
    compares_planners: bool = False


def make_plan(
    options: SimulateOptions, *, graph: GraphDeployment | None = None, trace: Trace | None = None
) -> RunPlan:
    """Return the runs that the options of `penstock simulate` describe.

    Args:
        options: Options of the command line.
        graph: Graph that replaces the file ``options.manifest``; None reads that file, if the option is set.
        trace: Trace that replaces ``options.trace``; None reads the trace that the option names.

    Raises:
        ConfigError: options contradict each other or the manifest, or contain an unknown name.
        InvalidSpecError: the manifest is invalid.
    """
    if graph is None and options.manifest is not None:
        graph = load_graph(options.manifest)
    pools = _pools(options, graph)
    slo = _slo(options, graph)
    config = planner_config(graph, pools, max_gpus=options.max_gpus, slo=slo)
    planners = chosen_planners(options.planners, config, pools)
    workload = WorkloadSpec(
        options.trace if trace is None else trace,
        options.spread,
        options.max_input_tokens,
        options.on_long,
        options.limit,
        options.warmup,
        tiers=options.tiers,
        block_tokens=options.block_tokens,
    )
    rates: tuple[float | None, ...] = options.rate_rps or (None,)
    routers = _routers(options, graph)
    worlds = {
        _label(label, planner, routers, planners): (
            planner or None,
            Scenario(
                pools=pools,
                router=router,
                routers=group,
                planner=config,
                patience=PlannerTimeouts() if graph is None else timeouts_of(graph),
                resizes=options.resizes,
                failures=options.failures,
                faults=options.faults,
                cold_start_s=options.cold_start_s,
                max_gpus=config.max_gpu_budget if config is not None else options.max_gpus,
                slo=slo,
                calendar_s=MONDAY_S if options.calendar_start is None else options.calendar_start.timestamp(),
            ),
        )
        for label, (router, group) in routers.items()
        for planner, config in planners.items()
    }
    runs = tuple(
        RunSpec(name, scenario, workload, rate, seed, planner)
        for name, (planner, scenario) in worlds.items()
        for rate in rates
        for seed in range(options.seeds)
    )
    if options.ledger is not None:
        runs = (_recorded(runs, options.ledger),)
    return RunPlan(runs, _notes(workload, pools, graph), compares_planners=len(planners) > 1)


def _recorded(runs: Sequence[RunSpec], folder: Path) -> RunSpec:
    """Return the only run, with a ledger in ``folder``.

    Raises:
        ConfigError: there are several runs, no planner with a ledger, or a ledger in the folder already.
    """
    place = f"--ledger {folder}"
    if len(runs) > 1:
        raise ConfigError(
            f"{place}: a ledger holds one run, and these options give {len(runs)}; choose one --policy, --planner, --rate "
            "and --seeds 1"
        )
    (run,) = runs
    if run.scenario.planner is None:
        raise ConfigError(f"{place}: no planner decides in this run; add --planner")
    if not run.scenario.planner.policy.has_ledger:
        raise ConfigError(f"{place}: {run.planner} is a baseline without a ledger; choose --planner adaptive")
    file = folder / FILE_NAME
    if file.exists():
        raise ConfigError(f"{place}: holds a {FILE_NAME} already; choose another folder, or remove that file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(unwritable(place, exc)) from exc
    return replace(run, ledger=file)


def _slo(options: SimulateOptions, graph: GraphDeployment | None) -> SloConfig:
    """Return the latency targets of the manifest, or the defaults, overridden by the options."""
    base = SloConfig() if graph is None else graph.spec.slo
    return base.with_given(ttft_s=options.ttft_slo_s, itl_s=options.itl_slo_s, attainment=options.attainment)


def _routers(
    options: SimulateOptions, graph: GraphDeployment | None
) -> dict[str, tuple[RouterConfig, SimulatedRouters]]:
    groups = _router_groups(options)
    return {
        name if len(groups) == 1 else routers_label(name, count): (_router(options, name, graph), group)
        for name in _policy_names(options, graph)
        for count, group in groups.items()
    }


def run_plan(
    plan: RunPlan,
    *,
    processes: int | None = None,
    on: str | None = None,
    journal: CellJournal | None = None,
    on_done: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Simulate all runs of a plan and return the combined result as plain data; the same plan gives the same result.

    The keys of the result include ``settings`` (of the simulation), ``workload``, ``runs`` (figures of each run), ``summary`` (means over
    the seeds) and ``goodput`` (largest rate with enough requests on time, by policy).

    Args:
        plan: Runs to simulate.
        processes: Number of processes on this machine; None starts one per core.
        on: ``dask`` for a local Dask cluster or ``dask://HOST:PORT`` for an existing one; None uses processes of this machine.
        journal: Journal of finished runs, which are not repeated; None repeats all.
        on_done: Callback that receives the number of finished runs.

    Raises:
        PenstockError: a run failed, or the executor's processes or cluster are gone.
    """
    with open_executor(processes=processes, cells=len(plan.runs), on=on) as executor:
        return _result_of(plan, run_all(figures_of, plan.runs, executor, journal=journal, on_done=on_done))


def _result_of(plan: RunPlan, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the combined result of a plan; ``runs`` are the figures in the order of the plan's runs."""
    first = plan.runs[0]
    workload = prepare(first.workload, seed=first.seed, qps=first.qps)
    router = first.scenario.router.model_copy(update={"policy": "(each)"})
    scenario = replace(first.scenario, router=router)
    if plan.compares_planners:
        scenario = replace(first.scenario, planner=None, max_gpus=None)
    summary = summarise(runs)
    if plan.compares_planners:
        add_regrets(summary)
    return {
        "schema": SCHEMA,
        "notes": [*plan.notes, *beyond_every_fleet(first.scenario, summary)],
        "compares_planners": plan.compares_planners,
        "slo_s": first.scenario.slo.ttft_seconds,
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
        "by_routers": shares_by_routers(summary),
        "goodput": goodputs(runs),
        "runs": runs,
    }


def routers_label(policy: str, count: int) -> str:
    """Return the label of the runs with policy ``policy`` and ``count`` routers, such as ``dualmap, 2 routers``.

    It distinguishes these runs in a comparison of several numbers of routers.
    """
    return f"{policy}, {count} router{'' if count == 1 else 's'}"


def shares_by_routers(summary: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per policy and rate with the fraction of requests on time, 0-1, for each number of routers.

    Returns an empty list unless several numbers of routers were simulated. In each row, ``in_time`` holds the fractions, by the number of
    routers as text. ``behind_best`` is the largest difference, over the numbers of routers, between the best policy's fraction at the same
    rate and this policy's fraction.
    """
    if len({row["router_count"] for row in summary}) < 2:
        return []
    rows: dict[tuple[str, float | None], dict[str, float]] = {}
    best: dict[tuple[float | None, str], float] = {}
    for row in summary:
        count, share = str(row["router_count"]), row["on_time"]
        label = row["label"].replace(routers_label("", row["router_count"]), "")
        rows.setdefault((label, row["qps"]), {})[count] = share
        best[row["qps"], count] = max(best.get((row["qps"], count), 0.0), share)
    return [
        {
            "label": label,
            "qps": qps,
            "in_time": shares,
            "behind_best": round(max(best[qps, count] - share for count, share in shares.items()), 6),
        }
        for (label, qps), shares in rows.items()
    ]


def record(plan: RunPlan) -> dict[str, Recording]:
    """Return one recorded run of each policy, by the policy's label, for charts: the first seed at the last rate.

    These runs are simulated again.
    """
    last = plan.runs[-1].qps
    return {spec.label: simulate(spec)[0] for spec in plan.runs if (spec.qps, spec.seed) == (last, 0)}


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


def _router(options: SimulateOptions, policy: str, graph: GraphDeployment | None) -> RouterConfig:
    """Return the manifest's router section, or one with an unbounded queue, overridden by the options."""
    base = unbounded_router(policy) if graph is None else graph.spec.router
    queue: dict[str, Any] = {
        "order": options.queue_order,
        "worker_tokens": options.slot_tokens,
        "max_requests": options.max_waiting,
        "max_wait_seconds": options.max_wait_s,
    }
    admission = base.admission.model_copy(update=dict(options.admission))
    check_flags(admission, options.admission)
    section: dict[str, Any] = {
        "policy": policy,
        "admission": admission,
        "prefill_queue": base.prefill_queue.model_copy(update=_given(queue)),
    }
    if options.no_rebalance:
        section["dualmap"] = base.dualmap.model_copy(update={"rebalance": False})
    # The manifest's policy parameters are only valid for its own policy.
    parameters = base.policy_parameters if policy == base.policy else None
    return base.model_copy(update={**_given(section), "policy_parameters": parameters})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _router_groups(options: SimulateOptions) -> dict[int, SimulatedRouters]:
    counts = tuple(dict.fromkeys(options.routers))
    if not counts or not all(1 <= count <= MAX_ROUTERS for count in counts):
        shown = ",".join(map(str, options.routers))
        raise ConfigError(f"--routers {shown}: must be numbers from 1 to {MAX_ROUTERS}")
    if options.picker_death and min(counts) == 1:
        raise ConfigError("--picker-death: one router has no successor; give --routers 2 or more")
    return {
        count: SimulatedRouters(
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
        pools = graph_pools(graph)
        roles = [pool.role for pool in pools]
        for role, replicas in given.items():
            if replicas is not None and role not in roles:
                raise ConfigError(
                    f"--{role.value}: {replicas}, but {graph.name} has no {role.value} service; "
                    f"give {' or '.join(f'--{each.value}' for each in roles)}, or leave it out"
                )
        return tuple(
            replace(pool, replicas=given[pool.role] or pool.replicas, model=_model(options, pool.model))
            for pool in pools
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
        # Planners are compared with one router policy, and router policies with one planner.
        single = RouterConfig().policy if graph is None else graph.spec.router.policy
        text = single if len(options.planners) > 1 or ALL in options.planners else ALL
    names = policy_names() if text == ALL else tuple(filter(None, text.split(",")))
    unknown = [name for name in names if name not in policy_names()]
    if unknown or not names:
        meant = did_you_mean(unknown[0], policy_names()) if unknown else ""
        raise ConfigError(f"--policy {text}: choose from {', '.join(policy_names())}, or all{meant}")
    return names


def _label(policy: str, planner: str, policies: Collection[str], planners: Mapping[str, object]) -> str:
    if len(planners) < 2:
        return policy
    return planner if len(policies) < 2 else f"{policy} + {planner}"
