"""Reads each worker's own /metrics by vLLM's names."""

from __future__ import annotations

import asyncio

from penstock.core import metric_names as names
from penstock.core.errors import ObservationError
from penstock.core.exposition import parse_samples
from penstock.core.worker_metrics import WAITING_NAMES, waiting_by_engine
from penstock.planner.decide.reading import Reading, assess, missing
from penstock.planner.sources.base import Query, Readings, in_short, total_of
from penstock.planner.sources.pages import MetricsPages
from penstock.planner.targets.base import Endpoint

MAX_CONCURRENT = 64
"""Chosen: pages fetched at once; a thousand workers take 16 rounds of milliseconds."""


class ScrapeSource:
    """The workers of one graph."""

    name = "scrape"
    counts_demand = False

    def __init__(self, pages: MetricsPages) -> None:
        self._pages = pages
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def read(self, query: Query) -> Readings:
        """Return what the workers say of themselves; one that does not answer is missing, with its reason.

        The queue is known only if every prefill worker's is. The demand is not known: workers see neither what
        the router holds back nor what it refuses.
        """
        workers = (*query.kv_workers, *query.prefill_workers)
        found = dict(
            zip(
                (worker.name for worker in workers),
                await asyncio.gather(*(self._read(worker, query.max_age_s) for worker in workers)),
                strict=True,
            )
        )
        queues = {worker.name: found[worker.name][1] for worker in query.prefill_workers}
        unknown = [f"{name}: {reading.why}" for name, reading in queues.items() if not reading.is_known]
        if unknown or not queues:
            queue = missing("; ".join(unknown[:3]) or "no ready prefill worker", source=self.name)
        else:
            queue = total_of(list(queues.values()))
        return Readings(
            {worker.name: found[worker.name][0] for worker in query.kv_workers},
            queue,
            queue_is_complete=False,
            worker_waiting={worker.name: found[worker.name][1] for worker in query.kv_workers},
        )

    async def _read(self, worker: Endpoint, max_age_s: float) -> tuple[Reading, Reading]:
        """Return the KV usage and the waiting requests of one worker."""
        try:
            async with self._slots:
                page = await self._pages.fetch(worker.url)
            samples = parse_samples(page, [names.VLLM_KV_USAGE, *WAITING_NAMES])
        except ObservationError as exc:
            gone = missing(in_short(exc), source=self.name)
            return gone, gone
        # One page holds one series per engine of a data-parallel worker.
        usage = [sample.value for sample in samples if sample.name == names.VLLM_KV_USAGE]
        waiting = waiting_by_engine(samples)
        kv = assess(
            sum(usage) / len(usage) if usage else None,
            age_s=0.0,
            max_age_s=max_age_s,
            source=self.name,
            upper=1.0,
        )
        if not waiting:
            return kv, missing(f"{names.VLLM_WAITING} not reported", source=self.name)
        return kv, assess(sum(waiting), age_s=0.0, max_age_s=max_age_s, source=self.name)
