"""Trims watched objects to the fields from which the functions in `plan` decide.

Pure functions. A thousand graphs have thirty thousand objects, and most of their bytes are field owners
(``metadata.managedFields``), heartbeats and fields of other writers. Each change of those would also cause a reconcile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.kube.objects.names import INITIAL, OPERATOR
from penstock_operator.plan.pods import pod_view

Object = dict[str, Any]

INTERNED_PARTS: Final = 20_000
"""Maximum number of interned parts. Chosen: enough for everything that a few hundred graphs have in common, about
five megabytes."""

POSTED: Final = "posted"
"""Key next to ``metadata`` of a trimmed child: True if the operator created it by POST and its fields still belong to
that request, so that the next server-side apply must take them over first."""

LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"

VERSION: Final = "version"
"""Key next to ``metadata`` of every trimmed object: its resource version as a number, 0 if it is not numeric.
Kubernetes makes resource versions comparable within a kind (KEP-5504); etcd has only ever had such versions."""

_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "generation",
    "deletionTimestamp",
    "labels",
    "annotations",
    "finalizers",
    "ownerReferences",
)
_HEARTBEATS: Final = frozenset({"lastUpdateTime", "lastHeartbeatTime", "lastProbeTime"})
_OTHERS_CONDITIONS: Final = frozenset({"PlannerActive"})
_WITH_STATUS: Final = frozenset({"Deployment", "LeaderWorkerSet", "ScalingAdapter"})


class InterningPool:
    """Makes JSON objects share their equal parts, so that each part is stored only once in memory.

    It forgets all parts when it has stored a maximum number of them; parts made later are then not shared with earlier
    ones.
    """

    def __init__(self, limit: int = INTERNED_PARTS) -> None:
        self._limit = limit
        self._parts: dict[Any, Any] = {}

    def intern(self, value: Any) -> Any:
        """Return a JSON value equal to ``value``, whose parts are shared with equal parts of earlier results, to save memory.

        Do not change the result, since others contain the same parts.
        """
        if isinstance(value, float):
            return value  # 0.0 equals -0.0
        # A part is identified by the identities of its own parts, which are shared and live as long as the part.
        made, identity = value, (type(value), value)
        if isinstance(value, dict):
            made = {key: self.intern(each) for key, each in value.items()}
            identity = (dict, (*made, *map(id, made.values())))
        elif isinstance(value, list):
            made = list(map(self.intern, value))
            identity = (list, tuple(map(id, made)))
        if len(self._parts) >= self._limit:
            self._parts.clear()
        return self._parts.setdefault(identity, made)


_POOL: Final = InterningPool()


def trim_graph(obj: Object) -> Object:
    """Return a copy of a GraphDeployment without the fields that the operator does not need, to save memory.

    It has no ``managedFields``, and of ``status.planner`` only the planner's request to a GPU pool remains.
    """
    status = {key: each for key, each in obj.get("status", {}).items() if key != "planner"}
    planner = obj.get("status", {}).get("planner") or {}
    if planner.get("wants"):
        status["planner"] = {key: planner[key] for key in ("wants", "wantsTime") if key in planner}
    if "conditions" in status:
        status["conditions"] = [
            each for each in status["conditions"] if each.get("type") not in _OTHERS_CONDITIONS
        ]
    return {**_head(obj), "spec": _POOL.intern(obj.get("spec", {})), "status": _POOL.intern(status)}


def trim_child(obj: Object) -> Object:
    """Return a copy of an object that the operator created for a graph, reduced to what the operator needs.

    It has no ``managedFields``. Its status remains only for kinds whose status the operator uses.
    """
    trimmed = {key: _POOL.intern(each) for key, each in obj.items() if key not in {"metadata", "status"}}
    trimmed.update(_head(obj))
    if obj["kind"] in _WITH_STATUS and "status" in obj:
        status = dict(obj["status"])
        if "conditions" in status:
            status["conditions"] = [_without_heartbeats(each) for each in status["conditions"]]
        trimmed["status"] = _POOL.intern(status)
    if any(is_posted(each) for each in obj["metadata"].get("managedFields", ())):
        trimmed[POSTED] = True
    return trimmed


def trim_pod(obj: Object) -> Object:
    """Return what the operator needs of a pod: name, namespace, labels, resource version, and the facts from which it decides.

    The resource version is a number under key ``version``, the facts (`PodView`) are under key ``view``.
    """
    metadata = obj["metadata"]
    return {
        "metadata": {key: metadata[key] for key in ("name", "namespace", "labels") if key in metadata},
        "view": pod_view(obj),
        VERSION: version_of(metadata),
    }


def _head(obj: Object) -> Object:
    metadata = {key: _POOL.intern(obj["metadata"][key]) for key in _METADATA if key in obj["metadata"]}
    if LAST_APPLIED in metadata.get("annotations", {}):
        metadata["annotations"] = {k: v for k, v in metadata["annotations"].items() if k != LAST_APPLIED}
    version = version_of(obj["metadata"])
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": metadata, VERSION: version}


def same(one: Object, other: Object) -> bool:
    """Return whether two objects from `trim_graph` or `trim_child` are equal apart from their resource version.

    If so, a change that the watch reports between ``one`` and ``other`` does not concern the operator.
    """
    return {**one, VERSION: 0} == {**other, VERSION: 0}


def version_of(metadata: Mapping[str, Any]) -> int:
    """Return the resource version in an object's metadata as a number; 0 if it is absent or not numeric."""
    text = str(metadata.get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0


def _without_heartbeats(condition: Mapping[str, Any]) -> Object:
    return {key: each for key, each in condition.items() if key not in _HEARTBEATS}


def is_posted(entry: Mapping[str, Any]) -> bool:
    """Return whether ``entry``, one of an object's ``managedFields``, records that the operator created the object by a POST.

    The operator writes later changes by server-side apply; it has to transfer the fields of such an entry to it, so
    that fields that are no longer desired are removed.
    """
    if entry.get("operation") != "Update" or entry.get("subresource"):
        return False
    manager = entry.get("manager")
    return manager == OPERATOR or (manager == INITIAL and "f:metadata" in entry.get("fieldsV1", {}))
