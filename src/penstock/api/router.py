"""Settings of the router: policy, admission, priority tiers, its queues and its limits.

``prefillQueue``, ``limits``, ``breaker``, ``retries`` and ``health`` are what a router in production
must bound. Seconds are simulated seconds unless the name says real.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import Field, JsonValue, StringConstraints

from penstock.api.base import (
    Count,
    Flag,
    Fraction,
    Integer,
    Number,
    Port,
    Seconds,
    ServedName,
    Share,
    SpecModel,
    Text,
    entry,
    one_of,
)
from penstock.api.enums import AdmissionMode, GatewayFailureMode, QueueOrder, Tier
from penstock.api.rule import Breach, Rule
from penstock.core.plugins import registered
from penstock.core.ports import SIDE_CHANNEL_PORT, WORKER_PORT
from penstock.core.worker_metrics import ENGINE_STALL_REAL_S, STALL_REAL_S

_TTFT = "p99 of the time from arrival to first token; seconds. null: no target."
_TPOT = "p99 of the mean time between a request's further tokens; seconds. null: no target."
_E2E = "Time from arrival to last token, after which a request that still waits is refused; seconds. null: no target."


class TierShares(SpecModel):
    """Fair share of capacity for each tier while all tiers want it."""

    premium: Share = entry(0.5, "Share of tier premium, above 0, at most 1.")
    standard: Share = entry(0.35, "Share of tier standard, above 0, at most 1.")
    background: Share = entry(0.15, "Share of tier background, above 0, at most 1.")


class PremiumSlo(SpecModel):
    """What tier premium is promised."""

    ttft_seconds: Seconds | None = entry(0.2, _TTFT)
    tpot_seconds: Seconds | None = entry(0.03, _TPOT)
    end_to_end_seconds: Seconds | None = entry(5, _E2E)


class StandardSlo(SpecModel):
    """What tier standard is promised."""

    ttft_seconds: Seconds | None = entry(0.5, _TTFT)
    tpot_seconds: Seconds | None = entry(0.08, _TPOT)
    end_to_end_seconds: Seconds | None = entry(15, _E2E)


class BackgroundSlo(SpecModel):
    """What tier background is promised."""

    ttft_seconds: Seconds | None = entry(None, _TTFT)
    tpot_seconds: Seconds | None = entry(None, _TPOT)
    end_to_end_seconds: Seconds | None = entry(60, _E2E)


class TierSlos(SpecModel):
    """What each tier is promised."""

    premium: PremiumSlo = entry(PremiumSlo(), "Targets of tier premium.")
    standard: StandardSlo = entry(StandardSlo(), "Targets of tier standard.")
    background: BackgroundSlo = entry(BackgroundSlo(), "Targets of tier background.")


class SheddingConfig(SpecModel):
    """When arrivals of background, then of standard, are refused so that the tiers above keep their targets."""

    enabled: Flag = entry(True, "Shed; compliance is measured in either case.")
    percentile: Annotated[Number, Field(ge=50, le=100)] = entry(
        99, "Percentile, by nearest rank, of TTFT and TPOT that is compared with the targets."
    )
    window_seconds: Seconds = entry(60, "Length of the sliding windows; seconds.")
    min_samples: Annotated[Integer, Field(ge=1, le=8192)] = entry(
        20, "Fewer measurements since the last step are no proof of a missed target."
    )
    step_seconds: Seconds = entry(5, "Least time before one more step up; seconds.")
    recover_seconds: Seconds = entry(15, "Time well within the targets before one step down; seconds.")
    recover_fraction: Share = entry(0.8, "Well within: at most this fraction of the target.")


_ROUNDING = 1e-9
"""Above the error of adding three fractions."""


def _incomplete_shares(tiers: Any) -> Iterator[Breach]:
    total = tiers.shares.premium + tiers.shares.standard + tiers.shares.background
    if abs(total - 1) > _ROUNDING:
        yield Breach(values=(total,))


_SHARES = "self.shares.premium + self.shares.standard + self.shares.background"


class TiersConfig(SpecModel):
    """Priority tiers of requests."""

    enabled: Flag = entry(
        False,
        "Order requests by tier, in the router and in the workers, which then run with "
        "--scheduling-policy priority.",
    )
    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=64)] = entry(
        "x-penstock-tier", "Request header that names the tier."
    )
    default: Tier = entry(
        Tier.STANDARD, "Tier of a request that names none and has no key of one; not system."
    )
    models: dict[ServedName, Tier] = entry(
        {}, "Further names of the model, each with the tier that asking by this name asks for."
    )
    keys_secret: Text | None = entry(
        None,
        "Secret whose values hold lines 'KEY TIER [TENANT]': bearer tokens with the tier that they allow "
        "and whose they are; on Kubernetes.",
    )
    keys_file: Text | None = entry(
        None,
        "File of such lines; for local processes. Without keys every client may name any tier but system.",
    )
    shares: TierShares = entry(TierShares(), "Fair shares; their sum is 1.")
    round_tokens: Annotated[Integer, Field(ge=1, le=10_000_000)] = entry(
        8192, "Prompt tokens that all tiers together are given before each has its next share."
    )
    aging_per_second: Annotated[Number, Field(ge=0, le=10)] = entry(
        0.1, "Priority levels that a waiting request gains each second, never to premium's."
    )
    max_aging: Annotated[Number, Field(ge=0, le=10)] = entry(
        1.5, "Most priority levels that a waiting request gains."
    )
    max_tenant_share: Share = entry(
        0.5,
        "Most that one tenant, known by its key, may have of what it has waiting and what is free for its "
        "tier in prefillQueue.maxRequests.",
    )
    slo: TierSlos = entry(TierSlos(), "What each tier is promised.")
    shedding: SheddingConfig = entry(SheddingConfig(), "Refusal of lower tiers by SLO.")

    rules = (
        Rule(
            path="shares",
            must="the tiers' shares add up to 1",
            cel=f"{_SHARES} <= {1 + _ROUNDING} && {_SHARES} >= {1 - _ROUNDING}",
            find=_incomplete_shares,
            text="sum %s is not 1",
            values=(_SHARES,),
            remedy="change one of the shares",
        ),
        Rule(
            path="default",
            must="the default tier is not system",
            cel=f"self.default != '{Tier.SYSTEM}'",
            holds=lambda tiers: tiers.default is not Tier.SYSTEM,
            text="%s goes before all others and is for keys alone",
            values=("self.default",),
            remedy="choose premium, standard or background",
        ),
    )


ROUTING_POLICIES: Final = "penstock.routing_policies"
"""Group of entry points, each a class or a function; see `penstock.router.policy.registry`."""

Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9.:\[\]-]+)$", max_length=253)]


PolicyName = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=63),
    one_of(lambda: registered(ROUTING_POLICIES)),
]


class DualmapConfig(SpecModel):
    """Settings of the policies dualmap and pair-cost."""

    rebalance: Flag = entry(True, "Move queued requests between a prefix's two candidates.")
    decode_bottleneck_seconds: Seconds = entry(
        3, "Wait for a decode slot above which TTFT estimates are corrected; seconds."
    )
    hot_window: Annotated[Integer, Field(ge=10, le=1_000_000)] = entry(
        200, "Latest requests over which a prefix's hotness is counted."
    )


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
    active_prefill_tokens_threshold_frac: Annotated[Number, Field(ge=0)] | None = entry(
        None, "Busy above this multiple of the worker's batch token limit; null: no threshold."
    )
    retry_after_seconds: Annotated[Integer, Field(ge=0, le=3600)] = entry(
        1, "Least Retry-After of a refusal; a measured drain rate may ask for up to 60; real seconds."
    )


class AuthConfig(SpecModel):
    """API keys that clients must present as bearer tokens; none set: no key needed."""

    api_keys_secret: Text | None = entry(None, "Secret whose values are the accepted keys; on Kubernetes.")
    api_keys_file: Text | None = entry(None, "File with one accepted key a line; for local processes.")


class PrefillQueueConfig(SpecModel):
    """Requests that wait in the router for a prefill worker; the planner's signal is its length."""

    max_requests: Annotated[Integer, Field(ge=1, le=1_000_000)] = entry(
        1024, "Most waiting requests; further ones are refused with 429."
    )
    max_wait_seconds: Seconds = entry(60, "Longest wait; then the request is refused with 503; seconds.")
    max_wake_seconds: Seconds | None = entry(
        None,
        "Longest wait while a stage has no ready worker, as in a graph scaled to zero, but never below "
        "maxWaitSeconds, which counts from when all have one; then refused with 503. Above a worker's start-up; once three "
        "starts were seen, twice the slowest is waited for if that is less; seconds. "
        "null: maxWaitSeconds, and the router is not ready without workers.",
    )
    worker_tokens: Count = entry(
        8192, "Prompt tokens given to one prefill worker at a time; a longer prompt goes alone."
    )
    order: QueueOrder = entry(
        QueueOrder.IN_TIME_FIRST,
        "Who is next where a policy gives each worker a queue: the first to arrive; the one with the "
        "most cached tokens; or the first that can still meet ttftSloSeconds, before those that cannot.",
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
        "Longest gap that a deflected prompt may make between tokens: a decode worker's mean ITL of late and 1.25 "
        "times one step (engine.maxBatchTokens at most) at the speed of prefill; seconds.",
    )
    max_kv_usage_fraction: Fraction = entry(
        0.8, "Most KV blocks in use on the decode worker with the prompt, 0 to 1."
    )


class DecodeQueueConfig(SpecModel):
    """Prefilled requests that wait in the router while no decode worker takes any."""

    max_wait_seconds: Seconds | None = entry(
        None,
        "Longest wait, during which the prompt's lease is not renewed; then the request waits in the prefill "
        "queue again; seconds. null: prefillQueue.maxWaitSeconds, or 0.8 of the lease if that is less.",
    )


class LimitsConfig(SpecModel):
    """What one request may cost."""

    max_body_bytes: Annotated[Integer, Field(ge=1024, le=1 << 30)] = entry(
        16 << 20, "Largest request body; bytes."
    )
    max_header_bytes: Annotated[Integer, Field(ge=1024, le=1 << 20)] = entry(
        64 << 10, "Largest request head; bytes."
    )
    max_connections: Annotated[Integer, Field(ge=1, le=1_000_000)] = entry(
        10_000, "Most client connections at a time."
    )
    header_timeout_real_seconds: Seconds = entry(
        30, "Time for a client to send head and body together; real seconds."
    )
    connect_timeout_real_seconds: Seconds = entry(5, "Time for a connection to a worker; real seconds.")
    first_byte_timeout_seconds: Seconds = entry(600, "Time for a worker's first byte; seconds.")
    idle_timeout_seconds: Seconds = entry(600, "Longest silence within a worker's stream; seconds.")
    request_timeout_seconds: Seconds = entry(900, "Longest request from arrival to last byte; seconds.")


class BreakerConfig(SpecModel):
    """When the router stops sending to a worker: after failures in a row, as Envoy ejects outliers."""

    consecutive_failures: Annotated[Integer, Field(ge=1, le=1000)] = entry(
        5, "Failures in a row that open the circuit."
    )
    open_seconds: Seconds = entry(
        10,
        "Time without requests before one probe is let through, times the number of ejections of late; "
        "seconds.",
    )
    max_open_seconds: Seconds = entry(
        300, "Longest time without requests, however often a worker was ejected; seconds."
    )
    max_ejected_fraction: Fraction = entry(
        0.5, "Largest share of a role's workers with open circuits at a time, 0 to 1; one may always be."
    )


class RetriesConfig(SpecModel):
    """Retries before the first byte, and streams that go on elsewhere behind it, both within a budget."""

    max_per_request: Annotated[Integer, Field(ge=0, le=10)] = entry(2, "Most retries of one request.")
    max_continuations: Annotated[Integer, Field(ge=0, le=10)] = entry(
        3,
        "Most times that one stream goes on at another worker after its own broke off; 0: it ends in an error.",
    )
    budget_fraction: Fraction = entry(0.1, "Most retries as a fraction of recent requests, 0 to 1.")
    min_per_second: Annotated[Number, Field(ge=0, le=1000)] = entry(
        1, "Retries per second allowed regardless of the fraction."
    )


class DrainConfig(SpecModel):
    """What becomes of the streams of a worker that drains."""

    migrate_after_seconds: Seconds | None = entry(
        10,
        "Time after which a draining worker's streams go on at another one, where they can (as after a break, see "
        "retries.maxContinuations), one takes them, and they have more left than computing their prompt again takes; seconds. "
        "null: never, a drain waits for them within terminationGracePeriodSeconds.",
    )


class HealthConfig(SpecModel):
    """How the router watches its workers."""

    interval_seconds: Seconds = entry(1, "Time between health checks and metric scrapes; real floor 0.1 s.")
    timeout_real_seconds: Seconds = entry(2, "Time for one check; real seconds.")
    unhealthy_after: Annotated[Integer, Field(ge=1, le=100)] = entry(
        3, "Failed checks in a row that make a worker unhealthy."
    )
    unreachable_real_seconds: Seconds = entry(
        20,
        "Time without an answer to a health check and without a byte in any stream of a worker, as of one on a "
        "lost node, after which its requests are tried elsewhere or end with an error; real seconds.",
    )
    stall_real_seconds: Seconds | None = entry(
        None,
        "Time in which a worker, or one of its data-parallel ranks, has requests and reports no token, after which it "
        "is unhealthy though its health check succeeds: its requests are tried elsewhere or end with an error, and the "
        f"local backend starts it again; real seconds, null: the runtime's own, {STALL_REAL_S:g} for simulated engines, "
        f"{ENGINE_STALL_REAL_S:g} for others.",
    )


class GatewayConfig(SpecModel):
    """The router as the endpoint picker of a Gateway, which relays the requests in its place; needs penstock[gateway]."""

    enabled: Flag = entry(
        False, "Answer a Gateway's Envoy; on Kubernetes also make the InferencePool that an HTTPRoute names."
    )
    port: Port = entry(9002, "TCP port on which Envoy asks, by ext_proc.")
    failure_mode: GatewayFailureMode = entry(
        GatewayFailureMode.CLOSE,
        "Without the picker, FailClose refuses requests and FailOpen sends them to any worker, as far as the "
        "Gateway can; on Kubernetes.",
    )


_TAKEN = (SIDE_CHANNEL_PORT, WORKER_PORT)
_KV_EVENTS_CLASHES = sorted({port - below for port in _TAKEN for below in (0, 1)})


class RouterConfig(SpecModel):
    """The graph's router."""

    policy: PolicyName = entry(
        "prefix-cost",
        "How a worker is chosen: prefix-cost, dualmap, pair-cost, cache-affinity, least-loaded, min-ttft, preble, "
        "kv-cost, round-robin, or the name under which an installed package registers its own.",
    )
    policy_parameters: dict[str, JsonValue] | None = entry(
        None, "What the policy itself reads, by the names of its parameters. null: its defaults."
    )
    ttft_slo_seconds: Seconds = entry(5, "TTFT that SLO-aware policies aim for; seconds.")
    session_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=64)] | None = entry(
        None,
        "Request header; requests of equal value stay on one prefill (or aggregated) worker under a "
        "policy that places by prefix. null: none.",
    )
    tokenizer: Text | None = entry(
        None,
        "The model's tokenizer.json as the router finds it: prefixes are then compared by tokens, and "
        "prompts counted exactly, chats by the template beside it. Needs penstock[tokenizer]. simulated: the tokens of simulated workers. null: by bytes.",
    )
    kv_events_port: Port | None = entry(
        None,
        "Port on which each worker publishes its KV cache's changes (vLLM's ZMQ events); the router then "
        "follows them. Needs tokenizer and penstock[kv-events]. On one host each worker gets an address of its own, in a "
        "cluster the port after it (65534 after 65535) answers for events that were missed. null: none.",
    )
    dualmap: DualmapConfig = entry(DualmapConfig(), "Settings of policies dualmap and pair-cost.")
    admission: AdmissionConfig = entry(AdmissionConfig(), "Refusal while workers are busy.")
    tiers: TiersConfig = entry(TiersConfig(), "Priority tiers.")
    gateway: GatewayConfig = entry(GatewayConfig(), "Endpoint picker of a Gateway.")
    auth: AuthConfig = entry(AuthConfig(), "API keys.")
    cors_allowed_origins: tuple[Origin, ...] = entry(
        (),
        "Origins whose web pages may call /v1, as https://app.example.com; * allows all. Empty: none.",
        max_length=64,
    )
    prefill_queue: PrefillQueueConfig = entry(PrefillQueueConfig(), "Requests waiting for prefill.")
    decode_queue: DecodeQueueConfig = entry(DecodeQueueConfig(), "Prefilled requests waiting for decode.")
    prefill_deflection: PrefillDeflectionConfig = entry(
        PrefillDeflectionConfig(), "Prompts computed by decode workers."
    )
    limits: LimitsConfig = entry(LimitsConfig(), "Bounds of one request.")
    breaker: BreakerConfig = entry(BreakerConfig(), "Circuit breaker of each worker.")
    retries: RetriesConfig = entry(RetriesConfig(), "Retries and their budget.")
    drain: DrainConfig = entry(DrainConfig(), "Streams of draining workers.")
    health: HealthConfig = entry(HealthConfig(), "Checks of the workers.")

    rules = (
        Rule(
            key="kvEventsPort",
            must=f"kvEventsPort and the port after it are none of {SIDE_CHANNEL_PORT} and {WORKER_PORT}",
            cel=f"!(self in {_KV_EVENTS_CLASHES})",
            holds=lambda router: router.kv_events_port not in _KV_EVENTS_CLASHES,
            text=f"%d, or the port after it for replays, is one of {SIDE_CHANNEL_PORT} and {WORKER_PORT}, which workers have",
            values=("self",),
            remedy="choose another, such as 5557",
        ),
        Rule(
            path="prefillDeflection.enabled",
            must="prefillDeflection.enabled and tiers.enabled are not both true",
            cel="!self.prefillDeflection.enabled || !self.tiers.enabled",
            holds=lambda router: not (router.prefill_deflection.enabled and router.tiers.enabled),
            text="true, but a prompt on a decode worker waits for no tier's turn",
            remedy="turn prefillDeflection or tiers off",
        ),
        Rule(
            path="gateway.port",
            must=f"gateway.port is not {WORKER_PORT}",
            cel=f"self.gateway.port != {WORKER_PORT}",
            holds=lambda router: router.gateway.port != WORKER_PORT,
            text="%d is the router's HTTP port in its pods",
            values=("self.gateway.port",),
            remedy="choose another, such as 9002",
        ),
    )
