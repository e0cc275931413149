"""Settings of the workers: KV leases, admission, preemption, batch and cache sizes; the names of the latency profiles.

The batch and cache sizes carry the runtime's own default when they are null. ``profile`` is read by
the simulated runtime only; ``mocker`` and ``kvBufferDevice`` let Dynamo and vLLM run without a GPU.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints

from penstock.api.base import (
    Count,
    DnsName,
    Flag,
    Integer,
    Number,
    ProfileText,
    Seconds,
    SecretKey,
    SpecModel,
    Text,
    entry,
)
from penstock.api.enums import KvBufferDevice, KvConnector, KvStore
from penstock.api.rule import Breach, Rule
from penstock.core.certificates import problem_of_authorities

PROFILE_SUFFIX: Final = ".yaml"
"""A name that ends so is a file of the user's own, read where the worker runs."""

PROFILES: Final = (
    "a100-llama-70b-bf16-tp8",
    "a100-llama-8b-bf16-tp1",
    "a100-qwen2.5-14b-bf16-tp1",
    "a100-qwen2.5-7b-bf16-tp1",
    "h100-llama-3.3-70b-tp2",
    "h100-llama-3.3-70b-tp2-table",
    "h100-llama-3.3-70b-tp4",
    "h100-llama-3.3-70b-tp4-table",
    "h100-llama-3.3-70b-tp8",
    "h100-llama-3.3-70b-tp8-table",
    "h100-llama-70b-bf16-tp8",
    "h100-llama-8b-bf16-tp1",
    "h100-qwen2.5-7b-bf16-tp1",
    "h200-llama-3.1-8b-tp1",
    "h200-llama-3.1-8b-tp1-table",
    "h200-llama-8b-bf16-tp1",
)
"""All files of ``penstock/engine/profiles``, sorted."""


SIMULATED_BATCH_TOKENS = 8192
"""Maximum tokens in one step of a simulated worker where the graph says nothing, as `penstock engine serve` has it."""

DEFAULT_PROFILE = "h200-llama-3.1-8b-tp1"


SHORTEST_SAFE_LEASE_S: Final = 6
"""Below it vLLM's heartbeat interval, duration // 6, is 0: a heartbeat in every step."""


class LeaseConfig(SpecModel):
    """How long a prefill worker holds KV blocks for a decode worker.

    ``acknowledgeShortLease`` is the explicit consent that a lease under 6 s needs.
    """

    duration_seconds: Annotated[Integer, Field(ge=1, le=86400)] = entry(
        30, "First lease; heartbeats come every sixth and extend by two thirds of it; seconds."
    )
    decoder_blocks_ttl_seconds: Annotated[Integer, Field(ge=1, le=604800)] = entry(
        480, "Life of blocks cached on decode workers, bidirectional mode; seconds."
    )
    acknowledge_short_lease: Flag = entry(
        False, "Accept a duration below 6 s and its heartbeat in every step."
    )

    rules = (
        Rule(
            path="durationSeconds",
            must=f"a lease under {SHORTEST_SAFE_LEASE_S} s needs acknowledgeShortLease: true",
            cel=f"self.durationSeconds >= {SHORTEST_SAFE_LEASE_S} || self.acknowledgeShortLease",
            holds=lambda lease: (
                lease.duration_seconds >= SHORTEST_SAFE_LEASE_S or lease.acknowledge_short_lease
            ),
            text=f"%d s is below {SHORTEST_SAFE_LEASE_S} s, so heartbeats would go out in every step",
            values=("self.durationSeconds",),
            remedy="raise it or set acknowledgeShortLease: true",
        ),
        Rule(
            path="decoderBlocksTtlSeconds",
            must="decoderBlocksTtlSeconds is at least durationSeconds",
            cel="self.decoderBlocksTtlSeconds >= self.durationSeconds",
            holds=lambda lease: lease.decoder_blocks_ttl_seconds >= lease.duration_seconds,
            text="%d s is below the lease of %d s, which a turn of the conversation may take",
            values=("self.decoderBlocksTtlSeconds", "self.durationSeconds"),
            remedy="raise it or lower durationSeconds",
        ),
    )


class LeaseOverride(SpecModel):
    """What one service has in place of the graph's lease."""

    duration_seconds: Annotated[Integer, Field(ge=1, le=86400)] | None = entry(
        None,
        "First lease of a prefill service, or the lease from which a decode service derives its heartbeats; seconds. "
        "null: the graph's.",
    )
    decoder_blocks_ttl_seconds: Annotated[Integer, Field(ge=1, le=604800)] | None = entry(
        None, "Life of blocks kept for the next turn; seconds. null: the graph's."
    )


def _unknown_profile(section: Any) -> Iterator[Breach]:
    name = section.profile
    if name is None or name in PROFILES or name.endswith(PROFILE_SUFFIX):
        return
    close = difflib.get_close_matches(name, PROFILES, n=1, cutoff=0.75)
    yield Breach(remedy=f"did you mean {close[0]}?" if close else None)


PROFILE_RULE: Rule[Any] = Rule(
    key="profile",
    must=f"a profile is one that comes with Penstock, or the name of a file ending in {PROFILE_SUFFIX}",
    cel=f"self.endsWith('{PROFILE_SUFFIX}') || self in [{', '.join(map(repr, PROFILES))}]",
    find=_unknown_profile,
    text="%s is not a latency profile",
    values=("self",),
    remedy=f"choose one of {', '.join(PROFILES)}",
)


class PreemptionConfig(SpecModel):
    """Bounds of preemption between tiers; vLLM preempts by priority without any of them."""

    max_per_request: Annotated[Integer, Field(ge=0, le=100)] | None = entry(
        None,
        "Maximum number of preemptions of one request; then it is no longer a victim. null: 3 on simulated workers.",
    )
    premium_reserved_fraction: Annotated[Number, Field(ge=0, lt=1)] | None = entry(
        None,
        "Fraction of KV blocks only tier premium may take, 0 to below 1. null: 0.1 on simulated workers.",
    )
    swap_gigabytes: Annotated[Number, Field(ge=0, le=1_000_000)] | None = entry(
        None, "Host memory of one worker for the KV of preempted requests; gigabytes. null: none is swapped."
    )
    drop_above_seconds: Seconds | None = entry(
        None, "Fail a preempted request if resuming it would take longer than this; seconds. null: never."
    )


class KvOffloadConfig(SpecModel):
    """Where a worker offloads KV that does not fit on its GPUs, so that a later prompt with the same beginning finds it."""

    gigabytes: Annotated[Number, Field(gt=0, le=1_000_000)] = entry(
        ..., "Host memory for it, of one replica, over all its GPUs; gigabytes."
    )
    store: KvStore = entry(
        KvStore.HOST,
        "host: vLLM's own OffloadingConnector. lmcache: LMCache within the worker, which the image must have; what else it "
        "takes is set by variables of the service, such as LMCACHE_REMOTE_URL.",
    )


_PEM: Final = r"^\s*-----BEGIN CERTIFICATE-----"


class WorkerTlsConfig(SpecModel):
    """Workers that speak https. The planner, the operator and routers know them by ``caBundle`` and ``serverName``."""

    ca_bundle: Annotated[str, StringConstraints(pattern=_PEM, max_length=65536)] = entry(
        ...,
        "PEM bundle of the CAs that signed the workers' certificates. For a rotation, both the old and the new one.",
    )
    server_name: DnsName = entry(
        "penstock-worker",
        "DNS name in the workers' certificate; the workers themselves are reached by their pods' addresses.",
    )
    secret: Text = entry(
        "penstock-worker-tls",
        "Secret with the workers' certificate tls.crt and its key tls.key; on Kubernetes.",
    )
    folder: Text | None = entry(None, "Folder with the same two files; for local processes.")
    token_key: SecretKey | None = entry(
        None,
        "Key of the Secret, or file of the folder, with the bearer token that routers send workers in place of a client's. Workers "
        "learn it by env, such as VLLM_API_KEY. null: routers pass on what clients send.",
    )

    rules = (
        Rule(
            path="caBundle",
            must="caBundle holds certificates that can be read",
            cel=None,
            find=lambda tls: (
                Breach((problem,)) for problem in [problem_of_authorities(tls.ca_bundle)] if problem
            ),
            text="cannot be read: %s",
            remedy="give certificates in PEM",
        ),
    )


class EngineConfig(SpecModel):
    """The graph's workers."""

    request_limit: Count | None = entry(
        None,
        "Maximum number of requests in one worker's engine; null: no limit. Runtimes dynamo and simulated.",
    )
    request_queue: Annotated[Integer, Field(ge=2)] = entry(
        16, "Requests that may wait beyond requestLimit; then refused. At least 2."
    )
    preemption: PreemptionConfig = entry(PreemptionConfig(), "Bounds of preemption between tiers.")
    profile: ProfileText = entry(DEFAULT_PROFILE, "Latency profile of simulated workers.")
    mocker: Flag = entry(False, "Run Dynamo's mocker in place of its vLLM worker; runtime dynamo only.")
    kv_buffer_device: KvBufferDevice | None = entry(
        None, "Where vLLM's transfers keep KV: cuda or cpu; null: vLLM's default."
    )
    kv_connector: KvConnector = entry(
        KvConnector.NIXL,
        "By which prefill workers hand KV to decode workers: nixl, or mooncake (runtime vllm alone), which knows no lease.",
    )
    kv_offload: KvOffloadConfig | None = entry(
        None,
        "KV kept in other memory than the GPUs', in addition to kvConnector; runtime vllm alone; null: none.",
    )
    tls: WorkerTlsConfig | None = entry(
        None,
        "Workers that speak https; runtimes vllm, sglang and simulated. null: http. A graph keeps one of the two.",
    )
    python_environment: Text | None = entry(
        None,
        "Folder of the Python environment whose bin/ holds the runtime's programs, where the workers run; "
        "null: vllm from PATH, Dynamo from Penstock's own environment.",
    )
    block_tokens: Annotated[Integer, Field(ge=1, le=1024)] | None = entry(
        None, "Tokens of one KV block; null: the runtime's default, 16."
    )
    kv_blocks: Count | None = entry(
        None, "KV blocks of one worker; null: as many as its memory or profile holds."
    )
    max_running_requests: Count | None = entry(
        None, "Maximum number of requests in one batch; null: the runtime's default."
    )
    max_batch_tokens: Count | None = entry(
        None, "Maximum number of tokens in one step; null: the runtime's default."
    )
    switchable: Flag = entry(
        False,
        "Workers of prefill and decode can take each other's role without a start, so that the planner moves them. Runtimes vllm "
        "and simulated; on Kubernetes replicas of one pod, within planner.maxGpuBudget.",
    )
    stream_interval_tokens: Count = entry(1, "Tokens between two streamed events.")

    rules = (PROFILE_RULE,)
