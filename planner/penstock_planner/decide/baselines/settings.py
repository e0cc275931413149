"""What the other autoscalers are set to, and how often they decide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BaselineSettings:
    """Targets and what a user would have measured of the hardware beforehand.

    Attributes:
        prefill_tokens_per_s: Prompt tokens that one replica computes per second at its best, > 0 (KEDA).
        context_tokens: Longest context, tokens, > 0 (Dynamo measures its prefill queue in it).
        kv_tokens: KV cache of one replica, tokens, > 0 (Dynamo).
        hpa_kv: KV usage that the HPA keeps, in (0, 1]; 0.5 served more in time than 0.8 on the tuned cases, for 3-4% more
            GPU-hours.
        hpa_queue: Waiting requests per replica that the HPA keeps, > 0; 1 served better there than 3 or 5.
        keda_kv: KV usage that the KEDA blueprint keeps, in (0, 1]; llm-d's 0.8.
        kpa_kv: KV usage that the KPA keeps in decode, in (0, 1]; Knative's target utilisation.
        kpa_prefill: Requests per prefill replica that the KPA keeps, > 0: one that runs and one that waits.
        kpa_aggregated: The same for an aggregated replica, > 0.
    """

    prefill_tokens_per_s: float = 10_000.0
    context_tokens: float = 16_384.0
    kv_tokens: float = 400_000.0
    hpa_kv: float = 0.5
    hpa_queue: float = 1.0
    keda_kv: float = 0.8
    kpa_kv: float = 0.7
    kpa_prefill: float = 2.0
    kpa_aggregated: float = 8.0
