"""Files that `penstock planner decide` takes, to print and to change."""

from __future__ import annotations

from collections.abc import Mapping

_LOAD = """\
# penstock planner decide FILE: what would the planner do? Every key but observations may be left out.
config:                      # the planner's options by their names; documented defaults
  mode: load                 # the thresholds; other modes need a demand with each observation, as --mode sla shows
  max-gpu-budget: 8
  decode-kv-scale-up-threshold: 0.9
state:                       # what the last decision left
  sequence: 11
  roles:
    decode: {seen: 2, grace: 0}
start_s: 330                 # the interval is (start_s, last observation]
observations:                # one per pull; null, .nan or a value out of range is an unknown one
  - at_s: 345
    pools:
      prefill: {ready: 1, gpus: 1}
      decode: {ready: 2, starting: 0, draining: 0, gpus: 1}
    kv: {llama_decode: 0.95, llama_decode_1: 0.91}
    queue: 0.0               # requests waiting for prefill in the whole graph
  - at_s: 360
    pools:
      prefill: {ready: 1, gpus: 1}
      decode: {ready: 2, gpus: 1}
    kv: {llama_decode: {value: 0.96, age_s: 2}, llama_decode_1: 0.92}
    queue: 1
"""

_SLA = """\
# penstock planner decide FILE in mode sla: replicas by a performance profile, for targets of TTFT and ITL.
config:                      # the planner's options by their names
  mode: sla
  ttft-slo: 1                # seconds
  itl-slo: 0.02              # seconds between tokens
  max-gpu-budget: 8
performance:                 # as in profile.json of `penstock profile`; or name that file as profile: in config
  prefill:
    prompt_tokens: [100, 1000, 20000]
    ttft_s: [0.01, 0.1, 2.0]
  decode:                    # a row per context, a column per share of the KV cache
    contexts: [500, 4000]
    kv_usage: [0.1, 0.5, 1.0]
    itl_s: [[0.012, 0.018, 0.026], [0.011, 0.013, 0.016]]
    tokens_per_s: [[1667, 5556, 7692], [227, 962, 1563]]
    kv_tokens: 100000
start_s: 330                 # the interval is (start_s, last observation]
observations:                # one per pull; demand is what came to the routers since the pull before
  - at_s: 345
    pools: {prefill: {ready: 2, gpus: 1}, decode: {ready: 2, gpus: 1}}
    kv: {llama_decode: 0.30, llama_decode_1: 0.28}
    queue: 0
    demand: &demand
      period_s: 15
      arrivals: 270
      prompt_tokens: 270000
      uncached_tokens: 270000
      prefilled_tokens: 268000
      prefilling_workers: 1.8
      completed: 265
      output_tokens: 26500
      ttft_sum_s: 81
      ttft_count: 268
      itl_sum_s: 400
      itl_count: 26300
      in_flight: {prefill: 3, decode: 26}
  - at_s: 360
    pools: {prefill: {ready: 2, gpus: 1}, decode: {ready: 2, gpus: 1}}
    kv: {llama_decode: 0.31, llama_decode_1: 0.29}
    queue: 0
    demand: *demand
"""

EXAMPLES: Mapping[str, str] = {"load": _LOAD, "sla": _SLA}
"""By mode."""
