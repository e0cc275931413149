"""What `penstock simulate` takes; a field's help is what the command line says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.api import QueueOrder, Role
from penstock.core.flags import check_bounds, flag
from penstock.planner.decide.policy import policy_names
from penstock.simulator.faults import Faults
from penstock.simulator.planner_choice import DEFAULT_PLANNER
from penstock.simulator.scenario import Resize, WorkerFailure
from penstock.workload.arrivals import Spread
from penstock.workload.selection import OnLong


def _resize(text: str) -> Resize:
    at_s, _, change = text.partition(":")
    role, _, replicas = change.partition("=")
    return Resize(float(at_s), Role(role), int(replicas))


def _failure(text: str) -> WorkerFailure:
    times, _, worker = text.partition(":")
    at_s, _, back_s = times.partition("-")
    return WorkerFailure(float(at_s), worker, float(back_s) if back_s else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The command line's options, by their names; None where not given, ``admission`` without what was not."""

    trace: str = flag(
        "A trace file (Mooncake JSONL or Azure CSV), the packaged `mooncake`, or a synthetic process: "
        "poisson|gamma|bursts|tenants|constant|sine|step|ramp|regimes|day with :KEY=VALUE,… as "
        "poisson:rate=4,count=2000,input_tokens=2048,share=0.5; requests=TRACE takes a trace's prompts.",
        default="mooncake",
    )
    policy: str | None = flag(
        "Router policies to compare, by their names in a manifest.",
        metavar="all|NAME[,NAME…]",
        unset="all; with several planners least-loaded, or the manifest's",
    )
    qps: tuple[float, ...] = flag(
        "Mean rates to try, requests/s.",
        default=(),
        gt=0,
        is_separated=True,
        metavar="RPS[,RPS…]",
        unset="the trace's",
    )
    seeds: int = flag("Runs of each, with seeds 0, 1, …", default=1, ge=1)
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
        f"{', '.join(policy_names())}.",
        name="--planner",
        default=(),
        is_separated=True,
        bare=DEFAULT_PLANNER,
        metavar="[all|NAME[,NAME…]]",
        unset="nothing scales",
    )
    max_gpus: int | None = flag("GPU budget, never exceeded.", ge=1, unset="the planner's, else none")
    cold_start_s: float = flag("From asking for a replica until it serves, virtual seconds.", default=30.0)
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
    slo_s: float | None = flag("TTFT that counts as in time, virtual seconds.", unset="5, or the manifest's")
    itl_slo_s: float | None = flag(
        "Mean gap between a request's tokens that counts as in time, virtual seconds.", gt=0, unset="any"
    )
    tiers: str | None = flag(
        "Let requests ask for priority tiers in these proportions, as premium=20,standard=50,background=30; the "
        "manifest says what the router makes of them.",
        metavar="TIER=WEIGHT[,...]",
        unset="they ask for none",
    )
    propagation_delay_s: float = flag(
        "Age of what routers know beyond what they sent themselves, virtual seconds.", default=0.0
    )
    routers: tuple[int, ...] = flag(
        "Routers side by side, of which one picks the workers for all. Several numbers are compared.",
        default=(1,),
        is_separated=True,
        metavar="N[,N…]",
    )
    pick_delay_s: float = flag(
        "Time that a request of another router takes to the picker and back, virtual seconds.", default=0.0005
    )
    picker_death: tuple[float, ...] = flag(
        "Let the router that picks die at this time, seconds; repeatable, and for two routers or more.",
        default=(),
        metavar="S",
        unset="never",
    )
    queue_order: QueueOrder | None = flag(
        "Of each worker's queue in the router.", unset="in-time-first, or the manifest's"
    )
    no_rebalance: bool = flag("Turn off moving queued requests (dualmap).", default=False)
    slot_tokens: int | None = flag(
        "Prompt tokens handed to one worker at a time; a longer prompt goes alone.",
        ge=1,
        unset="8192, or the manifest's",
    )
    max_waiting: int | None = flag(
        "Requests that may wait in the router; more are rejected.", ge=1, unset="no bound"
    )
    max_wait_s: float | None = flag("Longest wait in the router, virtual seconds.", unset="no bound")
    admission: Mapping[str, Any] = field(default_factory=dict)
    warmup: int = flag("Requests at the beginning that are served but not measured.", default=0, ge=0)
    limit: int | None = flag("Most requests.", ge=1, unset="all")
    max_input_tokens: int | None = flag("Longest prompt, tokens.", ge=1, unset="no limit")
    on_long: OnLong = flag("Cut longer prompts, or leave their requests out.", default=OnLong.TRUNCATE)
    spread: Spread | None = flag(
        "How a batch of equal arrival times is placed in its 3 s.",
        unset="poisson for Mooncake, none for others",
    )

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ConfigError: a number is out of its range; the message names the flag.
        """
        check_bounds(self)
