"""What a million leases cost: renewal of a batch, reaping, memory; alongside a scan of all leases, as vLLM 0.32 reaps.

Times are processor time of this thread, since the machine may have other work.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from penstock.engine.core.lease import LeaseTable

BATCH = 1000
REPEATS = 200
FIRST_END_S = 30.0
ENGINES = 10
"""Decode engines whose prompts arrive in turn, so that a batch is every tenth prompt of a stretch of time."""


@dataclass(frozen=True, slots=True)
class TableCost:
    """Costs at one size; real time on this machine.

    Attributes:
        leases: How many.
        renewal_ms: Of a batch of `BATCH`, one of `ENGINES` decode engines': median and 99th percentile.
        scattered_ms: Of a batch drawn from all leases alike, which finds nothing in the processor's caches: the same.
        look_us: One look for expired leases while none is, after each batch renewed: median.
        scan_us: The same look by scanning every lease: median.
        reap_us: Per lease, all of them expiring in slices of a hundredth, renewed ones among them.
        bytes_per_lease: Of the table alone; ids are the requests' own.
    """

    leases: int
    renewal_ms: tuple[float, float]
    scattered_ms: tuple[float, float]
    look_us: float
    scan_us: float
    reap_us: float
    bytes_per_lease: float


def measure(leases: int) -> TableCost:
    """Fill a table and measure it; grants come in order of time, over 20 s."""
    ids = [f"cmpl-{number:032x}-{number:08x}" for number in range(leases)]
    gc.collect()
    tracemalloc.start()
    table = LeaseTable()
    for number, request_id in enumerate(ids):
        table.grant(request_id, FIRST_END_S + 20.0 * number / leases)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    draw = random.Random(0)
    stretch = BATCH * ENGINES
    starts = [draw.randrange(max(1, leases - stretch + 1)) for _ in range(REPEATS)]
    renewal_ms, looks = _renew(table, (ids[at : at + stretch : ENGINES] for at in starts), 55.0)
    scattered_ms, _ = _renew(table, (draw.sample(ids, BATCH) for _ in range(REPEATS)), 56.0)
    flat = dict.fromkeys(ids, 50.0)
    scans = [_seconds(partial(_scan, flat, FIRST_END_S - 1)) for _ in range(5)]
    del flat
    expired = 0
    started = time.thread_time()
    for slice_number in range(1, 101):
        expired += len(table.expire(FIRST_END_S + 30.0 * slice_number / 100))
    reap_s = time.thread_time() - started
    if expired != leases:
        raise AssertionError(f"{expired} of {leases} leases expired")
    return TableCost(
        leases,
        renewal_ms,
        scattered_ms,
        sorted(looks)[REPEATS // 2] * 1e6,
        sorted(scans)[2] * 1e6,
        reap_s / leases * 1e6,
        size / leases,
    )


def _renew(
    table: LeaseTable, batches: Iterable[list[str]], until_s: float
) -> tuple[tuple[float, float], list[float]]:
    """Return median and 99th percentile of the renewals, ms, and the looks for expired leases after each, s."""
    renewals, looks = [], []
    for batch in batches:
        renewals.append(_seconds(partial(table.extend, batch, until_s)))
        looks.append(_seconds(partial(table.expire, FIRST_END_S - 1)))
    renewals.sort()
    return (renewals[REPEATS // 2] * 1e3, renewals[int(REPEATS * 0.99)] * 1e3), looks


def _scan(expiries: dict[str, float], now_s: float) -> list[str]:
    return [request_id for request_id, end_s in expiries.items() if end_s <= now_s]


def _seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started
