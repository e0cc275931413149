"""What a manifest's rules need to know of a runtime. Pure.

The rules of the API server are made of the runtimes that ship with Penstock, so their traits stand here. Those of any
other come with its distribution, by the entry point `GROUP`; an API server cannot know them, so it allows there
what any runtime may, and `penstock validate` and the operator check the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from penstock.api.enums import KvConnector
from penstock.api.rule import Rule
from penstock.core import metric_names as names
from penstock.core.plugins import plugin, registered
from penstock.core.worker_metrics import ENGINE_STALL_REAL_S, METRICS_PATH, STALL_REAL_S, OwnNames

GROUP: Final = "penstock.runtimes"
"""Entry points whose objects follow `penstock.runtimes.Runtime`."""

DEFAULT_RUNTIME: Final = "vllm"

PENSTOCK_IMAGE: Final = "ghcr.io/penstock/penstock:0.1.0"
"""Router, planner and simulated workers."""


@dataclass(frozen=True, slots=True)
class OwnFrontend:
    """A runtime's own server of requests, which takes the place of Penstock's router.

    Attributes:
        policies: Routing policies that it can follow, or come close to, and its own word for each.
    """

    name: str
    policies: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTraits:
    """What is the same for every graph of a runtime.

    Attributes:
        image: Container image of its workers where a graph names none.
        is_simulated: Its workers are Penstock's own program: they take time and hold GPUs by a latency profile.
        has_mocker: It has a program that models its workers, ``engine.mocker``.
        has_request_limit: Its workers follow ``engine.requestLimit``.
        serves_several_names: Its workers answer to ``model.aliases``, too, and load ``model.adapters``.
        switches_roles: A worker that has drained serves the other role of prefill and decode at once, with the command that it was
            started with under ``engine.switchable``.
        frontend: Takes the router's place; None: Penstock's router does.
        health_path: Answers 200 where a worker takes requests; asked often, so it must be quick.
        metrics_path: Has the workers' metrics as Prometheus' text.
        stall_real_s: Its workers may have requests and make no token for this long, real seconds, where a graph does
            not say.
        has_leases: Its prefill workers hold a prompt's KV for the manifest's ``lease``.
        publishes_kv_events: Its workers publish what their caches hold, as vLLM does, for ``router.kvEventsPort``.
        has_priorities: Its workers take a request's ``priority``, and serve a low one first, for ``router.tiers``.
        connectors: Values of ``engine.kvConnector``.
        offloads_kv: Its workers follow ``engine.kvOffload``.
        serves_tls: Its workers follow ``engine.tls``.
        spans_nodes: A replica may have several nodes.
        pairs_by_version: KV goes between workers of one version alone, which they say at ``/version``.
        metric_source: Entry point of group ``penstock.metric_sources`` that reads the router, or what takes its place.
        metric_names: Its workers' own name by vLLM's, where they differ, as on the page:
            ``{"vllm:kv_cache_usage_perc": "acme:kv_usage"}``. The units are vLLM's; several gauges are added.
        request_gauge: Gauge in which a worker counts all its requests itself; where a page has it, vLLM's may be absent, so
            that a worker can drain by it alone.
        rules: Further rules of ``spec``, for a runtime that does not ship with Penstock.
    """

    image: str
    is_simulated: bool = False
    has_mocker: bool = False
    has_request_limit: bool = False
    serves_several_names: bool = False
    switches_roles: bool = False
    frontend: OwnFrontend | None = None
    health_path: str = "/health"
    metrics_path: str = METRICS_PATH
    stall_real_s: float = ENGINE_STALL_REAL_S
    has_leases: bool = True
    publishes_kv_events: bool = True
    has_priorities: bool = True
    connectors: frozenset[KvConnector] = frozenset({KvConnector.NIXL})
    offloads_kv: bool = False
    serves_tls: bool = False
    spans_nodes: bool = True
    pairs_by_version: bool = False
    metric_source: str = "router"
    metric_names: OwnNames = field(default_factory=dict)
    request_gauge: str | None = None
    rules: tuple[Rule[Any], ...] = ()


DYNAMO_FRONTEND: Final = OwnFrontend(
    "Dynamo",
    {
        "round-robin": "round-robin",
        "least-loaded": "least-loaded",
        "prefix-cost": "kv",
        "kv-cost": "kv",
    },
)
"""If two policies have the same ``--router-mode``, the last one is what an import makes of it; prefix-cost is the default."""

SHIPPED: Final[Mapping[str, RuntimeTraits]] = {
    "vllm": RuntimeTraits(
        image="vllm/vllm-openai:v0.32.0",
        connectors=frozenset(KvConnector),
        offloads_kv=True,
        serves_tls=True,
        serves_several_names=True,
        switches_roles=True,
        pairs_by_version=True,
    ),
    "dynamo": RuntimeTraits(
        image="nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1",
        has_mocker=True,
        has_request_limit=True,
        frontend=DYNAMO_FRONTEND,
        metric_source="dynamo",
        request_gauge="dynamo_component_inflight_requests",
    ),
    "sglang": RuntimeTraits(
        image="lmsysorg/sglang:v0.5.23",
        # Its /health computes a token, which takes a second at least.
        health_path="/ready",
        serves_tls=True,
        has_leases=False,
        metric_names={
            names.VLLM_RUNNING: (
                "sglang:num_running_reqs",
                "sglang:num_prefill_bootstrap_queue_reqs",
                "sglang:num_prefill_inflight_queue_reqs",
                "sglang:num_decode_transfer_queue_reqs",
            ),
            names.VLLM_WAITING: ("sglang:num_queue_reqs", "sglang:num_decode_prealloc_queue_reqs"),
            names.VLLM_KV_USAGE: "sglang:token_usage",
            names.VLLM_PROMPT_TOKENS + names.COUNTER_SUFFIX: "sglang:prompt_tokens_total",
            names.VLLM_GENERATION_TOKENS + names.COUNTER_SUFFIX: "sglang:generation_tokens_total",
        },
    ),
    "trtllm": RuntimeTraits(
        image="nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc24",
        has_leases=False,
        publishes_kv_events=False,
        has_priorities=False,
        spans_nodes=False,
        metrics_path="/prometheus/metrics",
        # Its counters of tokens rise as requests end: an engine at work on long answers would look as one that hangs.
        metric_names={
            names.VLLM_RUNNING: "trtllm_num_requests_running",
            names.VLLM_WAITING: "trtllm_num_requests_waiting",
            names.VLLM_KV_USAGE: "trtllm_kv_cache_utilization",
        },
    ),
    "simulated": RuntimeTraits(
        image=PENSTOCK_IMAGE,
        is_simulated=True,
        serves_tls=True,
        has_request_limit=True,
        serves_several_names=True,
        switches_roles=True,
        stall_real_s=STALL_REAL_S,
    ),
}
"""The runtimes of this distribution; the rules name them in this order."""

_UNKNOWN = RuntimeTraits(
    image="", has_mocker=True, has_request_limit=True, serves_several_names=True, switches_roles=True
)
"""Traits of a name that no distribution registered: one rule refuses it, and the others keep silent."""


def traits_of(runtime: str) -> RuntimeTraits:
    """Return a runtime's traits, which a distribution may bring.

    Raises:
        ConfigError: its distribution is broken.
    """
    shipped = SHIPPED.get(runtime)
    if shipped is not None:
        return shipped
    found = plugin(GROUP, runtime)
    return _UNKNOWN if found is None else found.traits


def is_known(runtime: str) -> bool:
    """Return whether this installation has a runtime."""
    return traits_of(runtime) is not _UNKNOWN


def known_runtimes() -> tuple[str, ...]:
    """Return the names of every installed runtime, those that ship first."""
    return tuple(dict.fromkeys((*SHIPPED, *registered(GROUP))))


@cache
def all_metric_names() -> tuple[OwnNames, ...]:
    """Return vLLM's names of metrics, none, and those of every installed runtime that has own ones."""
    return ({}, *(own for each in known_runtimes() if (own := traits_of(each).metric_names)))


@cache
def request_gauges() -> tuple[str, ...]:
    """Return the gauges in which workers of the installed runtimes count their requests."""
    found = (traits_of(name).request_gauge for name in known_runtimes())
    return tuple(dict.fromkeys(each for each in found if each is not None))


class RuntimesWith:
    """The runtimes that have a trait, for a rule in Python and in CEL.

    Attributes:
        names: Of those that ship.
        cel: True for a ``spec`` of one of them, and for one of another runtime if all but one of them have it.
    """

    def __init__(self, has: Callable[[RuntimeTraits], bool]) -> None:
        self._has = has
        self.names = tuple(name for name, traits in SHIPPED.items() if has(traits))
        self.cel = self._cel()

    def __call__(self, runtime: str) -> bool:
        """Return whether a runtime is one of them."""
        return self._has(traits_of(runtime))

    def _cel(self) -> str:
        others = [name for name in SHIPPED if name not in self.names]
        if len(others) == 1:
            return f"self.runtime != '{others[0]}'"
        return " || ".join(f"self.runtime == '{name}'" for name in self.names)


SIMULATED_ENGINE = RuntimesWith(lambda traits: traits.is_simulated)
REAL_ENGINE = RuntimesWith(lambda traits: not traits.is_simulated)
OWN_FRONTEND = RuntimesWith(lambda traits: traits.frontend is not None)
PENSTOCK_ROUTER = RuntimesWith(lambda traits: traits.frontend is None)
HAS_MOCKER = RuntimesWith(lambda traits: traits.has_mocker)
HAS_REQUEST_LIMIT = RuntimesWith(lambda traits: traits.has_request_limit)
HAS_LEASES = RuntimesWith(lambda traits: traits.has_leases)
HAS_PRIORITIES = RuntimesWith(lambda traits: traits.has_priorities)
HAS_MOONCAKE = RuntimesWith(lambda traits: KvConnector.MOONCAKE in traits.connectors)
OFFLOADS_KV = RuntimesWith(lambda traits: traits.offloads_kv)
SERVES_TLS = RuntimesWith(lambda traits: traits.serves_tls)
SPANS_NODES = RuntimesWith(lambda traits: traits.spans_nodes)
PUBLISHES_KV_EVENTS = RuntimesWith(lambda traits: traits.publishes_kv_events)
SEVERAL_NAMES = RuntimesWith(lambda traits: traits.serves_several_names)
SWITCHES_ROLES = RuntimesWith(lambda traits: traits.switches_roles)
KNOWN_BATCH_LIMIT = RuntimesWith(lambda traits: traits.is_simulated or traits.frontend is not None)
