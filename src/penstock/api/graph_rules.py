"""The rules that relate several services of a graph to each other, or to its runtime and that runtime's own frontend. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from pydantic.alias_generators import to_snake

from penstock.api.base import DNS_LABEL_PATTERN
from penstock.api.budget_rules import BUDGET_RULES, ZERO_RULES, exists
from penstock.api.enums import WORKER_ROLES, KvConnector, Role
from penstock.api.frontend_rules import frontend_rules, policy_rule
from penstock.api.graph import GraphDeployment, GraphSpec
from penstock.api.lease_rules import SPEC_LEASE_RULES
from penstock.api.rule import Breach, KeyPath, Rule, dotted, immutable, quoted
from penstock.api.runtimes import (
    HAS_MOCKER,
    HAS_MOONCAKE,
    HAS_PRIORITIES,
    HAS_REQUEST_LIMIT,
    KNOWN_BATCH_LIMIT,
    OFFLOADS_KV,
    PUBLISHES_KV_EVENTS,
    REAL_ENGINE,
    SERVES_TLS,
    SEVERAL_NAMES,
    SHIPPED,
    SIMULATED_ENGINE,
    SPANS_NODES,
    is_known,
    known_runtimes,
)
from penstock.api.schedule_rules import SCHEDULE_RULES
from penstock.api.switch_rules import SWITCH_RULES
from penstock.core.simulated_tokens import SIMULATED

MAX_CHILD_NAME = 52
"""A StatefulSet appends an 11-character revision hash to a label value, which may hold 63."""

PLANNER_SERVICE = "planner"
"""Name of the planner's process among a graph's services."""

_LABEL = "at most 63 lower-case letters, digits and hyphens, beginning and ending with a letter or digit"


def _long_names(graph: GraphDeployment) -> Iterator[Breach]:
    name = graph.metadata.name
    for service in graph.spec.services:
        length = len(name) + len(service) + 1
        if length > MAX_CHILD_NAME:
            path: KeyPath = ("spec", "services", service)
            yield Breach((name, service, length), path, (("metadata", "name"),))


GraphDeployment.rules = (
    Rule(
        path="metadata.name",
        must="a graph's name is a DNS label",
        cel=f"self.metadata.name.matches('{DNS_LABEL_PATTERN}')",
        text="%s is not a DNS label",
        values=("self.metadata.name",),
        remedy=f"use {_LABEL}",
    ),
    Rule(
        path="spec.services",
        at="spec.services.%s",
        must=f"GRAPH-SERVICE has at most {MAX_CHILD_NAME} characters",
        cel=f"self.spec.services.all(k, size(self.metadata.name) + size(k) < {MAX_CHILD_NAME})",
        find=_long_names,
        first=f"self.spec.services.filter(k, size(self.metadata.name) + size(k) >= {MAX_CHILD_NAME})",
        text=f"%s-%s has %d characters, at most {MAX_CHILD_NAME} fit a child's name",
        values=("self.metadata.name", "k", "size(self.metadata.name) + size(k) + 1"),
        remedy="shorten the graph's or the service's name",
    ),
)


def _role_paths(spec: GraphSpec) -> tuple[KeyPath, ...]:
    return tuple(("services", name, "role") for name in spec.services)


def _second_of_a_role(spec: GraphSpec) -> Iterator[Breach]:
    for role in WORKER_ROLES:
        first, *further = spec.services_of(role) or ("",)
        for extra in further:
            yield Breach((first, role), ("services", extra, "role"), _role_paths(spec))


def _mixed_kinds(spec: GraphSpec) -> Iterator[Breach]:
    if spec.service(Role.AGGREGATED) and (spec.service(Role.PREFILL) or spec.service(Role.DECODE)):
        yield Breach(related=_role_paths(spec))


def _missing_workers(spec: GraphSpec) -> Iterator[Breach]:
    missing = [role for role in (Role.PREFILL, Role.DECODE) if spec.service(role) is None]
    if missing and spec.service(Role.AGGREGATED) is None:
        yield Breach(values=(" and ".join(missing),), related=_role_paths(spec))


_WORKERS = (
    f"[{', '.join(map(quoted, WORKER_ROLES))}].map(r, self.services.filter(k, self.services[k].role == r))"
)

_ROLE_RULES: tuple[Rule[GraphSpec], ...] = (
    Rule(
        path="services",
        at="spec.services.%s.role",
        must="a graph has at most one service per worker role",
        cel=f"{_WORKERS}.all(names, size(names) <= 1)",
        find=_second_of_a_role,
        text="services.%s has role %s too",
        remedy="keep one service per worker role",
        message=(
            f"{_WORKERS}.filter(names, size(names) > 1).map(names, 'spec.services.%s.role: services.%s has role %s too; keep "
            "one service per worker role'.format([names[1], names[0], self.services[names[0]].role]))[0]"
        ),
    ),
    Rule(
        path="services",
        must="aggregated workers are not combined with prefill or decode",
        cel=f"!{exists(Role.AGGREGATED)} || !({exists(Role.PREFILL)} || {exists(Role.DECODE)})",
        find=_mixed_kinds,
        text="aggregated workers are combined with prefill or decode",
        remedy="keep either kind",
    ),
    Rule(
        path="services",
        must="a graph has an aggregated service, or prefill and decode",
        cel=f"{exists(Role.AGGREGATED)} || ({exists(Role.PREFILL)} && {exists(Role.DECODE)})",
        find=_missing_workers,
        text="no %s service",
        values=(
            f"{exists(Role.DECODE)} ? 'prefill' : {exists(Role.PREFILL)} ? 'decode' : 'prefill and decode'",
        ),
        remedy="declare prefill and decode, or one aggregated service",
    ),
)


def _unknown_node_pools(spec: GraphSpec) -> Iterator[Breach]:
    for name, service in spec.services.items():
        if service.node_pool is not None and service.node_pool not in spec.node_pools:
            known = tuple(sorted(spec.node_pools))
            yield Breach(
                (service.node_pool, known), ("services", name, "nodePool"), related=(("nodePools",),)
            )


_POOL_KNOWN = "has(self.nodePools) && self.services[k].nodePool in self.nodePools"

_NAME_RULES: tuple[Rule[GraphSpec], ...] = (
    Rule(
        path="services",
        at=f"spec.services.{PLANNER_SERVICE}",
        must=f"no service is called {PLANNER_SERVICE}",
        cel=f"!('{PLANNER_SERVICE}' in self.services)",
        find=lambda spec: (
            (Breach(path=("services", PLANNER_SERVICE), related=()),)
            if PLANNER_SERVICE in spec.services
            else ()
        ),
        text="the planner's process has this name",
        remedy="rename the service",
    ),
    *(
        Rule(
            path=key,
            at=f"spec.{key}.%s",
            must=f"a name in {key} is a DNS label",
            cel=f"{guard}self.{key}.all(k, size(k) <= 63 && k.matches('{DNS_LABEL_PATTERN}'))",
            first=f"self.{key}.filter(k, size(k) > 63 || !k.matches('{DNS_LABEL_PATTERN}'))",
            text="not a DNS label",
            remedy=f"use {_LABEL}",
        )
        for key, guard in (("services", ""), ("nodePools", "!has(self.nodePools) || "))
    ),
    Rule(
        path="services",
        at="spec.services.%s.nodePool",
        must="a service's nodePool is a key of nodePools",
        cel=f"self.services.all(k, !has(self.services[k].nodePool) || ({_POOL_KNOWN}))",
        find=_unknown_node_pools,
        first=f"self.services.filter(k, has(self.services[k].nodePool) && !({_POOL_KNOWN}))",
        text='"%s" is not in nodePools %s',
        values=("self.services[k].nodePool", "has(self.nodePools) ? self.nodePools.map(p, p) : []"),
        remedy="declare it or choose a declared one",
    ),
)


def _is_given(spec: GraphSpec, key: str) -> bool:
    return getattr(spec.engine.preemption, to_snake(key)) is not None


def _preemption_rules(key: str, lacks: str) -> tuple[Rule[GraphSpec], ...]:
    """Return what a key of ``engine.preemption`` needs to have an effect; ``lacks`` says what vLLM does not do."""
    path = f"engine.preemption.{key}"
    # A section without defaults is itself absent where nothing in it is given.
    absent = f"!has(self.engine.preemption) || !has(self.{path})"
    return (
        Rule(
            path=path,
            must=f"{path} needs router.tiers.enabled",
            cel=f"{absent} || self.router.tiers.enabled",
            holds=lambda spec: not _is_given(spec, key) or spec.router.tiers.enabled,
            text="%s, but router.tiers is not enabled, so that no request has a tier",
            values=(f"self.{path}",),
            remedy="enable router.tiers or remove it",
        ),
        Rule(
            path=path,
            must=f"{path} needs runtime {' or '.join(SIMULATED_ENGINE.names)}",
            cel=f"{absent} || {SIMULATED_ENGINE.cel}",
            holds=lambda spec: not _is_given(spec, key) or SIMULATED_ENGINE(spec.runtime),
            text=f"%s, but workers of runtime %s {lacks}",
            values=(f"self.{path}", "self.runtime"),
            remedy="remove it; --scheduling-policy priority alone orders their requests by tier",
        ),
    )


def _repeated_names(spec: GraphSpec) -> Iterator[Breach]:
    """Yield aliases and adapters whose name already is the model's, a tier's or an earlier one's."""
    taken = {spec.served_name: "the model's own name"}
    taken |= dict.fromkeys(spec.router.tiers.models, "a name of router.tiers.models")
    names: list[tuple[str, KeyPath]] = [
        (name, ("model", "aliases", number)) for number, name in enumerate(spec.model.aliases)
    ]
    names += [
        (each.name, ("model", "adapters", number, "name")) for number, each in enumerate(spec.model.adapters)
    ]
    for name, path in names:
        if name in taken:
            yield Breach((name, taken[name]), path)
        taken.setdefault(name, f"that of {dotted(path)}")


def _needs_several_names(key: str) -> Rule[GraphSpec]:
    path = f"model.{key}"
    return Rule(
        path=path,
        must=f"{path} needs runtime {' or '.join(SEVERAL_NAMES.names)}",
        cel=f"!has(self.{path}) || size(self.{path}) == 0 || {SEVERAL_NAMES.cel}",
        holds=lambda spec: not getattr(spec.model, key) or SEVERAL_NAMES(spec.runtime),
        text="given, but workers of runtime %s answer to one name",
        values=("self.runtime",),
        remedy="remove it or choose another runtime",
    )


_NAMED_MODEL_RULES: tuple[Rule[GraphSpec], ...] = (
    *map(_needs_several_names, ("aliases", "adapters")),
    Rule(
        path="model",
        must="every name that clients may request occurs once among the model's, router.tiers.models and model.adapters",
        cel=None,
        find=_repeated_names,
        text="%s is already %s",
        values=(),
        remedy="give each a name of its own",
    ),
)

_PREEMPTION_RULES: tuple[Rule[GraphSpec], ...] = (
    *_preemption_rules("maxPerRequest", "count no preemptions of a request"),
    *_preemption_rules("premiumReservedFraction", "reserve no KV blocks"),
    *_preemption_rules("swapGigabytes", "recompute and do not swap"),
    *_preemption_rules("dropAboveSeconds", "drop no request"),
)


def _unknown_runtime(spec: GraphSpec) -> Iterator[Breach]:
    if is_known(spec.runtime):
        return
    known = known_runtimes()
    close = difflib.get_close_matches(spec.runtime, known, n=1)
    meant = (
        f"did you mean {close[0]}?" if close else "choose one of them, or install the package that adds it"
    )
    yield Breach((spec.runtime, ", ".join(known)), remedy=meant)


_RUNTIME_RULES: tuple[Rule[GraphSpec], ...] = (
    Rule(
        path="engine.mocker",
        must=f"engine.mocker needs runtime {' or '.join(HAS_MOCKER.names)}",
        cel=f"!self.engine.mocker || {HAS_MOCKER.cel}",
        holds=lambda spec: not spec.engine.mocker or HAS_MOCKER(spec.runtime),
        text="true, but runtime %s has no mocker",
        values=("self.runtime",),
        remedy=f"set runtime: {HAS_MOCKER.names[0]} or remove it",
    ),
    Rule(
        path="engine.pythonEnvironment",
        must=f"engine.pythonEnvironment needs runtime {' or '.join(REAL_ENGINE.names)}",
        cel=f"!has(self.engine.pythonEnvironment) || {REAL_ENGINE.cel}",
        holds=lambda spec: spec.engine.python_environment is None or REAL_ENGINE(spec.runtime),
        text="%s, but workers of runtime simulated run in Penstock's own environment",
        values=("self.engine.pythonEnvironment",),
        remedy="remove it or choose another runtime",
    ),
    Rule(
        path="engine.requestLimit",
        must=f"engine.requestLimit needs runtime {' or '.join(HAS_REQUEST_LIMIT.names)}",
        cel=f"!has(self.engine.requestLimit) || {HAS_REQUEST_LIMIT.cel}",
        holds=lambda spec: spec.engine.request_limit is None or HAS_REQUEST_LIMIT(spec.runtime),
        text="%d, but workers of runtime %s refuse nothing by number",
        values=("self.engine.requestLimit", "self.runtime"),
        remedy="remove it and bound the load with router.admission and engine.maxRunningRequests",
    ),
    Rule(
        path="router.admission.activePrefillTokensThresholdFrac",
        must="router.admission.activePrefillTokensThresholdFrac under runtime vllm needs engine.maxBatchTokens",
        cel=(
            f"!has(self.router.admission.activePrefillTokensThresholdFrac) || {KNOWN_BATCH_LIMIT.cel} || "
            "has(self.engine.maxBatchTokens)"
        ),
        holds=lambda spec: (
            spec.router.admission.active_prefill_tokens_threshold_frac is None
            or KNOWN_BATCH_LIMIT(spec.runtime)
            or spec.engine.max_batch_tokens is not None
        ),
        text="a multiple of the batch token limit, which the router does not know of vLLM's own default",
        remedy="set engine.maxBatchTokens, or activePrefillTokensThreshold",
    ),
    *(policy_rule(name, traits.frontend) for name, traits in SHIPPED.items() if traits.frontend),
    Rule(
        path="router.gateway.enabled",
        must="router.gateway.enabled needs a router service",
        cel="!self.router.gateway.enabled || self.services.exists(k, self.services[k].role == 'router')",
        holds=lambda spec: (
            not spec.router.gateway.enabled
            or any(each.role is Role.ROUTER for each in spec.services.values())
        ),
        text="true, but no service of role router answers a Gateway",
        remedy="declare a router, or remove it",
    ),
    Rule(
        path="router.tokenizer",
        must=f"router.tokenizer {SIMULATED} needs runtime simulated",
        cel=f"!has(self.router.tokenizer) || self.router.tokenizer != '{SIMULATED}' || {SIMULATED_ENGINE.cel}",
        holds=lambda spec: spec.router.tokenizer != SIMULATED or SIMULATED_ENGINE(spec.runtime),
        text=f"{SIMULATED}, but workers of runtime %s have their model's",
        values=("self.runtime",),
        remedy="give its tokenizer.json",
    ),
    Rule(
        path="router.kvEventsPort",
        must=f"router.kvEventsPort needs runtime {' or '.join(PUBLISHES_KV_EVENTS.names)}",
        cel=f"!has(self.router.kvEventsPort) || {PUBLISHES_KV_EVENTS.cel}",
        holds=lambda spec: spec.router.kv_events_port is None or PUBLISHES_KV_EVENTS(spec.runtime),
        text="%d, but workers of runtime %s publish no events that the router reads",
        values=("self.router.kvEventsPort", "self.runtime"),
        remedy="remove it",
    ),
    Rule(
        path="router.tiers.enabled",
        must=f"router.tiers needs runtime {' or '.join(HAS_PRIORITIES.names)}",
        cel=f"!self.router.tiers.enabled || {HAS_PRIORITIES.cel}",
        holds=lambda spec: not spec.router.tiers.enabled or HAS_PRIORITIES(spec.runtime),
        text="true, but workers of runtime %s take no priority of a request",
        values=("self.runtime",),
        remedy="remove it",
    ),
    Rule(
        path="engine.kvConnector",
        must=f"engine.kvConnector mooncake needs runtime {' or '.join(HAS_MOONCAKE.names)}",
        cel=f"self.engine.kvConnector != 'mooncake' || {HAS_MOONCAKE.cel}",
        holds=lambda spec: spec.engine.kv_connector is not KvConnector.MOONCAKE or HAS_MOONCAKE(spec.runtime),
        text="mooncake, but workers of runtime %s do not have it",
        values=("self.runtime",),
        remedy="remove it",
    ),
    Rule(
        path="engine.kvOffload",
        must=f"engine.kvOffload needs runtime {' or '.join(OFFLOADS_KV.names)}",
        cel=f"!has(self.engine.kvOffload) || {OFFLOADS_KV.cel}",
        holds=lambda spec: spec.engine.kv_offload is None or OFFLOADS_KV(spec.runtime),
        text="given, but workers of runtime %s do not follow it",
        values=("self.runtime",),
        remedy="remove it",
    ),
    Rule(
        path="engine.tls",
        must=f"engine.tls needs runtime {' or '.join(SERVES_TLS.names)}",
        cel=f"!has(self.engine.tls) || {SERVES_TLS.cel}",
        holds=lambda spec: spec.engine.tls is None or SERVES_TLS(spec.runtime),
        text="given, but workers of runtime %s speak http alone",
        values=("self.runtime",),
        remedy="remove it",
    ),
    Rule(
        path="engine.tls",
        must="engine.tls excludes router.gateway.enabled",
        cel="!has(self.engine.tls) || !self.router.gateway.enabled",
        holds=lambda spec: spec.engine.tls is None or not spec.router.gateway.enabled,
        text="given, but router.gateway.enabled is true, and the Gateway relays to workers in plain http",
        remedy="remove one of the two",
    ),
    Rule(
        # EndpointSlices do not say which pod speaks what.
        path="engine.tls",
        must="engine.tls stays given, or stays null",
        cel=("has(self.engine.tls) == (has(oldSelf.engine) && has(oldSelf.engine.tls))"),
        text="was given or removed, and is immutable",
        remedy="keep it, or make a new graph",
    ),
    Rule(
        path="services",
        must=f"nodesPerReplica above 1 needs runtime {' or '.join(SPANS_NODES.names)}",
        cel=f"{SPANS_NODES.cel} || self.services.all(k, self.services[k].nodesPerReplica == 1)",
        holds=lambda spec: (
            SPANS_NODES(spec.runtime) or all(each.nodes_per_replica == 1 for each in spec.services.values())
        ),
        text="a service has nodesPerReplica above 1, but a replica of runtime %s has one node",
        values=("self.runtime",),
        remedy="remove it",
    ),
    Rule(
        # A router that makes its keys of other tokens than its workers' would wait for events that never come.
        path="router.tokenizer",
        must=f"router.kvEventsPort under runtime simulated needs tokenizer {SIMULATED}, if any",
        cel=(
            f"{REAL_ENGINE.cel} || !has(self.router.kvEventsPort) || !has(self.router.tokenizer) || "
            f"self.router.tokenizer == '{SIMULATED}'"
        ),
        holds=lambda spec: (
            REAL_ENGINE(spec.runtime)
            or spec.router.kv_events_port is None
            or spec.router.tokenizer in {None, SIMULATED}
        ),
        text="%s, but the events of simulated workers name tokens of their own",
        values=("self.router.tokenizer",),
        remedy=f"write {SIMULATED}, or remove kvEventsPort",
    ),
)

_PLANNER_RULES: tuple[Rule[GraphSpec], ...] = (
    Rule(
        path="planner.sla.profile",
        must="planner.mode sla needs planner.sla.profile, or runtime simulated, whose engine.profile is used",
        cel=(
            "!self.planner.enabled || self.planner.mode != 'sla' || has(self.planner.sla.profile) || "
            f"{SIMULATED_ENGINE.cel}"
        ),
        holds=lambda spec: (
            not spec.needs_performance_profile
            or spec.planner.sla.profile is not None
            or SIMULATED_ENGINE(spec.runtime)
        ),
        text="null, but mode sla plans by a performance profile, which runtime %s does not have",
        values=("self.runtime",),
        remedy="run `penstock profile --config FILE --output-dir DIR` and name what it writes, or choose mode adaptive",
    ),
)

GraphSpec.rules = (
    *_ROLE_RULES,
    *_NAME_RULES,
    *BUDGET_RULES,
    *_RUNTIME_RULES,
    *_NAMED_MODEL_RULES,
    *_PREEMPTION_RULES,
    *_PLANNER_RULES,
    *ZERO_RULES,
    *SCHEDULE_RULES,
    *SPEC_LEASE_RULES,
    *SWITCH_RULES,
    *(
        rule
        for name, traits in SHIPPED.items()
        if traits.frontend
        for rule in frontend_rules(name, traits.frontend)
    ),
    Rule(
        path="runtime",
        must="a runtime is one that is installed with Penstock where the graph is read",
        cel=None,
        find=_unknown_runtime,
        text='"%s" is not one of %s',
        remedy="choose one of them",
    ),
    immutable("runtime", "runtime"),
    immutable("operatorClass", "operator class"),
)
