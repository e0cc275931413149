"""The paper's set-up as runs of the simulator, and every choice that the paper leaves open.

Chosen where the paper is ambiguous: prompts above the cap are cut, not dropped; Mooncake's 3 s batches are
spread as Poisson arrivals, drawn again for each seed, and time is then stretched to the rate; hits are weighed by
tokens. A prefill-only server is handed one prompt at a time (`SimpleModel.slot_requests`), an engine what the live router
hands it: prompts while less than one step's tokens of them are in flight. Engines are aggregated, since each of the
paper's instances prefills and decodes on one accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.api import QueueOrder, Role, RouterConfig, SloConfig
from penstock.router.policy.registry import policy_names
from penstock.simulator.scenario import (
    DUALMAP_7B,
    DUALMAP_14B,
    Model,
    PoolSpec,
    ProfiledModel,
    Scenario,
    unbounded_router,
)
from penstock.simulator.sweep import RunSpec
from penstock.simulator.workload import WorkloadSpec

INSTANCES = 8
SLO = SloConfig()
WARMUP = 500
PACKAGED = "mooncake"
PACKAGED_WARMUP = 100
"""The packaged slice has 608 rows: 500 of them would leave too little."""
DEFAULT_ORDER = RouterConfig().prefill_queue.order
A100_7B = ProfiledModel("a100-qwen2.5-7b-bf16-tp1", kv_tokens=1_000_000)
"""The paper's model and cache on an accelerator whose prefill and decode are both known."""
ASCEND_7B = ProfiledModel(str(Path(__file__).with_name("ascend-910b4-qwen2.5-7b.yaml")), kv_tokens=1_000_000)
"""The same at the prefill rate of the paper's own accelerator."""
HOT_SHARES = {"hot_share": 0.0612, "cold_share": 0.02}
"""The artefact's constants in the place of the paper's 2/n and 1/n."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload on one model, with the rates at which it is tried.

    Attributes:
        key: Short name.
        title: For people; says what is synthetic and what is a slice.
        model: The server.
        workload: Requests.
        rates: QPS grid, from comfortable to overloaded for the paper's policies.
        high_rates: Likewise for what serves more than those; empty where ``rates`` cover it.
    """

    key: str
    title: str
    model: Model
    workload: WorkloadSpec
    rates: tuple[float, ...]
    high_rates: tuple[float, ...] = ()


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


def engine_cases(traces: Traces) -> list[Case]:
    """Return the 7B workloads on engines that batch and decode, the paper's architecture."""
    of_traces = {case.key: case for case in cases(traces)}
    chosen = {
        "a100-conversation-7b": ("conversation-7b", A100_7B, "A100 engines", (12.0, 13.0, 13.5, 14.0)),
        "a100-toolagent-7b": ("toolagent-7b", A100_7B, "A100 engines", (26.0, 28.0, 29.0)),
        "ascend-conversation-7b": (
            "conversation-7b",
            ASCEND_7B,
            "engines at the artefact's prefill rate",
            (5.0, 5.5, 6.0),
        ),
    }
    return [
        replace(of_traces[of], key=key, title=f"{of_traces[of].title}, {title}", model=model, rates=rates)
        for key, (of, model, title, rates) in chosen.items()
        if of in of_traces
    ]


def world(model: Model, router: RouterConfig, *, instances: int = INSTANCES) -> Scenario:
    """Return instances of a model behind a router, which hands them as much at a time as they take."""
    pools = (PoolSpec(Role.AGGREGATED, instances, model),)
    return Scenario(pools=pools, router=router, slo=SLO, cold_start_s=0.0)


def router(
    policy: str,
    order: QueueOrder = QueueOrder.HIT_FIRST,
    *,
    rebalance: bool = True,
    **parameters: bool | float | str,
) -> RouterConfig:
    """Return a router section as the artefact has it: queues in the router, longest cached prefix first."""
    return unbounded_router(
        policy,
        prefillQueue={"order": order},
        policyParameters=parameters,
        dualmap={"rebalance": rebalance},
    )


PAIR_COST = router("pair-cost")
"""Ours: DualMap's pair from two blocks on, the cheaper of the two by prefix cost."""


OUTCLASSED = frozenset({"round-robin", "least-loaded", "least-pending", "kv-cost", "cache-affinity"})
"""Below the others on every workload of the comparison, and left out of what asks for more runs."""


def contestants(order: QueueOrder) -> dict[str, RouterConfig]:
    """Return every policy, all with one queue order."""
    return {policy: router(policy, order) for policy in policy_names()}


def comparison(case: Case, seeds: int, *, order: QueueOrder) -> list[RunSpec]:
    """Every policy at every rate; all with the same queue order, so that only the choice differs."""
    return [
        RunSpec(label, world(case.model, spec), case.workload, rate, seed)
        for label, spec in contestants(order).items()
        for rate in case.rates
        for seed in range(seeds)
    ]


def ours(case: Case, seeds: int) -> list[RunSpec]:
    """What this router does by default, alongside DualMap as its artefact has it and the best of the others."""
    by_default = {
        f"{label}, {DEFAULT_ORDER}": spec
        for label, spec in contestants(DEFAULT_ORDER).items()
        if label not in OUTCLASSED
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


ABLATION_RATES = (11.5, 12.0, 12.5, 13.0)
"""Below the knee of the 14B servers under DualMap, there, and beyond."""
ABLATION: Sequence[tuple[str, RouterConfig]] = (
    ("dualmap", router("dualmap")),
    ("- rebalancing", router("dualmap", rebalance=False)),
    ("- tree", router("dualmap", adaptive_prefix=False)),
    ("tree by the artefact's shares", router("dualmap", **HOT_SHARES)),
    ("- hit-first queue: arrival", router("dualmap", QueueOrder.ARRIVAL)),
    ("- hit-first queue: in-time-first", router("dualmap", QueueOrder.IN_TIME_FIRST)),
    ("- SLO-aware: pair affinity", router("dualmap", choice="cache-affinity", rebalance=False)),
    ("- SLO-aware: pair least-loaded", router("dualmap", choice="least-loaded", rebalance=False)),
    ("- SLO-aware: pair min-TTFT", router("dualmap", choice="min-ttft", rebalance=False)),
    ("pair min-TTFT + rebalancing", router("dualmap", choice="min-ttft")),
    ("pair prefix-cost", PAIR_COST),
    (
        "pair prefix-cost, no rebalancing",
        router("dualmap", choice="prefix-cost", start_depth=2, rebalance=False),
    ),
    ("pair prefix-cost, in-time-first", router("pair-cost", QueueOrder.IN_TIME_FIRST)),
    ("all instances, prefix-cost", router("prefix-cost")),
    (
        "all instances, prefix-cost, in-time-first",
        router("prefix-cost", QueueOrder.IN_TIME_FIRST),
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
