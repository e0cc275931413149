"""Names of every metric that Penstock reads or writes; nothing else spells them.

vLLM's names follow its 0.32 release. Its ``kv_cache_usage_perc`` is a fraction 0-1 despite the name:
it is renamed to ``kv_usage_fraction`` as soon as it is parsed.
"""

from __future__ import annotations

from typing import Final

# vLLM, read from real workers and written by the simulated one.
VLLM_RUNNING: Final = "vllm:num_requests_running"
VLLM_WAITING: Final = "vllm:num_requests_waiting"
VLLM_WAITING_BY_REASON: Final = "vllm:num_requests_waiting_by_reason"
VLLM_KV_USAGE: Final = "vllm:kv_cache_usage_perc"
VLLM_SLEEP_STATE: Final = "vllm:engine_sleep_state"
VLLM_CACHE_CONFIG_INFO: Final = "vllm:cache_config_info"
VLLM_PROMPT_TOKENS: Final = "vllm:prompt_tokens"
VLLM_PROMPT_TOKENS_CACHED: Final = "vllm:prompt_tokens_cached"
VLLM_GENERATION_TOKENS: Final = "vllm:generation_tokens"
VLLM_PREEMPTIONS: Final = "vllm:num_preemptions"
VLLM_REQUEST_SUCCESS: Final = "vllm:request_success"
VLLM_ADMISSION_REJECTIONS: Final = "vllm:admission_rejections"
VLLM_PREFIX_QUERIES: Final = "vllm:prefix_cache_queries"
VLLM_PREFIX_HITS: Final = "vllm:prefix_cache_hits"
VLLM_EXTERNAL_PREFIX_QUERIES: Final = "vllm:external_prefix_cache_queries"
VLLM_EXTERNAL_PREFIX_HITS: Final = "vllm:external_prefix_cache_hits"
VLLM_NIXL_EXPIRED: Final = "vllm:nixl_num_kv_expired_reqs"
VLLM_NIXL_NOTIFICATIONS_AFTER_EXPIRY: Final = "vllm:nixl_num_notifications_after_expiry"
VLLM_NIXL_FAILED_TRANSFERS: Final = "vllm:nixl_num_failed_transfers"
VLLM_NIXL_FAILED_NOTIFICATIONS: Final = "vllm:nixl_num_failed_notifications"
VLLM_TTFT: Final = "vllm:time_to_first_token_seconds"
VLLM_ITL: Final = "vllm:inter_token_latency_seconds"
VLLM_TPOT: Final = "vllm:request_time_per_output_token_seconds"
VLLM_E2E: Final = "vllm:e2e_request_latency_seconds"
VLLM_QUEUE_TIME: Final = "vllm:request_queue_time_seconds"
VLLM_PREFILL_TIME: Final = "vllm:request_prefill_time_seconds"
VLLM_DECODE_TIME: Final = "vllm:request_decode_time_seconds"
VLLM_INFERENCE_TIME: Final = "vllm:request_inference_time_seconds"
VLLM_REQUEST_PROMPT_TOKENS: Final = "vllm:request_prompt_tokens"
VLLM_REQUEST_GENERATION_TOKENS: Final = "vllm:request_generation_tokens"
VLLM_ITERATION_TOKENS: Final = "vllm:iteration_tokens_total"
VLLM_NIXL_XFER_TIME: Final = "vllm:nixl_xfer_time_seconds"
VLLM_NIXL_BYTES: Final = "vllm:nixl_bytes_transferred"

# The router.
ROUTER_QUEUE_REQUESTS: Final = "penstock_router_prefill_queue_requests"
ROUTER_QUEUE_TOKENS: Final = "penstock_router_prefill_queue_tokens"
ROUTER_QUEUE_OLDEST: Final = "penstock_router_prefill_queue_oldest_seconds"
ROUTER_QUEUE_TIME: Final = "penstock_router_prefill_queue_seconds"
ROUTER_WORKER_READY: Final = "penstock_router_worker_ready"
ROUTER_WORKER_INFLIGHT_REQUESTS: Final = "penstock_router_worker_inflight_requests"
ROUTER_WORKER_INFLIGHT_TOKENS: Final = "penstock_router_worker_inflight_tokens"
ROUTER_WORKER_KV_USAGE: Final = "penstock_router_worker_kv_usage_fraction"
ROUTER_WORKER_METRICS_AGE: Final = "penstock_router_worker_metrics_age_seconds"
ROUTER_DISCOVERY_CURRENT: Final = "penstock_router_discovery_current"
ROUTER_REQUESTS: Final = "penstock_router_requests"
ROUTER_ERRORS: Final = "penstock_router_errors"
ROUTER_RETRIES: Final = "penstock_router_retries"
ROUTER_TTFT: Final = "penstock_router_time_to_first_token_seconds"
ROUTER_ITL: Final = "penstock_router_inter_token_latency_seconds"
ROUTER_E2E: Final = "penstock_router_e2e_request_latency_seconds"
ROUTER_PROMPT_TOKENS: Final = "penstock_router_prompt_tokens"
ROUTER_GENERATION_TOKENS: Final = "penstock_router_generation_tokens"
ROUTER_CACHED_TOKENS: Final = "penstock_router_cached_tokens"

# The planner.
PLANNER_DECISIONS: Final = "penstock_planner_decisions"
PLANNER_REPLICAS: Final = "penstock_planner_replicas"
PLANNER_DESIRED_REPLICAS: Final = "penstock_planner_desired_replicas"
PLANNER_KV_USAGE: Final = "penstock_planner_kv_usage_fraction"
PLANNER_QUEUE: Final = "penstock_planner_prefill_queue_requests"
PLANNER_READING_AGE: Final = "penstock_planner_reading_age_seconds"
PLANNER_UNKNOWN_READINGS: Final = "penstock_planner_unknown_readings"
PLANNER_GPUS: Final = "penstock_planner_gpus"
PLANNER_GPU_BUDGET: Final = "penstock_planner_gpu_budget"
PLANNER_PHASE: Final = "penstock_planner_phase"
PLANNER_LEDGER_ERRORS: Final = "penstock_planner_ledger_errors"

# The operator.
OPERATOR_RECONCILE_DURATION: Final = "penstock_operator_reconcile_duration_seconds"
OPERATOR_RECONCILES: Final = "penstock_operator_reconciles"
OPERATOR_WRITES: Final = "penstock_operator_writes"
OPERATOR_WRITE_ERRORS: Final = "penstock_operator_write_errors"
OPERATOR_EVENTS_DROPPED: Final = "penstock_operator_events_dropped"
OPERATOR_GRAPHS: Final = "penstock_operator_graphs"
OPERATOR_QUEUE_DEPTH: Final = "penstock_operator_queue_depth"
OPERATOR_LEADER: Final = "penstock_operator_leader"
OPERATOR_STANDS_BY: Final = "penstock_operator_stands_by"
OPERATOR_NAMESPACES_LEFT: Final = "penstock_operator_namespaces_left"

# Any process with a schedule of its own.
SCHEDULE_LAG_P99: Final = "penstock_schedule_lag_p99_seconds"
SCHEDULE_LAG_SAMPLES: Final = "penstock_schedule_lag_samples"

COUNTER_SUFFIX: Final = "_total"
"""Counters carry this on the wire; the constants above leave it out."""
