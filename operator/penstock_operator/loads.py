"""Reads the remaining load of pods from their own metrics endpoints; done only while something drains.

The load of a pod that does not answer, or whose page lacks a series, is unknown. Unknown does not count as idle.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from penstock.api import Role
from penstock.api.runtimes import all_metric_names, request_gauges
from penstock.core.errors import ObservationError, SaturatedError, UpstreamError
from penstock.core.exposition import parse_samples
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.metric_names import (
    ROUTER_DECODE_QUEUE_REQUESTS,
    ROUTER_QUEUE_REQUESTS,
    ROUTER_WORKER_INFLIGHT_REQUESTS,
    VLLM_KV_USAGE,
    VLLM_RUNNING,
    VLLM_WAITING,
)
from penstock.core.ports import WORKER_PORT
from penstock.core.worker_metrics import worker_samples
from penstock_operator.plan.drain import PodLoad
from penstock_operator.plan.pods import PodView

PARALLEL: Final = 32
"""Maximum number of metrics pages read at the same time. Chosen: a hundred draining workers take four rounds of some
milliseconds."""

TIMEOUTS: Final = Timeouts(connect_s=1.0, first_byte_s=2.0, idle_s=2.0, total_s=3.0)
"""Timeouts in wall-clock seconds. Chosen: an overloaded worker answers within tenths of a second, and a longer wait
would delay the entire graph."""

_SERIES: Final = (VLLM_RUNNING, VLLM_WAITING, VLLM_KV_USAGE)
_OF_ROUTERS: Final = (ROUTER_QUEUE_REQUESTS, ROUTER_DECODE_QUEUE_REQUESTS, ROUTER_WORKER_INFLIGHT_REQUESTS)

FORGET_S: Final = 60.0
"""Seconds without a reading after which a pod's idle time starts again at zero; wall-clock time, chosen."""


class MetricsReader:
    """Reads the load gauges of pods from their metrics port, and tracks how long each pod has been idle.

    It reads vLLM's gauges, the router's, and the gauges of runtimes that count requests themselves. Idle times are
    wall-clock seconds.
    """

    def __init__(self, pool: ConnectionPool, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._now_s = now_s
        self._slots = asyncio.Semaphore(PARALLEL)
        self._idle_since: dict[str, tuple[float, float]] = {}

    async def read(self, pods: Sequence[PodView]) -> dict[str, PodLoad | None]:
        """Return the load (requests, KV cache usage) of each pod, by pod name.

        The value is None for a pod that does not answer, or whose metrics lack a needed value.
        """
        loads = await asyncio.gather(*map(self._load, pods))
        now_s = self._now_s()
        self._idle_since = {u: each for u, each in self._idle_since.items() if now_s - each[1] < FORGET_S}
        return {pod.name: load for pod, load in zip(pods, loads, strict=True)}

    async def _load(self, pod: PodView) -> PodLoad | None:
        uid = pod.uid
        page = await self._page(pod) if pod.ip else None
        found = None if page is None else load_of(page, is_router=pod.role == Role.ROUTER)
        if found is None:
            self._idle_since.pop(uid, None)
            return None
        now_s = self._now_s()
        load = replace(found, keeps_leases=pod.role != Role.DECODE)  # a router reports no KV
        if not load.is_idle:
            self._idle_since.pop(uid, None)
            return load
        first_s = self._idle_since.get(uid, (now_s, now_s))[0]
        self._idle_since[uid] = (first_s, now_s)
        return replace(load, idle_s=now_s - first_s)

    async def _page(self, pod: PodView) -> str | None:
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        try:
            async with self._slots:
                url = f"{pod.scheme}://{host}:{WORKER_PORT}{pod.metrics_path}"
                answer = await self._pool.request("GET", url, timeouts=TIMEOUTS)
        except (UpstreamError, SaturatedError):
            return None
        return answer.body.decode("utf-8", errors="replace") if answer.status == 200 else None


def load_of(page: str, *, is_router: bool = False) -> PodLoad | None:
    """Return a pod's load according to its metrics page: requests summed over engines, and the maximum KV cache usage.

    Returns None if the page lacks a needed series (metric), or if a value is negative or not finite. The workers of
    some runtimes count requests themselves, including those that the engine has not received yet. If they do, the page
    may lack vLLM's gauges.

    Args:
        page: Text of the metrics page in the Prometheus format.
        is_router: Whether the pod is a router, which has other gauges than a worker.
    """
    try:
        wanted = _OF_ROUTERS if is_router else (*_SERIES, *request_gauges())
        samples = (
            parse_samples(page, wanted) if is_router else worker_samples(page, wanted, *all_metric_names())
        )
    except ObservationError:
        return None
    found = {name: [each.value for each in samples if each.name == name] for name in wanted}
    if not all(math.isfinite(each) and each >= 0 for values in found.values() for each in values):
        return None
    if is_router:
        waiting = int(sum(found[ROUTER_QUEUE_REQUESTS]) + sum(found[ROUTER_DECODE_QUEUE_REQUESTS]))
        running = int(sum(found[ROUTER_WORKER_INFLIGHT_REQUESTS]))
        return PodLoad(running, waiting, None) if found[ROUTER_QUEUE_REQUESTS] else None
    running, waiting = int(sum(found[VLLM_RUNNING])), int(sum(found[VLLM_WAITING]))
    kv_usage_fraction = max(found[VLLM_KV_USAGE], default=None)
    counted = [value for gauge in request_gauges() for value in found[gauge]]
    if counted:
        running = max(running, int(sum(counted)) - waiting)
    elif not (found[VLLM_RUNNING] and found[VLLM_WAITING] and found[VLLM_KV_USAGE]):
        return None
    return PodLoad(running=running, waiting=waiting, kv_usage_fraction=kv_usage_fraction)
