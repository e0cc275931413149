"""What the router reads of a worker's /metrics page; the health watch and the lease guard call `read_page`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from penstock_core import metric_names as names
from penstock_core.errors import ObservationError
from penstock_core.exposition import parse_samples
from penstock_core.worker_metrics import WAITING_NAMES, waiting_by_engine
from penstock_wire.client import ConnectionPool, Timeouts

_EXPIRED: Final = names.VLLM_NIXL_EXPIRED + names.COUNTER_SUFFIX
_WANTED: Final = (names.VLLM_KV_USAGE, _EXPIRED, *WAITING_NAMES)


@dataclass(frozen=True, slots=True)
class WorkerPage:
    """One reading.

    Attributes:
        kv_usage_fraction: KV blocks in use, 0-1; None when the page does not say.
        expired_leases: Prompts whose lease ran out before they were read, since the worker's start; None
            when the page does not say.
        waiting_requests: That wait in the worker for room; None when the page does not say.
    """

    kv_usage_fraction: float | None
    expired_leases: float | None
    waiting_requests: float | None


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
    return WorkerPage(
        kv_usage(usage), sum(expired) if expired else None, _requests(waiting_by_engine(samples))
    )


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
