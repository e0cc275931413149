"""What a worker of each runtime writes on its page of metrics, and a graph of it."""

from __future__ import annotations

from penstock.api import GraphDeployment

VLLM_PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="llama"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="llama"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0",model_name="llama"}} {kv}
vllm:prompt_tokens_total{{engine="0",model_name="llama"}} 100
vllm:generation_tokens_total{{engine="0",model_name="llama"}} {tokens}
"""
SGLANG_PAGE = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"}} {running}
sglang:num_queue_reqs{{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"}} {waiting}
sglang:num_prefill_bootstrap_queue_reqs{{engine_type="unified",model_name="llama"}} 0
sglang:num_prefill_inflight_queue_reqs{{engine_type="unified",model_name="llama"}} 0
sglang:num_decode_prealloc_queue_reqs{{engine_type="unified",model_name="llama"}} 0
sglang:num_decode_transfer_queue_reqs{{engine_type="unified",model_name="llama"}} 0
sglang:token_usage{{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"}} {kv}
sglang:prompt_tokens_total{{engine_type="unified",model_name="llama"}} 100
sglang:generation_tokens_total{{engine_type="unified",model_name="llama"}} {tokens}
"""
TRTLLM_PAGE = """\
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{{engine_type="trtllm",model_name="llama"}} {running}
trtllm_num_requests_waiting{{engine_type="trtllm",model_name="llama"}} {waiting}
trtllm_kv_cache_utilization{{engine_type="trtllm",model_name="llama"}} {kv}
trtllm_prompt_tokens_total{{engine_type="trtllm",model_name="llama"}} 100
trtllm_generation_tokens_total{{engine_type="trtllm",model_name="llama"}} {tokens}
"""
COUNTED = 'dynamo_component_inflight_requests{{dynamo_component="backend"}} {running}\n'
PAGES = {
    "vllm": VLLM_PAGE,
    "simulated": VLLM_PAGE,
    "acme": VLLM_PAGE,
    "dynamo": VLLM_PAGE + COUNTED,
    "sglang": SGLANG_PAGE,
    "trtllm": TRTLLM_PAGE,
}
"""What a worker of each runtime writes; all of them are here, or the first test fails."""
JOINS = {
    "vllm": ("kv_transfer_params",),
    "simulated": ("kv_transfer_params",),
    "acme": ("kv_transfer_params",),
    "sglang": ("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    "trtllm": ("disaggregated_params",),
}
"""Keys by which the requests of one prompt are joined, of the runtimes behind Penstock's router."""


def page(runtime, *, requests=0, waiting=0, kv=0, tokens=50):
    """A worker's page."""
    return PAGES[runtime].format(running=requests, waiting=waiting, kv=kv, tokens=tokens)


def graph_of(runtime, *roles):
    """A graph with a service of each role."""
    workers = {
        role: {"role": role, "gpusPerReplica": 2, "scaling": {"minReplicas": 1, "maxReplicas": 4}}
        for role in roles or ("prefill", "decode")
    }
    spec = {
        "model": {"name": "llama"},
        "runtime": runtime,
        "services": {"router": {"role": "router"}, **workers},
        "planner": {"enabled": False},
    }
    return GraphDeployment.model_validate(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "GraphDeployment",
            "metadata": {"name": "g"},
            "spec": spec,
        }
    )
