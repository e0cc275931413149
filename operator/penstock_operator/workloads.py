"""Compares and looks up a graph's workloads: their pod template, replicas and owner.

Pure functions. The pod template has a separate digest in addition to that of the entire object: a changed template
may have to wait for another service's rollout, but a changed number of replicas does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import orjson

from penstock.api import GraphDeployment
from penstock.kube.kinds import DEPLOYMENT, LEADER_WORKER_SET
from penstock.kube.objects.names import DOMAIN, SERVICE_LABEL, child_name
from penstock_operator.plan.drift import FieldDifference
from penstock_operator.trim import Object

TEMPLATE_ANNOTATION: Final = f"{DOMAIN}/template"
"""Annotation on a workload: digest of the pod template that the operator desires."""

GENERATION_ANNOTATION: Final = f"{DOMAIN}/template-generation"
"""Annotation on a workload: the workload's generation that introduced its current pod template, so that a restarted
operator knows it too."""

WORKLOADS: Final = frozenset({DEPLOYMENT.kind, LEADER_WORKER_SET.kind})
"""Kinds of workloads that run a service's pods."""

_TEMPLATES: Final = {DEPLOYMENT.kind: "template", LEADER_WORKER_SET.kind: "leaderWorkerTemplate"}


def with_template_digest(workload: Object) -> Object:
    """Return a desired workload (Deployment, LeaderWorkerSet) with a digest of its pod template as annotation.

    By the digest, `template_changed` finds out whether a write would start a rollout. Other objects are returned
    unchanged.
    """
    if workload["kind"] not in WORKLOADS:
        return workload
    template = workload["spec"][_TEMPLATES[workload["kind"]]]
    digest = hashlib.sha256(orjson.dumps(template, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
    metadata = dict(workload["metadata"])
    metadata["annotations"] = {**(metadata.get("annotations") or {}), TEMPLATE_ANNOTATION: digest}
    return {**workload, "metadata": metadata}


def template_changed(desired: Object, live: Object, found: Iterable[FieldDifference]) -> bool:
    """Return whether writing ``desired`` would start a rollout, which replaces the workload's pods.

    Args:
        desired: Desired workload with the digest of its pod template, from `with_template_digest`.
        live: The existing workload.
        found: Differences between ``desired`` and ``live``.
    """
    if _digest(desired) != _digest(live):
        return True
    template = f"spec.{_TEMPLATES[desired['kind']]}"
    return any(each.path.startswith(template) for each in found)


def with_generations(
    wanted: Iterable[Object], live: Mapping[tuple[str, str], Object], rolling: Collection[str]
) -> list[Object]:
    """Return the desired objects; each workload is annotated with the generation that introduces its pod template.

    By this annotation, a later reconcile can tell a rollout from a change of the number of replicas, which also
    increases the generation.

    Args:
        wanted: Desired objects; workloads with the digest of their pod template, from `with_template_digest`.
        live: Existing objects by kind and name.
        rolling: Names of workloads whose pod template is about to change; they get the next generation, other workloads
            keep the generation in their annotation.
    """
    return [_with_generation(each, live, rolling) for each in wanted]


def _with_generation(
    desired: Object, live: Mapping[tuple[str, str], Object], rolling: Collection[str]
) -> Object:
    if desired["kind"] not in WORKLOADS:
        return desired
    name = desired["metadata"]["name"]
    existing = live.get((desired["kind"], name))
    if existing is None:
        generation: int | None = 1
    else:
        generation = _generation(existing) + 1 if name in rolling else template_generation(existing)
    if generation is None:
        return desired
    metadata = dict(desired["metadata"])
    metadata["annotations"] = {**(metadata.get("annotations") or {}), GENERATION_ANNOTATION: str(generation)}
    return {**desired, "metadata": metadata}


def template_generation(live: Object) -> int | None:
    """Return the generation of an existing workload that introduced its pod template, from its annotation.

    Later generations changed only its replicas. Returns None if the annotation is absent (written by an older release)
    or is not a possible generation.
    """
    text = str(live["metadata"].get("annotations", {}).get(GENERATION_ANNOTATION, ""))
    return int(text) if text.isdecimal() and int(text) <= _generation(live) else None


def workload_of(
    graph: GraphDeployment, service: str, children: Mapping[tuple[str, str], Object]
) -> Object | None:
    """Return the workload of a service that exists in the cluster; None if there is none.

    Args:
        graph: The graph.
        service: Name of the service; its workload is a Deployment, or a LeaderWorkerSet if a replica spans nodes.
        children: The graph's objects in the cluster, by kind and name.
    """
    kind = DEPLOYMENT if graph.spec.services[service].nodes_per_replica == 1 else LEADER_WORKER_SET
    return children.get((kind.kind, child_name(graph.name, service)))


def replicas_of(workload: Object | None) -> int | None:
    """Return ``spec.replicas`` of an existing Deployment or LeaderWorkerSet; None if ``workload`` is None."""
    return None if workload is None else int(workload.get("spec", {}).get("replicas", 1))


def known_replicas(workload: Object | None) -> int:
    """Return ``status.replicas`` of an existing workload: the replicas that its controller has counted; 0 if ``workload`` is None."""
    return 0 if workload is None else int(workload.get("status", {}).get("replicas", 0))


def obsolete(
    children: Mapping[tuple[str, str], Object], wanted: Collection[tuple[str, str]], *, owner_uid: str
) -> tuple[list[Object], list[Object]]:
    """Return two lists of the graph's objects that are no longer desired: workloads, and other objects that can be deleted now.

    Children that belong to a service whose workload still exists (such as its Service, by which routers find the
    workers) are not returned until the workload is gone.

    Args:
        children: The graph's objects in the cluster, by kind and name.
        wanted: Kind and name of each desired object.
        owner_uid: UID of the graph; children of other owners are ignored.
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
    """Return whether the object with UID ``owner_uid`` is the controller of ``child``, according to its owner references."""
    return _owner_uid(child) == owner_uid


def _owner_uid(child: Object) -> str | None:
    owners = child["metadata"].get("ownerReferences", ())
    return next((each.get("uid") for each in owners if each.get("controller")), None)


def label_of(child: Object, name: str) -> str:
    """Return the value of the label ``name`` of the object ``child``; an empty string if the label is absent."""
    return str(child["metadata"].get("labels", {}).get(name, ""))


def _digest(workload: Object) -> Any:
    return workload["metadata"].get("annotations", {}).get(TEMPLATE_ANNOTATION)


def _generation(live: Object) -> int:
    return int(live["metadata"].get("generation", 0))
