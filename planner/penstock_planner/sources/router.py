"""Reads the router's /metrics: its own prefill queue, and each worker's KV usage with its age."""

from __future__ import annotations

import math

from penstock_core import metric_names as names
from penstock_core.exposition import Sample, parse_samples
from penstock_planner.decide.reading import judge, missing
from penstock_planner.sources.base import Buckets, Query, Readings, fetch_page
from penstock_wire.client import ConnectionPool

_LATENCIES = {"ttft": names.ROUTER_TTFT, "itl": names.ROUTER_ITL}
_WANTED = (
    names.ROUTER_QUEUE_REQUESTS,
    names.ROUTER_WORKER_KV_USAGE,
    names.ROUTER_WORKER_METRICS_AGE,
    *(f"{name}_bucket" for name in _LATENCIES.values()),
)


class RouterSource:
    """One router; its URL may come late, because the backend starts it."""

    name = "router"

    def __init__(self, pool: ConnectionPool, url: str) -> None:
        self._pool = pool
        self._url = url.rstrip("/") + "/metrics"

    async def read(self, query: Query) -> Readings:
        """Return the router's view; a worker it cannot reach is missing, an old value stale.

        Raises:
            ObservationError: the router does not answer or its page cannot be read.
        """
        samples = parse_samples(await fetch_page(self._pool, self._url), _WANTED)
        kv = _by_worker(samples, names.ROUTER_WORKER_KV_USAGE)
        ages = _by_worker(samples, names.ROUTER_WORKER_METRICS_AGE)
        queues = [s.value for s in samples if s.name == names.ROUTER_QUEUE_REQUESTS]
        queue = (
            judge(sum(queues), age_s=0.0, max_age_s=query.max_age_s, source=self.name)
            if queues
            else missing("not reported", source=self.name)
        )
        return Readings(
            kv={
                worker.name: judge(
                    kv.get(worker.name),
                    age_s=ages.get(worker.name, math.nan),
                    max_age_s=query.max_age_s,
                    source=self.name,
                    upper=1.0,
                )
                for worker in query.kv_workers
            },
            queue=queue,
            latency={key: _buckets(samples, f"{name}_bucket") for key, name in _LATENCIES.items()},
        )


def _by_worker(samples: list[Sample], name: str) -> dict[str, float]:
    return {s.labels.get("worker", ""): s.value for s in samples if s.name == name}


def _buckets(samples: list[Sample], name: str) -> Buckets:
    totals: dict[float, float] = {}
    for sample in samples:
        if sample.name == name and "le" in sample.labels:
            try:
                bound = float(sample.labels["le"])
            except ValueError:
                continue
            totals[bound] = totals.get(bound, 0.0) + sample.value
    return tuple(sorted(totals.items()))
