"""The order in which a graph is deleted, so that its requests finish and nothing is left.

Pure: what still exists decides the next step.

1. Routers stop being asked: their workloads are deleted, their pods finish what they have begun.
2. Once no router pod is left, or all of them are idle, workers can only be finishing: each is drained (`drain.plan_scale`
   with desired 0), its workload deleted when none of its pods lives. An idle router refuses further requests then.
3. When no pod of the graph is left, everything else is deleted: adapters, Services, and so on.
4. When nothing is left, the finalizer goes.

Routers first, because a worker that left earlier would break the requests that routers still hold. Services
of workers last, because routers find workers through them.
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
    """The actions now; they may run at once, and repeatedly.

    Attributes:
        message: What is being waited for; one sentence, the same for the same state.
        delete: Children to delete.
        drain: Services to scale to 0 by draining.
        release: Whether to remove the finalizer.
        waits_for_idleness: Whether pods are to be asked again soon.
    """

    message: str
    delete: tuple[Object, ...] = ()
    drain: tuple[str, ...] = ()
    release: bool = False
    waits_for_idleness: bool = False


def next_step(
    children: Iterable[Object], pods: Sequence[PodView], *, idle: Collection[str] = ()
) -> DeletionStep:
    """Return the next step of the deletion of a graph.

    Args:
        children: Every object that exists of it, pods aside.
        pods: Every pod that exists of it; finished ones are waited for too, their workload deletes them.
        idle: Router pods that leave and hold no request.
    """
    present = sorted(children, key=lambda child: (child["kind"], child["metadata"]["name"]))
    workloads = [child for child in present if child["kind"] in WORKLOADS]
    routers = [child for child in workloads if label_of(child, ROLE_LABEL) == Role.ROUTER]
    left = [pod for pod in pods if not pod.finished]
    router_pods = [pod for pod in left if pod.role == Role.ROUTER and pod.name not in idle]
    if routers or router_pods:
        return DeletionStep(_text("router", router_pods), _undeleted(routers), waits_for_idleness=True)
    if workloads or left:
        busy = {pod.service for pod in left if pod.alive}
        drain = tuple(sorted(busy & {label_of(child, SERVICE_LABEL) for child in workloads}))
        return DeletionStep(
            _text("worker", left),
            _undeleted(child for child in workloads if label_of(child, SERVICE_LABEL) not in busy),
            drain,
            waits_for_idleness=bool(drain),
        )
    if present:
        names = ", ".join(f"{child['kind']} {child['metadata']['name']}" for child in present)
        return DeletionStep(f"waiting for the deletion of {names}", _undeleted(present))
    return DeletionStep("everything is gone", release=True)


def _undeleted(children: Iterable[Object]) -> tuple[Object, ...]:
    return tuple(child for child in children if not child["metadata"].get("deletionTimestamp"))


def _text(what: str, pods: Sequence[PodView]) -> str:
    if not pods:
        return f"deleting the {what}s"
    names = ", ".join(sorted(pod.name for pod in pods))
    return f"waiting for {what} pods to finish their requests: {names}"
