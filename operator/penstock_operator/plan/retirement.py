"""Decides how many replicas of an obsolete service must remain until the services that replace it are ready. Pure function.

A renamed service, or an aggregated service that replaces two roles, is a rollout between two workloads: the old one
shrinks as the new one becomes ready, so that no edit leaves a graph without service while a model loads. If the
budget has no room for a new replica, one old replica is removed for it, and the next one only after the new one is
ready. Old replicas also remain while new pods cannot be scheduled or are rejected by the API server; the graph's
conditions report the problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.api import Role
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replicas import ServiceState


def replicas_to_keep(
    role: str,
    old: Sequence[PodView],
    services: Mapping[str, ServiceState],
    pods: Sequence[PodView],
    *,
    routers_behind: bool,
) -> int:
    """Return how many replicas of a workload must remain for now, although the graph's specification no longer has its service.

    They serve requests until the services that take their place can serve.

    Args:
        role: Role of the removed service, from the workload's label.
        old: Pods of the workload.
        services: State of each service that the graph has now.
        pods: All pods of the graph.
        routers_behind: Whether routers may still run that do not know the new services yet.
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
    """Return the services that replace one of ``role``: those of the same role, or all worker services if there are none."""
    same = [name for name, each in services.items() if each.spec.role == role]
    if same or role == Role.ROUTER:
        return same
    return [name for name, each in services.items() if each.spec.role.is_worker]
