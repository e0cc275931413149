"""One load run from configuration to summary: the body of `penstock load`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.flags import check_bounds, flag, time_scale
from penstock.core.http.client import ConnectionPool
from penstock.workload.arrivals import (
    Selection,
    Spread,
    TierMix,
    mean_rate,
    parse_mix,
    rescale,
    select,
    spread,
    with_tiers,
)
from penstock.workload.exchange import Destination
from penstock.workload.probe import check_speed, find_model
from penstock.workload.prompts import PromptMaker
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.replay import Replayer
from penstock.workload.results import SCHEMA, ResultWriter
from penstock.workload.statistics import summarise
from penstock.workload.synthetic import read_source
from penstock.workload.traces import (
    BLOCK_TOKENS_HELP,
    BLOCK_TOKENS_UNSET,
    OnBadRow,
    Trace,
    TraceRequest,
)

OVERLOAD_FLAG = "--overload"
_REQUESTS_PER_SLOT = 4
"""Chosen: each slot of the loop serves four requests, so that the middle eight tenths see a full server."""
_LEAST_ANSWERS = 20
"""Chosen: fewer give no rate worth multiplying."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a probe found."""

    rps: float
    concurrency: int
    requests: int


def parse_overload(text: str) -> float:
    """Return the factor that ``3x`` or ``3`` stands for."""
    try:
        factor = float(text.strip().removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 1000:
        raise ConfigError(f"{OVERLOAD_FLAG} {text}: must be a factor above 0 and at most 1000, as 3x")
    return factor


async def measure_capacity(
    pool: ConnectionPool,
    clock: SimulatedClock,
    destination: Destination,
    requests: Sequence[TraceRequest],
    *,
    seed: int,
    concurrency: int,
    stop: asyncio.Event,
) -> Capacity:
    """Keep ``concurrency`` requests in flight for a while and return how many were answered per second."""
    count = concurrency * _REQUESTS_PER_SLOT
    sample = [
        replace(requests[at % len(requests)], arrival_s=0.0, line=at + 1, tier=None) for at in range(count)
    ]
    results: list[RequestResult] = []
    replayer = Replayer(
        pool,
        clock,
        destination,
        PromptMaker(seed),
        run_id="capacity",
        concurrency=concurrency,
        resends_rejected=True,
        on_result=results.append,
    )
    await replayer.run(sample, stop=stop)
    ends = sorted(each.ended_s for each in results if each.status is RequestStatus.OK)
    first, last = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    if len(ends) < _LEAST_ANSWERS or ends[last] <= ends[first]:
        raise PenstockError(
            f"{OVERLOAD_FLAG}: capacity is unknown: {len(ends)} of {count} requests were answered; look at the"
            " server, or give --rate"
        )
    return Capacity((last - first) / (ends[last] - ends[first]), concurrency, count)


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Everything a user can choose about a load run; the help of its fields is the command line's.

    The speed is the servers' own, and ``overload`` excludes rates and concurrency.
    """

    trace: str = flag(
        "A trace file (JSON lines as Mooncake's, AIPerf's or Bailian's; CSV as Azure's, BurstGPT's, splitwise-sim's or ServeGen's), the "
        "built-in `mooncake`, or a synthetic process as of `penstock simulate`."
    )
    destination: Destination = field(default_factory=Destination)
    speed: float = time_scale(more="; give the servers' own")
    output_dir: Path | None = flag(
        "Folder for results.jsonl and summary.json.", path="folder", unset="nothing is written"
    )
    selection: Selection = field(default_factory=Selection)
    seed: int = flag("Seed of sampling, Poisson spreading and prompt texts.", default=0)
    on_bad_row: OnBadRow = flag(
        "What to do with rows that cannot be read; skipped ones are listed in the summary.",
        default=OnBadRow.REFUSE,
    )
    block_tokens: int | None = flag(BLOCK_TOKENS_HELP, ge=1, unset=BLOCK_TOKENS_UNSET)
    spread: Spread | None = flag(
        "How a batch of equal arrival times is placed in its 3 s.",
        unset="even for a trace of batches, as Mooncake's, else none",
    )
    rate_rps: float | None = flag(
        "Mean arrivals per simulated second, by stretching time.",
        name="--rate",
        gt=0,
        metavar="RPS",
        unset="the trace's",
    )
    rate_scale: float | None = flag("Factor on the arrival rate, instead of --rate.", gt=0, unset="1")
    overload: float | None = flag(
        "Offer this multiple of the server's capacity, as 3x: first a closed loop of the same requests measures how "
        "many it answers per second, then the trace is replayed at the factor times that rate.",
        metavar="FACTOR",
        convert=parse_overload,
        form="a factor, as 3x",
        unset="the trace's rate",
    )
    capacity_concurrency: int = flag(
        "Requests in flight while --overload measures the capacity; four times as many are sent.",
        default=128,
        ge=1,
        le=10_000,
    )
    tiers: TierMix | None = flag(
        "Let requests ask for priority tiers in these proportions, as premium=20,standard=50,background=30.",
        metavar="TIER=WEIGHT[,...]",
        convert=parse_mix,
        unset="they ask for none",
    )
    concurrency: int | None = flag(
        "Maximum number of requests in flight; closes the loop.", ge=1, unset="open loop"
    )
    with_gaps: bool = flag(
        "Leave the inter-token gaps out of results.jsonl; the summary keeps their percentiles.",
        name="--no-itl",
        default=True,
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        others = {"--rate": self.rate_rps, "--rate-scale": self.rate_scale, "--concurrency": self.concurrency}
        given = [flag for flag, value in others.items() if value is not None]
        if self.overload is not None and given:
            raise ConfigError(f"{OVERLOAD_FLAG}: sets the load, as {given[0]} does; give one")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What will be sent."""

    config: LoadConfig
    trace: Trace
    requests: tuple[TraceRequest, ...]
    truncated: int
    dropped: int
    spread: Spread
    rate_factor: float


def plan_load(config: LoadConfig) -> LoadPlan:
    """Read the trace and shape it: spread, then select, then scale the rate."""
    trace = read_source(
        config.trace, on_bad_row=config.on_bad_row, block_tokens=config.block_tokens, seed=config.seed
    )
    default = Spread.EVEN if trace.is_batched else Spread.NONE
    how = default if config.spread is None else config.spread
    placed = spread(trace.requests, how, rng=np.random.default_rng(config.seed))
    selected, truncated, dropped = select(placed, config.selection, seed=config.seed)
    scaled, factor = rescale(selected, rate_rps=config.rate_rps, rate_scale=config.rate_scale)
    shaped = tuple(with_tiers(scaled, config.tiers, seed=config.seed))
    return LoadPlan(config, trace, shaped, truncated, dropped, how, factor)


def describe_plan(plan: LoadPlan) -> dict[str, Any]:
    """Return the planned requests as JSON: settings without the model, and the shaped trace."""
    return {"settings": _settings(plan, plan.config.destination.model), "trace": _trace(plan)}


async def run_load(
    plan: LoadPlan, *, stop: asyncio.Event, on_start: Callable[[Replayer], None] | None = None
) -> dict[str, Any]:
    """Replay a plan and return its summary, which is also written when there is an output directory."""
    config = plan.config
    clock = SimulatedClock(config.speed)
    pool = ConnectionPool()
    try:
        destination = await find_model(pool, config.destination)
        await check_speed(pool, destination, speed=config.speed)
        plan, capacity = await _overloaded(plan, pool, clock, destination, stop)
        with ResultWriter(config.output_dir, with_gaps=config.with_gaps) as writer:
            replayer = Replayer(
                pool,
                clock,
                destination,
                PromptMaker(config.seed),
                run_id=f"load-{time.time():.0f}",
                concurrency=config.concurrency,
                on_result=writer.write,
            )
            if on_start is not None:
                on_start(replayer)
            await replayer.run(plan.requests, stop=stop)
            summary = _summary(plan, replayer, writer.results, model=destination.model)
            if capacity is not None:
                summary["overload"] = {"factor": config.overload, "capacity": asdict(capacity)}
            writer.finish(summary)
    finally:
        await pool.close()
    return summary


async def _overloaded(
    plan: LoadPlan, pool: ConnectionPool, clock: SimulatedClock, destination: Destination, stop: asyncio.Event
) -> tuple[LoadPlan, Capacity | None]:
    """Return the plan at the requested multiple of capacity, and the capacity; unchanged without one."""
    config, requests = plan.config, plan.requests
    if config.overload is None:
        return plan, None
    capacity = await measure_capacity(
        pool,
        clock,
        destination,
        requests,
        seed=config.seed + 1,
        concurrency=config.capacity_concurrency,
        stop=stop,
    )
    scaled, factor = rescale(requests, rate_rps=config.overload * capacity.rps)
    return replace(plan, requests=tuple(scaled), rate_factor=factor), capacity


def _summary(
    plan: LoadPlan, replayer: Replayer, results: list[RequestResult], *, model: str | None
) -> dict[str, Any]:
    seen = replayer.snapshot()
    measured = summarise(
        results,
        duration_s=replayer.duration_s,
        speed=plan.config.speed,
        schedule_lag=replayer.schedule_lag,
    )
    not_sent, broken = seen.planned - seen.sent, replayer.broken_streams.found
    measured["requests"] = {
        "planned": seen.planned,
        "sent": seen.sent,
        **measured["requests"],
        "unfinished": replayer.unfinished,
        "not_sent": not_sent,
    }
    return {
        "schema": SCHEMA,
        "is_partial": bool(not_sent or replayer.unfinished),
        "started": {"unix_s": round(replayer.zero_unix_s, 3), "model_s": round(replayer.zero_s, 6)},
        **measured,
        "broken_streams": None if broken is None else asdict(broken),
        "settings": _settings(plan, model),
        "trace": _trace(plan),
    }


def _settings(plan: LoadPlan, model: str | None) -> dict[str, Any]:
    config, destination = plan.config, plan.config.destination
    return {
        "url": destination.url,
        "model": model,
        "endpoint": destination.endpoint.value,
        "speed": config.speed,
        "seed": config.seed,
        "loop": "open" if config.concurrency is None else "closed",
        "concurrency": config.concurrency,
        "timeout_s": destination.timeout_s,
        "spread": plan.spread.value,
        "rate_factor": round(plan.rate_factor, 6),
        "tiers": None
        if config.tiers is None
        else {tier.value: weight for tier, weight in config.tiers.items()},
        **asdict(config.selection),
    }


def _trace(plan: LoadPlan) -> dict[str, Any]:
    requests = plan.requests
    rate = mean_rate(requests)
    return {
        "name": plan.trace.name,
        "title": plan.trace.title or f"Trace {Path(plan.trace.name).name}",
        "format": plan.trace.format.value,
        "has_block_ids": any(request.block_ids is not None for request in requests),
        "sha256": plan.trace.sha256,
        "rows": len(plan.trace.requests) + len(plan.trace.skipped),
        "skipped_rows": [f"line {line}: {reason}" for line, reason in plan.trace.skipped.items()],
        "truncated_prompts": plan.truncated,
        "dropped_prompts": plan.dropped,
        "mean_rate_rps": None if rate is None else round(rate, 6),
        "span_s": round(requests[-1].arrival_s, 6),
        "input_tokens": sum(request.input_tokens for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
    }
