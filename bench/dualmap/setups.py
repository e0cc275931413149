"""The paper's set-up as runs of the simulator, and every choice that the paper leaves open.

Chosen where the paper is ambiguous: prompts above the cap are cut, not dropped; Mooncake's 3 s batches are
spread as Poisson arrivals, drawn anew for each seed, and time is then stretched to the rate; one request at a
time is handed to an instance; hits are weighed by tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock_api import QueueOrder, Role
from penstock_simulator.routing import policy_names
from penstock_simulator.scenario import (
    DUALMAP_7B,
    DUALMAP_14B,
    PoolSpec,
    Resize,
    RouterSpec,
    Scenario,
    SimpleModel,
)
from penstock_simulator.sweep import RunSpec
from penstock_simulator.workload import WorkloadSpec

INSTANCES = 8
SLO_S = 5.0
WARMUP = 500
PACKAGED = "mooncake"
PACKAGED_WARMUP = 100
"""The packaged slice has 608 rows: 500 of them would leave too little."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload on one model, with the rates at which it is tried.

    Attributes:
        key: Short name.
        title: For people; says what is synthetic and what is a slice.
        model: The server.
        workload: Requests.
        rates: QPS grid, from comfortable to overloaded for the paper's policies.
        high_rates: Likewise for what serves more than those.
    """

    key: str
    title: str
    model: SimpleModel
    workload: WorkloadSpec
    rates: tuple[float, ...]
    high_rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Traces:
    """Paths given on the command line; None where the trace is not at hand."""

    conversation: Path | None
    arxiv: Path | None
    surrogate: Path | None


def cases(traces: Traces) -> list[Case]:
    """Return the workloads that can be run with the traces at hand."""
    source = PACKAGED if traces.conversation is None else str(traces.conversation)
    is_slice = traces.conversation is None
    told = "packaged 608-row slice" if is_slice else "first 4,000"
    limit, warmup = (None, PACKAGED_WARMUP) if is_slice else (4000, WARMUP)
    found = [
        Case(
            "conversation-7b",
            f"Conversation ({told}), 7B",
            DUALMAP_7B,
            WorkloadSpec(source, max_input_tokens=20_480, limit=limit, warmup=warmup),
            (5.0, 5.5, 6.0, 6.5, 7.0),
            (6.0, 6.5, 7.0, 7.5),
        ),
        Case(
            "conversation-14b",
            f"Conversation ({told}), 14B",
            DUALMAP_14B,
            WorkloadSpec(source, max_input_tokens=10_240, limit=limit, warmup=warmup),
            (11.0, 12.0, 13.0, 14.0),
            (12.0, 13.0, 14.0, 15.0),
        ),
    ]
    if traces.arxiv is not None:
        found.append(
            Case(
                "arxiv-7b",
                "arXiv slice (real, first 1,000 rows), 7B",
                DUALMAP_7B,
                WorkloadSpec(str(traces.arxiv), max_input_tokens=20_480, warmup=WARMUP),
                (9.0, 10.0, 11.0, 12.0, 13.0),
                (10.0, 11.0, 12.0, 13.0),
            )
        )
    if traces.surrogate is not None:
        found.append(
            Case(
                "toolagent-7b",
                "Tool&Agent surrogate (SYNTHETIC, first 8,000 rows), 7B",
                DUALMAP_7B,
                WorkloadSpec(str(traces.surrogate), max_input_tokens=20_480, limit=8000, warmup=WARMUP),
                (11.0, 12.0, 13.0),
                (13.0, 14.0, 15.0),
            )
        )
    return found


def world(model: SimpleModel, router: RouterSpec, *, instances: int = INSTANCES) -> Scenario:
    """Return instances of a model behind a router."""
    return Scenario(
        pools=(PoolSpec(Role.AGGREGATED, instances, model),), router=router, slo_s=SLO_S, cold_start_s=0.0
    )


def router(policy: str, **settings: bool | float | str) -> RouterSpec:
    """Return a router as the artefact has it: queues in the router, longest cached prefix first."""
    return RouterSpec(
        policy=policy,
        settings=settings,
        queue_order=QueueOrder.HIT_FIRST,
        slot_requests=DUALMAP_7B.slot_requests,
        slot_tokens=None,
    )


PAIR_COST = router("pair-cost")
"""Ours: DualMap's pair from two blocks on, the cheaper of the two by prefix cost."""


def contestants(order: QueueOrder) -> dict[str, RouterSpec]:
    """Return every policy, all with one queue order."""
    return {policy: replace(router(policy), queue_order=order) for policy in policy_names()}


def comparison(case: Case, seeds: int, *, order: QueueOrder) -> list[RunSpec]:
    """Every policy at every rate; all with the same queue order, so that only the choice differs."""
    return [
        RunSpec(label, world(case.model, spec), case.workload, rate, seed)
        for label, spec in contestants(order).items()
        for rate in case.rates
        for seed in range(seeds)
    ]


def ours(case: Case, seeds: int) -> list[RunSpec]:
    """What this router does by default, beside DualMap as its artefact has it and the best of the others."""
    by_default = {
        f"{label}, in-time-first": spec
        for label, spec in contestants(QueueOrder.IN_TIME_FIRST).items()
        if label in {"prefix-cost", "pair-cost", "dualmap", "preble", "min-ttft"}
    }
    plain = contestants(QueueOrder.ARRIVAL)
    routers = by_default | {
        "dualmap, hit-first": router("dualmap"),
        "prefix-cost, arrival": plain["prefix-cost"],
        "preble, arrival": plain["preble"],
    }
    return [
        RunSpec(label, world(case.model, spec), case.workload, rate, seed)
        for label, spec in routers.items()
        for rate in case.high_rates
        for seed in range(seeds)
    ]


ABLATION: Sequence[tuple[str, RouterSpec]] = (
    ("dualmap", router("dualmap")),
    ("- rebalancing", router("dualmap", rebalance=False)),
    ("- tree", router("dualmap", adaptive_prefix=False)),
    ("- hit-first queue: arrival", replace(router("dualmap"), queue_order=QueueOrder.ARRIVAL)),
    ("- hit-first queue: in-time-first", replace(router("dualmap"), queue_order=QueueOrder.IN_TIME_FIRST)),
    ("- SLO-aware: pair affinity", router("dualmap", choice="cache-affinity", rebalance=False)),
    ("- SLO-aware: pair least-loaded", router("dualmap", choice="least-loaded", rebalance=False)),
    ("- SLO-aware: pair min-TTFT", router("dualmap", choice="min-ttft", rebalance=False)),
    ("pair min-TTFT + rebalancing", router("dualmap", choice="min-ttft")),
    ("pair prefix-cost", PAIR_COST),
    (
        "pair prefix-cost, no rebalancing",
        router("dualmap", choice="prefix-cost", start_depth=2, rebalance=False),
    ),
    ("pair prefix-cost, in-time-first", replace(PAIR_COST, queue_order=QueueOrder.IN_TIME_FIRST)),
    ("all instances, prefix-cost", router("prefix-cost")),
    (
        "all instances, prefix-cost, in-time-first",
        replace(router("prefix-cost"), queue_order=QueueOrder.IN_TIME_FIRST),
    ),
)
"""The paper's five configurations and more; ``choice`` replaces the SLO-aware rule within the pair."""


def ablation(case: Case, seeds: int, rates: Sequence[float]) -> list[RunSpec]:
    """Each technique off, one at a time."""
    return [
        RunSpec(label, world(case.model, spec), case.workload, rate, seed)
        for label, spec in ABLATION
        for rate in rates
        for seed in range(seeds)
    ]


def elasticity(case: Case, seeds: int, routers: Mapping[str, RouterSpec]) -> list[RunSpec]:
    """4 to 8 instances at 74 s under QPS 4, and 8 to 4, one each 60 s from 1,809 s, under QPS 2."""
    up = (Resize(74.0, Role.AGGREGATED, 8),)
    down = tuple(Resize(1809.0 + 60.0 * step, Role.AGGREGATED, 7 - step) for step in range(4))
    runs = []
    for policy, spec in routers.items():
        for label, start, resizes, rate in (("4 to 8", 4, up, 4.0), ("8 to 4", 8, down, 2.0)):
            scenario = replace(world(case.model, spec, instances=start), resizes=resizes)
            workload = replace(case.workload, warmup=0)
            runs += [RunSpec(f"{policy}, {label}", scenario, workload, rate, seed) for seed in range(seeds)]
    return runs


def scaling(case: Case, seeds: int, sizes: Sequence[int], routers: Mapping[str, RouterSpec]) -> list[RunSpec]:
    """More instances under proportionally more requests: copies of the population side by side."""
    runs = []
    for size in sizes:
        copies = size // INSTANCES
        workload = replace(case.workload, copies=copies)
        for policy, spec in routers.items():
            scenario = world(case.model, spec, instances=size)
            runs += [
                RunSpec(f"{policy} x{size}", scenario, workload, rate * copies, seed)
                for rate in case.rates
                for seed in range(seeds)
            ]
    return runs


def staleness(
    case: Case,
    seeds: int,
    rate: float,
    *,
    fleets: Sequence[tuple[int, float]],
    routers: Mapping[str, RouterSpec],
) -> list[RunSpec]:
    """Routers side by side that know of each other's requests late, and of each other's caches never.

    Args:
        case: Workload and model.
        seeds: Runs of each.
        rate: QPS.
        fleets: (routers, age of news in seconds).
        routers: Policies by label.
    """
    return [
        RunSpec(
            f"{policy}|{count}|{delay:g}",
            world(case.model, replace(spec, routers=count, propagation_delay_s=delay)),
            case.workload,
            rate,
            seed,
        )
        for policy, spec in routers.items()
        for count, delay in fleets
        for seed in range(seeds)
    ]


def lighter(case: Case) -> Case:
    """Return the case with fewer requests and rates, for clusters of many instances."""
    limit = case.workload.limit
    workload = replace(case.workload, limit=None if limit is None else limit // 2)
    return replace(case, workload=workload, rates=case.rates[1:4])
