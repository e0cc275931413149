"""Decides whether a service gets one additional replica because all of its serving replicas are on cordoned nodes.

Pure. `kubectl drain`, an upgrade of the nodes or an autoscaler cordons a node before it evicts the pods there. A service
whose last serving replica is evicted serves nothing until its replacement has started, so the replacement starts first.
The surplus afterwards is drained like any other: the worker on the cordoned node is the victim. A router on a
cordoned node stays until it is evicted, because a Deployment would delete the newer of two routers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock_operator.plan.pods import PodView


@dataclass(frozen=True, slots=True)
class Replacement:
    """One additional replica that a service needs because all of its serving replicas are on cordoned nodes.

    Attributes:
        nodes: Names of the cordoned nodes on which the service's serving replicas run, sorted.
        fits: Whether the GPU budget has room for one more replica.
        gpus: GPUs of one replica.
    """

    nodes: tuple[str, ...]
    fits: bool
    gpus: int

    def sentence(self, service: str) -> str:
        """Return a sentence for an Event: that an additional replica of ``service`` starts, or that the GPU budget has no room for it."""
        where = f"all of its replicas are on cordoned nodes ({', '.join(self.nodes)})"
        if self.fits:
            return f"{service}: {where}; a replacement starts before they are evicted"
        return (
            f"{service}: {where}, and the GPU budget has no room for a replacement of {self.gpus} GPUs, so the"
            " service stops while they are evicted; raise planner.maxGpuBudget or its pool's GPUs by that number, or"
            " scale another service down"
        )


def cordoned_nodes(pods: Collection[PodView], *, wanted: int, is_drained: bool) -> tuple[str, ...]:
    """Return the cordoned nodes on which a service has replicas, if it therefore needs one more replica now; else empty.

    Args:
        pods: All pods of the service.
        wanted: Desired replicas without a replacement; 0 needs none.
        is_drained: Whether surplus replicas are drained, those on cordoned nodes first, as it is for workers. One more
            replica is then needed if all serving replicas are on cordoned nodes. If False (routers), it is needed
            while at least ``wanted`` serving replicas are on cordoned nodes.
    """
    serving = [each for each in pods if each.alive and each.ready and each.takes_requests]
    cordoned = [each for each in serving if each.node_is_cordoned]
    needs = len(cordoned) == len(serving) if is_drained else len(cordoned) >= wanted
    return tuple(sorted({each.node for each in cordoned})) if wanted and needs else ()


def replacements(
    nodes: Mapping[str, tuple[str, ...]], gpus: Mapping[str, int], *, wanted_gpus: int, budget: int | None
) -> dict[str, Replacement]:
    """Return the additional replica of each service that needs one; all that fit (``fits``) are together within the budget.

    Args:
        nodes: Result of `cordoned_nodes` by service.
        gpus: GPUs of one replica by service; 0 for routers.
        wanted_gpus: GPUs of all desired replicas of the graph, without the additional ones.
        budget: Maximum number of GPUs; None means no limit.
    """
    found = {}
    for service, where in sorted(nodes.items(), key=lambda each: (gpus[each[0]], each[0])):
        if where:
            fits = not gpus[service] or budget is None or wanted_gpus + gpus[service] <= budget
            wanted_gpus += gpus[service] if fits else 0
            found[service] = Replacement(where, fits, gpus[service])
    return found
