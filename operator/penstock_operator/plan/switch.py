"""Decides which drained workers switch their role instead of being replaced, in graphs whose workers support both roles.

Pure functions. The operator scales both roles as usual: the shrinking role drains a pod, and the growing role has a
new pod that waits at the budget's scheduling gate. A drained pod then takes the labels of the waiting one and so
belongs to the other workload: its old ReplicaSet releases it, the other ReplicaSet adopts it and deletes the surplus
pod, which has no node. Every intermediate state could also result from scaling alone, so the operator can crash at
any step.
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
    """Return the role switches that can be made now: drained workers that take the place of a waiting pod of the other role.

    The worker must be idle, ready and in no rollout. The pod waits at its scheduling gate for GPUs.

    Args:
        spec: Specification of the graph.
        services: State of each service.
        pods: All worker pods of the graph.
        now_s: Current Unix time in seconds.
    """
    found: list[RoleSwitch] = []
    for source, target in _switch_pairs(spec, services):
        plan, grace_s = services[source].plan, services[source].spec.termination_grace_period_seconds
        removable = () if plan is None else plan.removable
        # A worker whose grace period is over may still stream, so it cannot switch.
        workers = [
            each
            for each in pods
            if each.name in removable
            and each.ready
            and each.drain_since_s is not None
            and now_s - each.drain_since_s < grace_s
        ]
        waiting = _waiting_pods(services[target], target, pods)
        found += [RoleSwitch(*pair) for pair in zip(workers, waiting, strict=False)]
    return tuple(found)


def pods_kept_for_switch(
    spec: GraphSpec, services: Mapping[str, ServiceState], pods: Sequence[PodView]
) -> frozenset[str]:
    """Return the UIDs of pods whose scheduling gate must stay, because a worker that is still draining will take the pod's place.

    The worker then switches to the role of that pod, and the pod is deleted.

    Args:
        spec: Specification of the graph.
        services: State of each service.
        pods: All worker pods of the graph.
    """
    kept: set[str] = set()
    for source, target in _switch_pairs(spec, services):
        draining = [each for each in pods if each.service == source and each.draining and each.ready]
        waiting = _waiting_pods(services[target], target, pods)
        kept |= {pod.uid for _, pod in zip(draining, waiting, strict=False)}
    return frozenset(kept)


def keeping_switched_workers(
    services: Mapping[str, ServiceState], switches: Sequence[RoleSwitch]
) -> dict[str, ServiceState]:
    """Return the state of each service, changed so that Kubernetes deletes none of the workers that switch their role.

    A service that has such a worker keeps its current number of replicas for now; other services are unchanged.

    Args:
        services: State of each service.
        switches: Role switches from `plan_switches`.
    """
    found = dict(services)
    for each in switches:
        state = found[each.worker.service]
        if state.plan is not None:
            costs = {
                name: cost for name, cost in state.plan.deletion_costs.items() if name != each.worker.name
            }
            removable = tuple(name for name in state.plan.removable if name != each.worker.name)
            plan = replace(state.plan, spec_replicas=state.running, removable=removable, deletion_costs=costs)
            found[each.worker.service] = replace(state, plan=plan)
    return found


def _switch_pairs(spec: GraphSpec, services: Mapping[str, ServiceState]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of services (giving, taking) between which workers can switch; none during a rollout."""
    prefill, decode = spec.service(Role.PREFILL), spec.service(Role.DECODE)
    if not spec.engine.switchable or prefill is None or decode is None:
        return
    pair = (prefill[0], decode[0])
    rollouts = [services[name].rollout for name in pair]
    if any(each is None or each.rolling for each in rollouts):
        return
    yield pair
    yield pair[::-1]


def _waiting_pods(state: ServiceState, service: str, pods: Sequence[PodView]) -> list[PodView]:
    """Return the gated pods of a service that a switching worker can replace, the newest first."""
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
