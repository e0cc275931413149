"""Metrics of Dynamo 1.6, read from real frontends and workers; its workers report vLLM's names as well."""

from __future__ import annotations

from typing import Final

STARTED: Final = "dynamo_frontend_requests_started_total"
FINISHED: Final = "dynamo_frontend_requests_total"
REJECTED: Final = "dynamo_frontend_model_rejection_total"
INPUT_TOKENS: Final = "dynamo_frontend_input_sequence_tokens"
CACHED_TOKENS: Final = "dynamo_frontend_cached_tokens"
OUTPUT_TOKENS: Final = "dynamo_frontend_output_sequence_tokens"
TTFT: Final = "dynamo_frontend_time_to_first_token_seconds"
ITL: Final = "dynamo_frontend_inter_token_latency_seconds"
INFLIGHT: Final = "dynamo_frontend_inflight_requests"
UNANSWERED: Final = "dynamo_frontend_queued_requests"
STAGE_REQUESTS: Final = "dynamo_frontend_stage_requests"
QUEUE_REQUESTS: Final = "dynamo_frontend_router_queue_pending_requests"
QUEUE_TOKENS: Final = "dynamo_frontend_router_queue_pending_isl_tokens"
PENDING_TOKENS: Final = "dynamo_frontend_worker_active_prefill_tokens"
BATCH_TOKENS: Final = "dynamo_frontend_model_max_num_batched_tokens"
WORKER_INFLIGHT: Final = "dynamo_component_inflight_requests"
