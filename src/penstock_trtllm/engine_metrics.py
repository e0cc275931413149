"""Names of TensorRT-LLM's metrics in a Prometheus, for `penstock assess`. Source: TensorRT-LLM's metrics collector.

It exports no histograms of token counts.
"""

from __future__ import annotations

from typing import Final

from penstock.core.engine_metrics import EngineMetrics

TRTLLM: Final = EngineMetrics(
    "trtllm",
    "model_name",
    ttft=("trtllm_time_to_first_token_seconds",),
    gap=("trtllm_time_per_output_token_seconds",),
    running=("trtllm_num_requests_running",),
    waiting=("trtllm_num_requests_waiting",),
    kv_usage=("trtllm_kv_cache_utilization",),
    hit_rate=("trtllm_kv_cache_hit_rate",),
)
