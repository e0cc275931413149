"""Reads each worker's own /metrics by vLLM's names."""

from __future__ import annotations

import asyncio

from penstock_core import metric_names as names
from penstock_core.errors import ObservationError
from penstock_core.exposition import parse_samples
from penstock_planner.decide.reading import Reading, judge, missing
from penstock_planner.sources.base import Query, Readings, fetch_page, in_short
from penstock_planner.targets.base import Endpoint
from penstock_wire.client import ConnectionPool

MAX_CONCURRENT = 64
"""Chosen: pages fetched at once; a thousand workers take 16 rounds of milliseconds."""


class ScrapeSource:
    """The workers of one graph."""

    name = "scrape"

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def read(self, query: Query) -> Readings:
        """Return the workers' own words; one that does not answer is missing, with its reason.

        The queue is known only if every prefill worker's is.
        """
        kv_workers, prefill_workers = query.kv_workers, query.prefill_workers
        async with asyncio.TaskGroup() as group:
            kv = {w.name: group.create_task(self._kv(w, query.max_age_s)) for w in kv_workers}
            queues = {w.name: group.create_task(self._waiting(w)) for w in prefill_workers}
        waiting = {name: task.result() for name, task in queues.items()}
        flaws = [f"{name}: {value}" for name, value in waiting.items() if isinstance(value, str)]
        if flaws or not waiting:
            queue = missing("; ".join(flaws[:3]) or "no ready prefill worker", source=self.name)
        else:
            total = sum(value for value in waiting.values() if not isinstance(value, str))
            queue = judge(total, age_s=0.0, max_age_s=query.max_age_s, source=self.name)
        return Readings({name: task.result() for name, task in kv.items()}, queue, queue_is_whole=False)

    async def _kv(self, worker: Endpoint, max_age_s: float) -> Reading:
        try:
            async with self._slots:
                page = await fetch_page(self._pool, worker.url + "/metrics")
            # One page holds one series per engine of a data-parallel worker.
            values = [s.value for s in parse_samples(page, [names.VLLM_KV_USAGE])]
        except ObservationError as exc:
            return missing(in_short(exc), source=self.name)
        mean = sum(values) / len(values) if values else None
        return judge(mean, age_s=0.0, max_age_s=max_age_s, source=self.name, upper=1.0)

    async def _waiting(self, worker: Endpoint) -> float | str:
        """Return the worker's waiting requests, or why they are unknown."""
        try:
            async with self._slots:
                page = await fetch_page(self._pool, worker.url + "/metrics")
            samples = parse_samples(page, [names.VLLM_WAITING, names.VLLM_WAITING_BY_REASON])
        except ObservationError as exc:
            return in_short(exc)
        # `deferred` requests wait for a transfer, not for capacity; older workers do not tell them apart.
        values = [
            s.value
            for s in samples
            if s.name == names.VLLM_WAITING_BY_REASON and s.labels.get("reason") == "capacity"
        ] or [s.value for s in samples if s.name == names.VLLM_WAITING]
        if not values:
            return f"{names.VLLM_WAITING} not reported"
        flaw = judge(sum(values), age_s=0.0, max_age_s=0.0, source=self.name)
        return sum(values) if flaw.is_known else flaw.why
