"""Workloads of a graph as the reconciler compares them: which pod template, which number, whose.

Pure. The pod template has a digest of its own beside that of the entire object, because a template that
changed may have to wait for another service's rollout while its number of replicas may not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import orjson

from penstock.api import GraphDeployment
from penstock.kube.kinds import DEPLOYMENT, LEADER_WORKER_SET
from penstock.kube.objects.names import DOMAIN, SERVICE_LABEL, child_name
from penstock_operator.memory import LruCache
from penstock_operator.plan.drift import FieldDifference
from penstock_operator.trim import Object

TEMPLATE_ANNOTATION: Final = f"{DOMAIN}/template"
"""On a workload: digest of the pod template that the operator wants there."""

WORKLOADS: Final = frozenset({DEPLOYMENT.kind, LEADER_WORKER_SET.kind})

_TEMPLATES: Final = {DEPLOYMENT.kind: "template", LEADER_WORKER_SET.kind: "leaderWorkerTemplate"}


def marked(workload: Object) -> Object:
    """Return a wanted workload with the digest of its pod template; another object as it is."""
    if workload["kind"] not in WORKLOADS:
        return workload
    template = workload["spec"][_TEMPLATES[workload["kind"]]]
    digest = hashlib.sha256(orjson.dumps(template, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
    metadata = dict(workload["metadata"])
    metadata["annotations"] = {**(metadata.get("annotations") or {}), TEMPLATE_ANNOTATION: digest}
    return {**workload, "metadata": metadata}


def template_changed(want: Object, live: Object, found: Iterable[FieldDifference]) -> bool:
    """Return whether writing ``want``, from `marked`, would roll the pods, by its differences from what is there."""
    if _digest(want) != _digest(live):
        return True
    template = f"spec.{_TEMPLATES[want['kind']]}"
    return any(each.path.startswith(template) for each in found)


REMEMBERED: Final = 4000
"""Workloads whose pod template's generation is remembered. Chosen: those of a thousand graphs, half a megabyte."""


class TemplateGenerations:
    """Remembers which generation of each workload brought its pod template: later ones only change its number."""

    def __init__(self) -> None:
        self._known: LruCache[str, tuple[Any, int]] = LruCache(REMEMBERED)

    def of(self, workload: Object) -> int:
        """Return that generation of a live workload; the newest one where it is seen for the first time."""
        metadata = workload["metadata"]
        seen = _digest(workload), int(metadata.get("generation", 0))
        known = self._known.get(metadata["uid"])
        if known is None or known[0] != seen[0]:
            known = seen
            self._known.put(metadata["uid"], seen)
        return known[1]


def workload_of(
    graph: GraphDeployment, service: str, children: Mapping[tuple[str, str], Object]
) -> Object | None:
    """Return a service's live workload, or None."""
    kind = DEPLOYMENT if graph.spec.services[service].nodes_per_replica == 1 else LEADER_WORKER_SET
    return children.get((kind.kind, child_name(graph.name, service)))


def replicas_of(workload: Object | None) -> int | None:
    """Return a live workload's ``spec.replicas``; None without one."""
    return None if workload is None else int(workload.get("spec", {}).get("replicas", 1))


def known_replicas(workload: Object | None) -> int:
    """Return how many replicas a live workload's controller counts; 0 without one."""
    return 0 if workload is None else int(workload.get("status", {}).get("replicas", 0))


def obsolete(
    children: Mapping[tuple[str, str], Object], wanted: Collection[tuple[str, str]], *, owner_uid: str
) -> tuple[list[Object], list[Object]]:
    """Return the graph's children that it no longer wants: workloads, and the rest that may go now.

    What belongs to a service whose workload still has to go (its Service, by which routers find it) waits
    for that.
    """
    unwanted = [
        each for key, each in sorted(children.items()) if key not in wanted and _owner_uid(each) == owner_uid
    ]
    workloads = [each for each in unwanted if each["kind"] in WORKLOADS]
    busy = {label_of(each, SERVICE_LABEL) for each in workloads} - {""}
    rest = [
        each
        for each in unwanted
        if each["kind"] not in WORKLOADS and label_of(each, SERVICE_LABEL) not in busy
    ]
    return workloads, rest


def is_own(child: Object, owner_uid: str) -> bool:
    """Return whether the graph with that uid controls the child."""
    return _owner_uid(child) == owner_uid


def _owner_uid(child: Object) -> str | None:
    owners = child["metadata"].get("ownerReferences", ())
    return next((each.get("uid") for each in owners if each.get("controller")), None)


def label_of(child: Object, name: str) -> str:
    """Return the value of a child's label; empty without it."""
    return str(child["metadata"].get("labels", {}).get(name, ""))


def _digest(workload: Object) -> Any:
    return workload["metadata"].get("annotations", {}).get(TEMPLATE_ANNOTATION)
