"""Settings of the router: policy, admission, priority tiers, its queues and its limits.

``prefillQueue``, ``limits``, ``breaker``, ``retries`` and ``health`` are what a router in production
must bound. Seconds are simulated seconds unless the name says real.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field, JsonValue, StringConstraints
from pydantic_core import PydanticCustomError

from penstock.api.base import Flag, Fraction, Integer, Number, ServedName, SpecModel, Text
from penstock.api.enums import AdmissionMode, GatewayFailureMode, QueueOrder, Tier
from penstock.core.plugins import registered
from penstock.core.worker_metrics import STALL_REAL_S

Seconds = Annotated[Number, Field(gt=0, le=86400)]
Share = Annotated[Number, Field(gt=0, le=1)]

_TTFT = "p99 of the time from arrival to first token; seconds. null: no target."
_TPOT = "p99 of the mean time between a request's further tokens; seconds. null: no target."
_E2E = "Time from arrival to last token, after which a request that still waits is refused; seconds. null: no target."


class TierShares(SpecModel):
    """Fair share of capacity for each tier while all tiers want it."""

    premium: Share = Field(default=0.5, description="Share of tier premium, above 0, at most 1.")
    standard: Share = Field(default=0.35, description="Share of tier standard, above 0, at most 1.")
    background: Share = Field(default=0.15, description="Share of tier background, above 0, at most 1.")


class PremiumSlo(SpecModel):
    """What tier premium is promised."""

    ttft_seconds: Seconds | None = Field(default=0.2, description=_TTFT)
    tpot_seconds: Seconds | None = Field(default=0.03, description=_TPOT)
    end_to_end_seconds: Seconds | None = Field(default=5, description=_E2E)


class StandardSlo(SpecModel):
    """What tier standard is promised."""

    ttft_seconds: Seconds | None = Field(default=0.5, description=_TTFT)
    tpot_seconds: Seconds | None = Field(default=0.08, description=_TPOT)
    end_to_end_seconds: Seconds | None = Field(default=15, description=_E2E)


class BackgroundSlo(SpecModel):
    """What tier background is promised."""

    ttft_seconds: Seconds | None = Field(default=None, description=_TTFT)
    tpot_seconds: Seconds | None = Field(default=None, description=_TPOT)
    end_to_end_seconds: Seconds | None = Field(default=60, description=_E2E)


class TierSlos(SpecModel):
    """What each tier is promised."""

    premium: PremiumSlo = Field(default=PremiumSlo(), description="Targets of tier premium.")
    standard: StandardSlo = Field(default=StandardSlo(), description="Targets of tier standard.")
    background: BackgroundSlo = Field(default=BackgroundSlo(), description="Targets of tier background.")


class SheddingConfig(SpecModel):
    """When arrivals of background, then of standard, are refused so that the tiers above keep their targets."""

    enabled: Flag = Field(default=True, description="Shed; compliance is measured in either case.")
    percentile: Annotated[Number, Field(ge=50, le=100)] = Field(
        default=99,
        description="Percentile, by nearest rank, of TTFT and TPOT that is compared with the targets.",
    )
    window_seconds: Seconds = Field(default=60, description="Length of the sliding windows; seconds.")
    min_samples: Annotated[Integer, Field(ge=1, le=8192)] = Field(
        default=20, description="Fewer measurements since the last step are no proof of a missed target."
    )
    step_seconds: Seconds = Field(default=5, description="Least time before one more step up; seconds.")
    recover_seconds: Seconds = Field(
        default=15, description="Time well within the targets before one step down; seconds."
    )
    recover_fraction: Annotated[Number, Field(gt=0, le=1)] = Field(
        default=0.8, description="Well within: at most this fraction of the target."
    )


class TiersConfig(SpecModel):
    """Priority tiers of requests."""

    enabled: Flag = Field(
        default=False,
        description="Order requests by tier, in the router and in the workers, which then run with "
        "--scheduling-policy priority.",
    )
    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=64)] = Field(
        default="x-penstock-tier", description="Request header that names the tier."
    )
    default: Tier = Field(
        default=Tier.STANDARD,
        description="Tier of a request that names none and has no key of one; not system.",
    )
    models: dict[ServedName, Tier] = Field(
        default={},
        description="Further names of the model, each with the tier that asking by this name asks for.",
    )
    keys_secret: Text | None = Field(
        default=None,
        description="Secret whose values hold lines 'KEY TIER [TENANT]': bearer tokens with the tier that they allow "
        "and whose they are; on Kubernetes.",
    )
    keys_file: Text | None = Field(
        default=None,
        description="File of such lines; for local processes. Without keys every client may name any tier but system.",
    )
    shares: TierShares = Field(default=TierShares(), description="Fair shares; their sum is 1.")
    round_tokens: Annotated[Integer, Field(ge=1, le=10_000_000)] = Field(
        default=8192,
        description="Prompt tokens that all tiers together are given before each has its next share.",
    )
    aging_per_second: Annotated[Number, Field(ge=0, le=10)] = Field(
        default=0.1,
        description="Priority levels that a waiting request gains each second, never to premium's.",
    )
    max_aging: Annotated[Number, Field(ge=0, le=10)] = Field(
        default=1.5, description="Most priority levels that a waiting request gains."
    )
    max_tenant_share: Share = Field(
        default=0.5,
        description="Most that one tenant, known by its key, may have of what it has waiting and what is free for its "
        "tier in prefillQueue.maxRequests.",
    )
    slo: TierSlos = Field(default=TierSlos(), description="What each tier is promised.")
    shedding: SheddingConfig = Field(default=SheddingConfig(), description="Refusal of lower tiers by SLO.")


ROUTING_POLICIES: Final = "penstock.routing_policies"
"""Group of entry points, each a class or a function; see `penstock.router.policy.registry`."""

Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9.:\[\]-]+)$", max_length=253)]


def _installed(name: str) -> str:
    names = registered(ROUTING_POLICIES)
    if name in names:
        return name
    raise PydanticCustomError(
        "enum", "must be {expected}", {"expected": ", ".join(f"'{each}'" for each in names)}
    )


PolicyName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=63), AfterValidator(_installed)
]


class DualmapConfig(SpecModel):
    """Settings of the policies dualmap and pair-cost."""

    rebalance: Flag = Field(
        default=True, description="Move queued requests between a prefix's two candidates."
    )
    decode_bottleneck_seconds: Seconds = Field(
        default=3, description="Wait for a decode slot above which TTFT estimates are corrected; seconds."
    )
    hot_window: Annotated[Integer, Field(ge=10, le=1_000_000)] = Field(
        default=200, description="Latest requests over which a prefix's hotness is counted."
    )


class AdmissionConfig(SpecModel):
    """When a worker counts as busy; a request is rejected only if all workers are. Running routers follow changes."""

    mode: AdmissionMode = Field(
        default=AdmissionMode.NONE, description="token-capacity applies the thresholds; none ignores them."
    )
    active_decode_blocks_threshold: Fraction | None = Field(
        default=0.85, description="Busy above this fraction of KV blocks in use, 0 to 1; null: no threshold."
    )
    active_prefill_tokens_threshold: Annotated[Integer, Field(ge=0)] | None = Field(
        default=100_000, description="Busy above this many prompt tokens to compute; null: no threshold."
    )
    active_prefill_tokens_threshold_frac: Annotated[Number, Field(ge=0)] | None = Field(
        default=None,
        description="Busy above this multiple of the worker's batch token limit; null: no threshold.",
    )
    retry_after_seconds: Annotated[Integer, Field(ge=0, le=3600)] = Field(
        default=1,
        description="Least Retry-After of a refusal; a measured drain rate may ask for up to 60; real seconds.",
    )


class AuthConfig(SpecModel):
    """API keys that clients must present as bearer tokens; none set: no key needed."""

    api_keys_secret: Text | None = Field(
        default=None, description="Secret whose values are the accepted keys; on Kubernetes."
    )
    api_keys_file: Text | None = Field(
        default=None, description="File with one accepted key a line; for local processes."
    )


class PrefillQueueConfig(SpecModel):
    """Requests that wait in the router for a prefill worker; the planner's signal is its length."""

    max_requests: Annotated[Integer, Field(ge=1, le=1_000_000)] = Field(
        default=1024, description="Most waiting requests; further ones are refused with 429."
    )
    max_wait_seconds: Seconds = Field(
        default=60, description="Longest wait; then the request is refused with 503; seconds."
    )
    max_wake_seconds: Seconds | None = Field(
        default=None,
        description="Longest wait while a stage has no ready worker, as in a graph scaled to zero, but never below "
        "maxWaitSeconds, which counts from when all have one; then refused with 503. Above a worker's start-up; once three "
        "starts were seen, twice the slowest is waited for if that is less; seconds. "
        "null: maxWaitSeconds, and the router is not ready without workers.",
    )
    worker_tokens: Annotated[Integer, Field(ge=1)] = Field(
        default=8192,
        description="Prompt tokens given to one prefill worker at a time; a longer prompt goes alone.",
    )
    order: QueueOrder = Field(
        default=QueueOrder.IN_TIME_FIRST,
        description="Who is next where a policy gives each worker a queue: the first to arrive; the one with the "
        "most cached tokens; or the first that can still meet ttftSloSeconds, before those that cannot.",
    )


class DecodeQueueConfig(SpecModel):
    """Prefilled requests that wait in the router while no decode worker takes any."""

    max_wait_seconds: Seconds | None = Field(
        default=None,
        description="Longest wait, during which the prompt's lease is not renewed; then the request waits in the prefill "
        "queue again; seconds. null: prefillQueue.maxWaitSeconds, or 0.8 of the lease if that is less.",
    )


class LimitsConfig(SpecModel):
    """What one request may cost."""

    max_body_bytes: Annotated[Integer, Field(ge=1024, le=1 << 30)] = Field(
        default=16 << 20, description="Largest request body; bytes."
    )
    max_header_bytes: Annotated[Integer, Field(ge=1024, le=1 << 20)] = Field(
        default=64 << 10, description="Largest request head; bytes."
    )
    max_connections: Annotated[Integer, Field(ge=1, le=1_000_000)] = Field(
        default=10_000, description="Most client connections at a time."
    )
    header_timeout_real_seconds: Seconds = Field(
        default=30, description="Time for a client to send head and body together; real seconds."
    )
    connect_timeout_real_seconds: Seconds = Field(
        default=5, description="Time for a connection to a worker; real seconds."
    )
    first_byte_timeout_seconds: Seconds = Field(
        default=600, description="Time for a worker's first byte; seconds."
    )
    idle_timeout_seconds: Seconds = Field(
        default=600, description="Longest silence within a worker's stream; seconds."
    )
    request_timeout_seconds: Seconds = Field(
        default=900, description="Longest request from arrival to last byte; seconds."
    )


class BreakerConfig(SpecModel):
    """When the router stops sending to a worker: after failures in a row, as Envoy ejects outliers."""

    consecutive_failures: Annotated[Integer, Field(ge=1, le=1000)] = Field(
        default=5, description="Failures in a row that open the circuit."
    )
    open_seconds: Seconds = Field(
        default=10,
        description="Time without requests before one probe is let through, times the number of ejections of late; "
        "seconds.",
    )
    max_open_seconds: Seconds = Field(
        default=300, description="Longest time without requests, however often a worker was ejected; seconds."
    )
    max_ejected_fraction: Fraction = Field(
        default=0.5,
        description="Largest share of a role's workers with open circuits at a time, 0 to 1; one may always be.",
    )


class RetriesConfig(SpecModel):
    """Retries, always before the first byte and within a budget."""

    max_per_request: Annotated[Integer, Field(ge=0, le=10)] = Field(
        default=2, description="Most retries of one request."
    )
    budget_fraction: Fraction = Field(
        default=0.1, description="Most retries as a fraction of recent requests, 0 to 1."
    )
    min_per_second: Annotated[Number, Field(ge=0, le=1000)] = Field(
        default=1, description="Retries per second allowed regardless of the fraction."
    )


class HealthConfig(SpecModel):
    """How the router watches its workers."""

    interval_seconds: Seconds = Field(
        default=1, description="Time between health checks and metric scrapes; real floor 0.1 s."
    )
    timeout_real_seconds: Seconds = Field(default=2, description="Time for one check; real seconds.")
    unhealthy_after: Annotated[Integer, Field(ge=1, le=100)] = Field(
        default=3, description="Failed checks in a row that make a worker unhealthy."
    )
    unreachable_real_seconds: Annotated[Number, Field(gt=0, le=86400)] = Field(
        default=20,
        description="Time without an answer to a health check and without a byte in any stream of a worker, as of one on a "
        "lost node, after which its requests are tried elsewhere or end with an error; real seconds.",
    )
    stall_real_seconds: Annotated[Number, Field(gt=0, le=86400)] = Field(
        default=STALL_REAL_S,
        description="Time in which a worker with requests reports no token, after which it is unhealthy though its health "
        "check succeeds: its requests are tried elsewhere or end with an error, and the local backend starts it again; "
        "real seconds.",
    )


class GatewayConfig(SpecModel):
    """The router as the endpoint picker of a Gateway, which relays the requests in its place; needs penstock[gateway]."""

    enabled: Flag = Field(
        default=False,
        description="Answer a Gateway's Envoy; on Kubernetes also make the InferencePool that an HTTPRoute names.",
    )
    port: Annotated[Integer, Field(ge=1, le=65535)] = Field(
        default=9002, description="TCP port on which Envoy asks, by ext_proc."
    )
    failure_mode: GatewayFailureMode = Field(
        default=GatewayFailureMode.CLOSE,
        description="Without the picker, FailClose refuses requests and FailOpen sends them to any worker, as far as the "
        "Gateway can; on Kubernetes.",
    )


class RouterConfig(SpecModel):
    """The graph's router."""

    policy: PolicyName = Field(
        default="prefix-cost",
        description="How a worker is chosen: prefix-cost, dualmap, pair-cost, cache-affinity, least-loaded, min-ttft, preble, "
        "kv-cost, round-robin, or the name under which an installed package registers its own.",
    )
    policy_parameters: dict[str, JsonValue] | None = Field(
        default=None,
        description="What the policy itself reads, by the names of its parameters. null: its defaults.",
    )
    ttft_slo_seconds: Seconds = Field(default=5, description="TTFT that SLO-aware policies aim for; seconds.")
    session_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=64)] | None = Field(
        default=None,
        description="Request header; requests of equal value stay on one prefill (or aggregated) worker under a "
        "policy that places by prefix. null: none.",
    )
    tokenizer: Text | None = Field(
        default=None,
        description="The model's tokenizer.json as the router finds it: prefixes are then compared by tokens, and "
        "prompts counted exactly, chats by the template beside it. Needs penstock[tokenizer]. simulated: the tokens of simulated workers. null: by bytes.",
    )
    kv_events_port: Annotated[Integer, Field(ge=1, le=65535)] | None = Field(
        default=None,
        description="Port on which each worker publishes its KV cache's changes (vLLM's ZMQ events); the router then "
        "follows them. Needs tokenizer and penstock[kv-events]. On one host each worker gets an address of its own, in a "
        "cluster the port after it (65534 after 65535) answers for events that were missed. null: none.",
    )
    dualmap: DualmapConfig = Field(
        default=DualmapConfig(), description="Settings of policies dualmap and pair-cost."
    )
    admission: AdmissionConfig = Field(
        default=AdmissionConfig(), description="Refusal while workers are busy."
    )
    tiers: TiersConfig = Field(default=TiersConfig(), description="Priority tiers.")
    gateway: GatewayConfig = Field(default=GatewayConfig(), description="Endpoint picker of a Gateway.")
    auth: AuthConfig = Field(default=AuthConfig(), description="API keys.")
    cors_allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        max_length=64,
        description="Origins whose web pages may call /v1, as https://app.example.com; * allows all. Empty: none.",
    )
    prefill_queue: PrefillQueueConfig = Field(
        default=PrefillQueueConfig(), description="Requests waiting for prefill."
    )
    decode_queue: DecodeQueueConfig = Field(
        default=DecodeQueueConfig(), description="Prefilled requests waiting for decode."
    )
    limits: LimitsConfig = Field(default=LimitsConfig(), description="Bounds of one request.")
    breaker: BreakerConfig = Field(default=BreakerConfig(), description="Circuit breaker of each worker.")
    retries: RetriesConfig = Field(default=RetriesConfig(), description="Retries and their budget.")
    health: HealthConfig = Field(default=HealthConfig(), description="Checks of the workers.")
