"""Settings of what waits in the router: when workers count as busy, its queues, and prompts that decode workers compute.

Seconds are simulated seconds unless the name says real.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.api.base import Count, Flag, Fraction, Integer, Number, Seconds, SpecModel, WholeSeconds, entry
from penstock.api.enums import AdmissionMode, QueueOrder


class AdmissionConfig(SpecModel):
    """When a worker counts as busy; a request is rejected only if all workers are. Running routers follow changes."""

    mode: AdmissionMode = entry(
        AdmissionMode.NONE, "token-capacity applies the thresholds; none ignores them."
    )
    active_decode_blocks_threshold: Fraction | None = entry(
        0.85, "Busy above this fraction of KV blocks in use, 0 to 1; null: no threshold."
    )
    active_prefill_tokens_threshold: Annotated[Integer, Field(ge=0)] | None = entry(
        100_000, "Busy above this many prompt tokens to compute; null: no threshold."
    )
    active_prefill_tokens_threshold_frac: Annotated[Number, Field(ge=0, le=1000)] | None = entry(
        None, "Busy above this multiple of the worker's batch token limit; null: no threshold."
    )
    retry_after_seconds: Annotated[Integer, Field(ge=0, le=3600)] = entry(
        1, "Minimum Retry-After of a refusal; a measured drain rate can raise it to 60; real seconds."
    )


class PrefillQueueConfig(SpecModel):
    """Requests that wait in the router for a prefill worker; the planner's signal is its length."""

    max_requests: Annotated[Integer, Field(ge=1, le=1_000_000)] = entry(
        1024, "Maximum number of waiting requests; further ones are refused with 429."
    )
    max_wait_seconds: Seconds = entry(60, "Maximum wait; then the request is refused with 503; seconds.")
    max_wake_seconds: WholeSeconds | None = entry(
        None,
        "Maximum wait while a stage has no ready worker, as in a graph scaled to zero, but never below "
        "maxWaitSeconds, which counts from when all have one; then refused with 503. Above a worker's start-up; once three "
        "starts were seen, twice the slowest is waited for if that is less; seconds. "
        "null: maxWaitSeconds, and the router is not ready without workers.",
    )
    worker_tokens: Count = entry(
        8192, "Prompt tokens given to one prefill worker at a time; a longer prompt goes alone."
    )
    order: QueueOrder = entry(
        QueueOrder.IN_TIME_FIRST,
        "Order of a worker's queue, where the policy gives each worker one: the first to arrive; the one with the "
        "most cached tokens; or the first that can still meet spec.slo.ttft, before those that cannot.",
    )


class PrefillDeflectionConfig(SpecModel):
    """Prompts that decode workers compute themselves while all prefill workers are behind."""

    enabled: Flag = entry(
        False, "Let decode workers compute prompts; needs services of roles prefill and decode, and no tiers."
    )
    queue_seconds: Seconds = entry(
        1, "Prefill workers are behind when each has more than this to compute; seconds."
    )
    itl_seconds: Seconds = entry(
        0.05,
        "Maximum gap that a deflected prompt may make between tokens: a decode worker's recent mean ITL and 1.25 "
        "times one step (engine.maxBatchTokens at most) at the speed of prefill; seconds.",
    )
    max_kv_usage_fraction: Fraction = entry(
        0.8, "Maximum fraction of KV blocks in use on the decode worker, the prompt included, 0 to 1."
    )


class DecodeQueueConfig(SpecModel):
    """Prefilled requests that wait in the router while no decode worker takes any."""

    max_wait_seconds: Seconds | None = entry(
        None,
        "Maximum wait, during which the prompt's lease is not renewed; then the request waits in the prefill "
        "queue again; seconds. null: prefillQueue.maxWaitSeconds, or 0.8 of the lease if that is less.",
    )
