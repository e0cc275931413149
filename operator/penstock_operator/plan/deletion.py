"""Order in which a graph is deleted, so that its requests finish and no object remains.

Pure functions; the existing objects decide the next step:

1. Routers are stopped: their workloads are deleted, and their pods finish the requests that they have started.
2. When no router pod exists, or all of them are idle, workers can only be finishing. Each worker service is drained
(`drain.plan_scale` with desired 0), and its workload is deleted when none of its pods is alive. A terminating idle
router rejects further requests.
3. When no pod of the graph exists, everything else is deleted: adapters, Services, and so on.
4. When nothing is left, the finalizer is removed.

Routers are first, because a worker that ended earlier would break requests that routers are still proxying. The
Services of workers are last, because routers find workers through them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from penstock.api import Role
from penstock.kube.objects.names import ROLE_LABEL, SERVICE_LABEL
from penstock_operator.plan.pods import PodView
from penstock_operator.trim import Object
from penstock_operator.workloads import WORKLOADS, label_of


@dataclass(frozen=True, slots=True)
class DeletionStep:
    """Actions of one step of a graph's deletion; they can be executed in parallel and repeatedly.

    Attributes:
        message: One sentence that says what the deletion waits for; it is the same text as long as the state is the
            same.
        delete: Objects to delete that the operator created for the graph.
        drain: Names of the services whose workers now finish their requests and are then removed (drained down to 0
            replicas).
        release: Whether to remove the finalizer.
        waits_for_idleness: Whether the load of pods must be read again soon, to notice when they have finished their
            requests.
    """

    message: str
    delete: tuple[Object, ...] = ()
    drain: tuple[str, ...] = ()
    release: bool = False
    waits_for_idleness: bool = False


def next_step(
    children: Iterable[Object], pods: Sequence[PodView], *, idle: Collection[str] = ()
) -> DeletionStep:
    """Return the next step of a graph's deletion: services to drain, objects to delete, or that the finalizer can be removed.

    Args:
        children: All existing child objects of the graph, without its pods.
        pods: All existing pods of the graph.
        idle: Names of router pods that are terminating and have no requests; the deletion does not wait for these pods.
    """
    present = sorted(children, key=lambda child: (child["kind"], child["metadata"]["name"]))
    workloads = [child for child in present if child["kind"] in WORKLOADS]
    routers = [child for child in workloads if label_of(child, ROLE_LABEL) == Role.ROUTER]
    not_finished = [pod for pod in pods if not pod.finished]
    router_pods = [pod for pod in not_finished if pod.role == Role.ROUTER and pod.name not in idle]
    if routers or router_pods:
        return DeletionStep(_text("router", router_pods), _not_deleted(routers), waits_for_idleness=True)
    if workloads or not_finished:
        busy = {pod.service for pod in not_finished if pod.alive}
        drain = tuple(sorted(busy & {label_of(child, SERVICE_LABEL) for child in workloads}))
        return DeletionStep(
            _text("worker", not_finished),
            _not_deleted(child for child in workloads if label_of(child, SERVICE_LABEL) not in busy),
            drain,
            waits_for_idleness=bool(drain),
        )
    if present:
        names = ", ".join(f"{child['kind']} {child['metadata']['name']}" for child in present)
        return DeletionStep(f"waiting for the deletion of {names}", _not_deleted(present))
    return DeletionStep("everything is deleted", release=True)


def _not_deleted(children: Iterable[Object]) -> tuple[Object, ...]:
    return tuple(child for child in children if not child["metadata"].get("deletionTimestamp"))


def _text(what: str, pods: Sequence[PodView]) -> str:
    if not pods:
        return f"deleting the {what}s"
    names = ", ".join(sorted(pod.name for pod in pods))
    return f"waiting for {what} pods to finish their requests: {names}"
