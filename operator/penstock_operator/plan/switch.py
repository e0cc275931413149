"""Which drained workers change their role in place of a start, in a graph whose workers can be of either.

Pure. The operator scales both roles as ever: the giving one drains a pod, and the taking one has a new pod that waits at
the budget's scheduling gate. A pod that has drained then takes the labels of the waiting one, so it is the other workload's:
its old ReplicaSet releases it, the other one adopts it and, as it has one too many, deletes the pod that has no node.
Each state on the way is one that scaling alone could have made, so an operator may die at any step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from penstock.api import GraphSpec, Role
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replicas import RoleSwitch, ServiceState


def plan_switches(
    spec: GraphSpec, services: Mapping[str, ServiceState], pods: Sequence[PodView], *, now_s: float
) -> tuple[RoleSwitch, ...]:
    """Return the workers that may switch at once: idle, well, and none of a rollout; ``now_s`` since the epoch."""
    found: list[RoleSwitch] = []
    for giver, taker in _ways(spec, services):
        plan, grace_s = services[giver].plan, services[giver].spec.termination_grace_period_seconds
        leaving = () if plan is None else plan.leaving
        # One that leaves because its grace is over may still stream.
        workers = [
            each
            for each in pods
            if each.name in leaving
            and each.ready
            and each.drain_since_s is not None
            and now_s - each.drain_since_s < grace_s
        ]
        places = _places(services[taker], taker, pods)
        found += [RoleSwitch(*pair) for pair in zip(workers, places, strict=False)]
    return tuple(found)


def kept_places(
    spec: GraphSpec, services: Mapping[str, ServiceState], pods: Sequence[PodView]
) -> frozenset[str]:
    """Return the uids of pods that stay at the budget's gate, as a worker that drains is to take their place."""
    kept: set[str] = set()
    for giver, taker in _ways(spec, services):
        draining = [each for each in pods if each.service == giver and each.draining and each.ready]
        places = _places(services[taker], taker, pods)
        kept |= {place.uid for _, place in zip(draining, places, strict=False)}
    return frozenset(kept)


def without_switching(
    services: Mapping[str, ServiceState], switches: Sequence[RoleSwitch]
) -> dict[str, ServiceState]:
    """Return the services whose workloads shrink by none yet whose worker switches: one of them would be deleted."""
    found = dict(services)
    for each in switches:
        state = found[each.worker.service]
        if state.plan is not None:
            costs = {
                name: cost for name, cost in state.plan.deletion_costs.items() if name != each.worker.name
            }
            leaving = tuple(name for name in state.plan.leaving if name != each.worker.name)
            plan = replace(state.plan, spec_replicas=state.running, leaving=leaving, deletion_costs=costs)
            found[each.worker.service] = replace(state, plan=plan)
    return found


def _ways(spec: GraphSpec, services: Mapping[str, ServiceState]) -> Iterator[tuple[str, str]]:
    """Yield who may give to whom."""
    prefill, decode = spec.service(Role.PREFILL), spec.service(Role.DECODE)
    if not spec.engine.switchable or prefill is None or decode is None:
        return
    pair = (prefill[0], decode[0])
    rollouts = [services[name].rollout for name in pair]
    if any(each is None or each.rolling for each in rollouts):
        return
    yield pair
    yield pair[::-1]


def _places(state: ServiceState, service: str, pods: Sequence[PodView]) -> list[PodView]:
    """Return the pods of a service that wait for GPUs, the newest first, as many as its number has room for."""
    draining = () if state.plan is None else state.plan.draining
    gated = [
        each
        for each in pods
        if each.service == service
        and each.alive
        and each.gated
        and each.group_index is None
        and each.name not in draining
    ]
    return sorted(gated, key=lambda each: (-each.created_s, each.name))
