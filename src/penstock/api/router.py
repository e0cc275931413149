"""Settings of the router: policy, keys, limits and gateway; those of its tiers, queues and workers are alongside it.

Seconds are simulated seconds unless the name says real.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, JsonValue, StringConstraints

from penstock.api.base import (
    Flag,
    Integer,
    Port,
    Seconds,
    SpecModel,
    Text,
    UnprivilegedPort,
    WholeSeconds,
    entry,
    one_of,
)
from penstock.api.enums import GatewayFailureMode
from penstock.api.router_queues import (
    AdmissionConfig,
    DecodeQueueConfig,
    PrefillDeflectionConfig,
    PrefillQueueConfig,
)
from penstock.api.router_tiers import TiersConfig
from penstock.api.router_workers import BreakerConfig, DrainConfig, HealthConfig, RetriesConfig
from penstock.api.rule import Rule
from penstock.core.plugins import registered
from penstock.core.ports import SIDE_CHANNEL_PORT, WORKER_PORT

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


class AuthConfig(SpecModel):
    """API keys that clients must present as bearer tokens; none set: no key needed."""

    api_keys_secret: Text | None = entry(None, "Secret whose values are the accepted keys; on Kubernetes.")
    api_keys_file: Text | None = entry(None, "File with one accepted key a line; for local processes.")


class LimitsConfig(SpecModel):
    """What one request may cost."""

    max_body_bytes: Annotated[Integer, Field(ge=1024, le=1 << 30)] = entry(
        16 << 20, "Largest request body; bytes."
    )
    max_header_bytes: Annotated[Integer, Field(ge=1024, le=1 << 20)] = entry(
        64 << 10, "Largest request head; bytes."
    )
    max_connections: Annotated[Integer, Field(ge=1, le=1_000_000)] = entry(
        10_000, "Maximum number of client connections at a time."
    )
    header_timeout_real_seconds: WholeSeconds = entry(
        30, "Time for a client to send head and body together; real seconds."
    )
    client_idle_timeout_real_seconds: WholeSeconds = entry(
        75,
        "How long a client's connection without a request stays open; real seconds. More than the load balancer's own, which else sends a "
        "request on a connection that just ends: Google's keep theirs for 600.",
    )
    connect_timeout_real_seconds: Seconds = entry(5, "Time for a connection to a worker; real seconds.")
    first_byte_timeout_seconds: WholeSeconds = entry(600, "Time for a worker's first byte; seconds.")
    idle_timeout_seconds: WholeSeconds = entry(600, "Maximum silence within a worker's stream; seconds.")
    request_timeout_seconds: WholeSeconds = entry(
        900, "Maximum duration of a request, from arrival to last byte; seconds."
    )


class GatewayTlsConfig(SpecModel):
    """TLS between a Gateway's Envoy and the endpoint picker."""

    enabled: Flag = entry(
        True, "Answer Envoy by TLS, as Envoy AI Gateway and kgateway require; false: in plain text."
    )
    secret: Text | None = entry(
        None,
        "Secret with the picker's certificate tls.crt and its key tls.key, read again when it changes; on Kubernetes. null: each picker "
        "makes a certificate for itself when it starts.",
    )
    folder: Text | None = entry(
        None, "Folder with the same two files; for local processes. null: as with secret."
    )


class GatewayConfig(SpecModel):
    """The router as the endpoint picker of a Gateway, which relays the requests in its place; needs penstock[gateway]."""

    enabled: Flag = entry(
        False, "Answer a Gateway's Envoy; on Kubernetes also make the InferencePool that an HTTPRoute names."
    )
    port: Port = entry(9002, "TCP port on which Envoy asks, by ext_proc.")
    tls: GatewayTlsConfig = entry(GatewayTlsConfig(), "How Envoy's connections to the picker are encrypted.")
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
        None, "Parameters of the policy itself, by name. null: its defaults."
    )
    session_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=64)] | None = entry(
        None,
        "Request header; requests of equal value stay on one prefill (or aggregated) worker under a "
        "policy that places by prefix. null: none.",
    )
    tokenizer: Text | None = entry(
        None,
        "The model's tokenizer.json as the router finds it: prefixes are then compared by tokens, and "
        "prompts counted exactly, chats by the template next to it. Needs penstock[tokenizer]. simulated: the tokens of simulated workers. null: by bytes.",
    )
    kv_events_port: UnprivilegedPort | None = entry(
        None,
        "Port on which each worker publishes its KV cache's changes (vLLM's ZMQ events); the router then "
        "follows them. Needs tokenizer and penstock[kv-events]. On one host each worker has its own address; on a cluster the "
        "next port (65534 after 65535) sends missed events again. null: none.",
    )
    keep_alive_seconds: WholeSeconds | None = entry(
        None,
        "Time between SSE comments to a stream that waits for its first token; seconds. A later error is an event in a 200. null: none.",
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
