"""Rules that relate several services of a graph to each other; the models call them.

Each function takes what it judges and returns every broken rule, with a path relative to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock_core.simulated_tokens import SIMULATED
from penstock_graph.models.base import KeyPath, Violation
from penstock_graph.models.enums import WORKER_ROLES, Role, RouterPolicy, Runtime

if TYPE_CHECKING:
    from penstock_graph.models.graph import GraphSpec
    from penstock_graph.models.service import ServiceSpec

MAX_CHILD_NAME = 52
"""A StatefulSet appends an 11-character revision hash to a label value, which may hold 63."""


PLANNER_SERVICE = "planner"
"""Name of the planner's process among a graph's services."""

DYNAMO_POLICIES = {
    RouterPolicy.ROUND_ROBIN: "round-robin",
    RouterPolicy.LEAST_LOADED: "least-loaded",
    RouterPolicy.PREFIX_COST: "kv",
    RouterPolicy.KV_COST: "kv",
}
"""Policies that Dynamo's frontend can follow, or come close to, with its ``--router-mode``. Of two with one mode the
last is what an import makes of it; prefix-cost stands here because it is the default."""


def spec_violations(spec: GraphSpec) -> list[Violation]:
    """Return the broken rules of one graph's specification."""
    violations = [
        *_role_violations(spec),
        *_reserved_violations(spec),
        *_node_pool_violations(spec),
        *_engine_gpu_violations(spec),
        *_runtime_violations(spec),
        *_tokenizer_violations(spec),
    ]
    if spec.planner.enabled:
        violations += _budget_violations(spec)
    return violations


def name_violations(graph: str, services: Mapping[str, ServiceSpec]) -> list[Violation]:
    """Return services whose children could not be named: ``GRAPH-SERVICE`` has at most 52 characters."""
    return [
        Violation(
            ("spec", "services", service),
            f"{graph}-{service} has {len(graph) + len(service) + 1} characters, at most {MAX_CHILD_NAME} "
            "fit a child's name; shorten the graph's or the service's name",
            (("metadata", "name"),),
        )
        for service in services
        if len(graph) + len(service) + 1 > MAX_CHILD_NAME
    ]


def role_floor_gpus(service: ServiceSpec, min_gpu_budget: int) -> int:
    """Return the GPUs below which a planner may not shrink a worker service.

    The fewest whole replicas that satisfy both scaling.minReplicas and the planner's minGpuBudget; the
    fixed number where the service does not scale.
    """
    if service.scaling is None:
        return service.replicas * service.gpus
    fewest = max(service.scaling.min_replicas, math.ceil(min_gpu_budget / service.gpus))
    return fewest * service.gpus


def _role_violations(spec: GraphSpec) -> list[Violation]:
    violations = []
    names = {role: list(spec.services_of(role)) for role in WORKER_ROLES}
    for role, services in names.items():
        for extra in services[1:]:
            message = f"a second {role} service besides {services[0]}; keep one service per worker role"
            violations.append(Violation(("services", extra, "role"), message, _role_paths(spec)))
    has_aggregated, has_prefill, has_decode = (
        bool(names[role]) for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
    )
    problem = None
    if has_aggregated and (has_prefill or has_decode):
        problem = "aggregated workers stand beside prefill or decode; keep either kind"
    elif not has_aggregated and not (has_prefill and has_decode):
        missing = " and ".join(
            role for role, present in (("prefill", has_prefill), ("decode", has_decode)) if not present
        )
        problem = f"no {missing} service; declare prefill and decode, or one aggregated service"
    if problem is not None:
        violations.append(Violation(("services",), problem, _role_paths(spec)))
    return violations


def _role_paths(spec: GraphSpec) -> tuple[KeyPath, ...]:
    return tuple(("services", name, "role") for name in spec.services)


def _reserved_violations(spec: GraphSpec) -> list[Violation]:
    if PLANNER_SERVICE not in spec.services:
        return []
    message = "the planner's process has this name; rename the service"
    return [Violation(("services", PLANNER_SERVICE), message)]


def _runtime_violations(spec: GraphSpec) -> list[Violation]:
    """Settings that the chosen runtime cannot honour are refused, not ignored."""
    violations = []
    related: tuple[KeyPath, ...] = (("runtime",),)
    if spec.engine.mocker and spec.runtime is not Runtime.DYNAMO:
        message = f"true, but runtime {spec.runtime} has no mocker; set runtime: dynamo or remove it"
        violations.append(Violation(("engine", "mocker"), message, related))
    if spec.engine.request_limit is not None and spec.runtime is not Runtime.DYNAMO:
        message = (
            f"{spec.engine.request_limit}, but workers of runtime {spec.runtime} refuse nothing by number; "
            "remove it and bound the load with router.prefillQueue and engine.maxRunningRequests"
        )
        violations.append(Violation(("engine", "requestLimit"), message, related))
    if spec.runtime is Runtime.DYNAMO and spec.router.policy not in DYNAMO_POLICIES:
        known = ", ".join(DYNAMO_POLICIES)
        message = f"{spec.router.policy} is not known to Dynamo's frontend, which routes here; choose {known}"
        violations.append(Violation(("router", "policy"), message, related))
    return violations


def _tokenizer_violations(spec: GraphSpec) -> list[Violation]:
    """A router that makes its keys of other tokens than its workers' would wait for events in vain."""
    router, is_simulated = spec.router, spec.runtime is Runtime.SIMULATED
    message = None
    if router.tokenizer == SIMULATED and not is_simulated:
        message = (
            f"{SIMULATED}, but workers of runtime {spec.runtime} have their model's; give its tokenizer.json"
        )
    elif is_simulated and router.kv_events_port is not None and router.tokenizer not in {None, SIMULATED}:
        message = (
            f"{router.tokenizer}, but the events of simulated workers name tokens of their own; "
            f"write {SIMULATED}, or remove kvEventsPort"
        )
    if message is None:
        return []
    return [Violation(("router", "tokenizer"), message, (("runtime",),))]


def _node_pool_violations(spec: GraphSpec) -> list[Violation]:
    known = ", ".join(sorted(spec.node_pools)) or "none"
    return [
        Violation(
            ("services", name, "nodePool"),
            f"{service.node_pool!r} is not in nodePools ({known}); declare it or choose a declared one",
            (("nodePools",),),
        )
        for name, service in spec.services.items()
        if service.node_pool is not None and service.node_pool not in spec.node_pools
    ]


def _engine_gpu_violations(spec: GraphSpec) -> list[Violation]:
    violations = []
    options = (
        ("prefillEngineNumGpu", spec.planner.prefill_engine_num_gpu, Role.PREFILL),
        ("decodeEngineNumGpu", spec.planner.decode_engine_num_gpu, Role.DECODE),
    )
    for key, value, role in options:
        found = spec.service(role) or (spec.service(Role.AGGREGATED) if role is Role.DECODE else None)
        if value is None or found is None or found[1].gpus == value:
            continue
        name, service = found
        message = f"{value} contradicts services.{name}.gpusPerReplica {service.gpus}; drop {key} or make them equal"
        violations.append(Violation(("planner", key), message, (("services", name, "gpusPerReplica"),)))
    return violations


def _budget_violations(spec: GraphSpec) -> list[Violation]:
    budget = spec.planner.max_gpu_budget
    if budget is None:
        return []
    related = tuple(
        ("services", name, *keys)
        for name in spec.workers
        for keys in (("replicas",), ("gpusPerReplica",), ("scaling", "minReplicas"))
    )
    path: KeyPath = ("planner", "maxGpuBudget")
    floors = {name: role_floor_gpus(each, spec.planner.min_gpu_budget) for name, each in spec.workers.items()}
    if sum(floors.values()) > budget:
        message = (
            f"{budget} GPUs are fewer than the floors need: {_sum_text(floors)}; raise it, "
            "or lower minReplicas, gpusPerReplica or minGpuBudget"
        )
        return [Violation(path, message, (*related, ("planner", "minGpuBudget")))]
    starts = {name: each.replicas * each.gpus for name, each in spec.workers.items()}
    if sum(starts.values()) > budget:
        message = f"{budget} GPUs are fewer than the graph starts with: {_sum_text(starts)}; raise it or lower replicas"
        return [Violation(path, message, related)]
    return []


def _sum_text(gpus: Mapping[str, int]) -> str:
    return f"{' + '.join(f'{name} {count}' for name, count in gpus.items())} = {sum(gpus.values())}"
