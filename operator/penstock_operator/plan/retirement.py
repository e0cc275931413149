"""How many replicas of a service that a graph no longer has stay, until those in their place serve. Pure.

A renamed service, or an aggregated one in place of two roles, is a rollout between two workloads: the old one leaves as the
new one becomes ready, so that no edit takes a graph out of service for as long as a model loads. Where the budget has no
room for a new replica, one old replica leaves for it, and the next one only when the new one serves. Pods that no node
takes, or that the API server refuses, are waited for: the old ones serve on, and the conditions say what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.api import Role
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replicas import ServiceState


def kept_replicas(
    role: str,
    old: Sequence[PodView],
    services: Mapping[str, ServiceState],
    pods: Sequence[PodView],
    *,
    routers_behind: bool,
) -> int:
    """Return how many replicas of a workload that is no longer wanted stay for now.

    Args:
        role: Of its service, by its label.
        old: Its pods.
        services: What the graph has now, by service.
        pods: All pods of the graph.
        routers_behind: Whether routers may still run that know only the old services.
    """
    leaders = [each for each in old if not each.finished and not each.worker_index]
    present = sum(each.ready or each.terminating for each in leaders)
    successors = _successors(role, services)
    missing = sum(_missing(services[name]) for name in successors)
    coming = [each for each in pods if each.service in successors and each.alive and each not in old]
    if any(each.gated for each in coming) and all(each.gated or each.ready for each in coming):
        return max(0, min(present, missing) - 1)
    if routers_behind and role != Role.ROUTER and successors:
        return present
    return min(present, missing)


def _missing(state: ServiceState) -> int:
    ready = 0 if state.rollout is None else state.rollout.ready
    return max(0, state.bounds.replicas - ready)


def _successors(role: str, services: Mapping[str, ServiceState]) -> list[str]:
    """Return the services in place of one of a role: those of the role, else all workers."""
    same = [name for name, each in services.items() if each.spec.role == role]
    if same or role == Role.ROUTER:
        return same
    return [name for name, each in services.items() if each.spec.role.is_worker]
