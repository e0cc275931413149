"""What the router exports of the load that makes workers busy, and of the requests that it rejects for it.

Names and meanings are those of NVIDIA Dynamo's document "Request Rejection", under Penstock's prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.core import metric_names as names
from penstock.router.core.worker import Worker


def worker_load_families(
    workers: Iterable[Worker], active_prefill_tokens: Callable[[Worker], int]
) -> Iterator[Metric]:
    """Yield each worker's load; what is unknown of one is absent.

    Args:
        workers: All.
        active_prefill_tokens: Tells the prompt tokens that a worker has still to compute.
    """
    labels = ["worker", "role"]
    used = GaugeMetricFamily(
        names.ROUTER_WORKER_ACTIVE_DECODE_BLOCKS, "KV blocks in use, as last scraped.", labels=labels
    )
    total = GaugeMetricFamily(
        names.ROUTER_WORKER_KV_TOTAL_BLOCKS, "KV blocks of the worker, all ranks together.", labels=labels
    )
    prefill = GaugeMetricFamily(
        names.ROUTER_WORKER_ACTIVE_PREFILL_TOKENS,
        "Prompt tokens that wait for the worker or are being computed there, cached ones left out.",
        labels=labels,
    )
    for worker in workers:
        key = [worker.name, worker.spec.role.value]
        blocks, usage = worker.kv_total_blocks, worker.kv_usage_fraction
        if blocks is not None:
            total.add_metric(key, blocks)
            if usage is not None:
                used.add_metric(key, round(usage * blocks))
        prefill.add_metric(key, active_prefill_tokens(worker))
    yield from (used, total, prefill)


def rejection_family(counts: Mapping[tuple[str, str], int], *, model: str) -> Metric:
    """Return the rejected requests by model, endpoint and reason."""
    family = CounterMetricFamily(
        names.ROUTER_REJECTIONS,
        "Requests rejected with 503 to protect those under way.",
        labels=["model", "endpoint", "reason"],
    )
    for (endpoint, reason), count in counts.items():
        family.add_metric([model, endpoint, reason], count)
    return family
