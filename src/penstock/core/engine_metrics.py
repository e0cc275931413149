"""What a runtime's metrics are called in a Prometheus; each runtime's package registers its own under `GROUP`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GROUP: Final = "penstock.engine_metrics"


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Metrics of one runtime. Several names: the first that the server has is read.

    Attributes:
        model_label: Label that holds the model's name; None: the series do not name a model.
        prompt_tokens: Histogram of the prompt tokens of a request.
        answer_tokens: Histogram of the generated tokens of a request.
        ttft: Histogram of the time to the first token, seconds.
        gap: Histogram of the time between tokens, or of a request's mean of it, seconds.
        running: Gauge of the requests in an engine; each process that serves exports it.
        waiting: Gauge of the requests that wait for an engine.
        kv_usage: Gauge of the KV cache in use, a fraction.
        cache_tokens: Counters, or histograms, of (tokens looked up in the prefix cache, tokens found there).
        hit_rate: Gauge of the fraction found, where there are no counters.
        cache_config: Gauge whose labels ``num_gpu_blocks`` and ``block_size`` are the KV capacity; None: there is none.
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
