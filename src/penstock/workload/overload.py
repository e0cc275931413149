"""Measures what a server can serve, so that a replay can offer a multiple of it.

Capacity is the rate at which a closed loop of the plan's own requests is answered in full while a fixed number of them
is in flight; one that a busy server rejects is sent again. It is the capacity for these prompts, at this concurrency;
the first and the last tenth of the answers are left out, in which the server fills and empties.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.http.client import ConnectionPool
from penstock.workload.exchange import SendSettings
from penstock.workload.prompts import PromptMaker
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.replay import Replayer
from penstock.workload.traces import TraceRequest

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
    sending: SendSettings,
    requests: Sequence[TraceRequest],
    *,
    seed: int,
    concurrency: int,
    stop: asyncio.Event,
) -> Capacity:
    """Keep ``concurrency`` requests in flight for a while and return how many were answered per second.

    Raises:
        PenstockError: too few answers came to tell a rate.
    """
    count = concurrency * _REQUESTS_PER_SLOT
    sample = [
        replace(requests[at % len(requests)], arrival_s=0.0, line=at + 1, tier=None) for at in range(count)
    ]
    results: list[RequestResult] = []
    replayer = Replayer(
        pool,
        clock,
        sending,
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
