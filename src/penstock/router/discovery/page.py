"""What the router reads of a worker's /metrics page; the health watch and the lease guard call `read_page`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from penstock.core import metric_names as names
from penstock.core.engine_progress import PROGRESS_NAMES, EngineReading, read_engine
from penstock.core.errors import ObservationError
from penstock.core.exposition import Sample, parse_samples
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.worker_metrics import WAITING_NAMES, waiting_by_engine

_NUMBER: Final = re.compile(r"[1-9][0-9]{0,11}")
_EXPIRED: Final = names.VLLM_NIXL_EXPIRED + names.COUNTER_SUFFIX
_WANTED: Final = (names.VLLM_CACHE_CONFIG_INFO, _EXPIRED, *WAITING_NAMES, *PROGRESS_NAMES)


@dataclass(frozen=True, slots=True)
class WorkerPage:
    """One reading.

    Attributes:
        kv_usage_fraction: KV blocks in use, 0-1; None when the page does not say.
        expired_leases: Prompts whose lease ran out before they were read, since the worker's start; None
            when the page does not say.
        engine: Whether it gets on.
        waiting_requests: That wait in the worker for room; None when the page does not say.
        kv_ranks: KV blocks in use of each data-parallel rank, 0-1; empty when the page does not say.
        kv_total_blocks: KV blocks of all ranks together; None when the page does not say.
        kv_capacity_tokens: Tokens that these hold; None when the page does not say.
    """

    kv_usage_fraction: float | None
    expired_leases: float | None
    waiting_requests: float | None
    engine: EngineReading
    kv_ranks: tuple[float, ...] = ()
    kv_total_blocks: int | None = None
    kv_capacity_tokens: int | None = None


async def read_page(pool: ConnectionPool, url: str, timeouts: Timeouts) -> WorkerPage:
    """Fetch and read the page of the worker at ``url``.

    Raises:
        UpstreamError: no whole answer came.
        ObservationError: the page is not served, or cannot be parsed.
    """
    response = await pool.request("GET", url + "/metrics", timeouts=timeouts)
    if response.status != 200:
        raise ObservationError(f"{url}/metrics answered {response.status}; a page needs 200")
    samples = parse_samples(response.body.decode("utf-8", "replace"), _WANTED)
    usage = [sample.value for sample in samples if sample.name == names.VLLM_KV_USAGE]
    expired = [sample.value for sample in samples if sample.name == _EXPIRED]
    mean = kv_usage(usage)
    ranks = tuple(usage) if mean is not None else ()
    blocks, tokens = _kv_size(samples, ranks=max(1, len(ranks)))
    return WorkerPage(
        mean,
        sum(expired) if expired else None,
        _requests(waiting_by_engine(samples)),
        read_engine(samples),
        ranks,
        blocks,
        tokens,
    )


def _kv_size(samples: list[Sample], *, ranks: int) -> tuple[int | None, int | None]:
    """Return a worker's KV blocks and the tokens that they hold; None where its page does not say for each rank."""
    blocks = tokens = told = 0
    for sample in samples:
        if sample.name != names.VLLM_CACHE_CONFIG_INFO:
            continue
        count, size = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
        if _NUMBER.fullmatch(count) and _NUMBER.fullmatch(size):
            told += 1
            blocks += int(count)
            tokens += int(count) * int(size)
    return (blocks, tokens) if told == ranks else (None, None)


def _requests(values: list[float]) -> float | None:
    """Return the sum over a worker's ranks, or None if one is no number of requests."""
    if not values or not all(math.isfinite(value) and value >= 0 for value in values):
        return None
    return sum(values)


def kv_usage(values: list[float]) -> float | None:
    """Return a worker's KV usage from its ranks' gauges: their mean, or None if one is no fraction.

    NaN, infinities and values outside 0-1 are a fault of the page; half of a worker is no reading.
    """
    if not values or not all(math.isfinite(value) and 0 <= value <= 1 for value in values):
        return None
    return sum(values) / len(values)
