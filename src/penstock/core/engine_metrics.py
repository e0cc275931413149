"""Metric names of inference runtimes in Prometheus; each runtime's package registers its own under the entry-point group `GROUP`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GROUP: Final = "penstock.engine_metrics"
"""Entry-point group in which packages register their `EngineMetrics`."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Metric names of one runtime. If a field has several names, the first one that the Prometheus server has is used.

    Attributes:
        runtime: Name of the runtime.
        model_label: Label with the model's name; None if the series do not name a model.
        prompt_tokens: Histogram of the prompt tokens per request.
        answer_tokens: Histogram of the generated tokens per request.
        ttft: Histogram of the time to first token, in seconds.
        gap: Histogram of the inter-token latency, or of its mean per request, in seconds.
        running: Gauge of the requests that an engine runs; every serving process exports it.
        waiting: Gauge of the requests that wait for an engine.
        kv_usage: Gauge of the fraction of the KV cache in use.
        cache_tokens: Pairs of counters or histograms: tokens looked up in the prefix cache, and tokens found there.
        hit_rate: Gauge of the prefix cache hit rate as a fraction, for runtimes without such counters.
        cache_config: Gauge whose labels ``num_gpu_blocks`` and ``block_size`` give the KV capacity; None if the runtime
            has no such gauge.
    """

    runtime: str
    model_label: str | None
    prompt_tokens: tuple[str, ...] = ()
    answer_tokens: tuple[str, ...] = ()
    ttft: tuple[str, ...] = ()
    gap: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_usage: tuple[str, ...] = ()
    cache_tokens: tuple[tuple[str, str], ...] = ()
    hit_rate: tuple[str, ...] = ()
    cache_config: str | None = None
