"""Names of SGLang's metrics in a Prometheus, for `penstock assess`. Source: SGLang's metrics collector."""

from __future__ import annotations

from typing import Final

from penstock.core.engine_metrics import EngineMetrics

SGLANG: Final = EngineMetrics(
    "sglang",
    "model_name",
    prompt_tokens=("sglang:prompt_tokens_histogram",),
    answer_tokens=("sglang:generation_tokens_histogram",),
    ttft=("sglang:time_to_first_token_seconds",),
    gap=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    kv_usage=("sglang:token_usage",),
    cache_tokens=(("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),),
    hit_rate=("sglang:cache_hit_rate",),
)
