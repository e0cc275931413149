"""The pod-level parts of a Dynamo service become environment, node pool and pod template; some are left out on purpose.

What the runtime and the operator set themselves is among those: a foreign value would point processes at each other's ports.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from penstock.api.manifests.foreign import ManifestSource
from penstock_dynamo.importer.component import GPU_RESOURCE, MAIN, Component

_OWNED_VARIABLES = frozenset(
    {
        "DYN_COMPONENT",
        "DYN_DISCOVERY_BACKEND",
        "DYN_EVENT_PLANE",
        "DYN_HTTP_HOST",
        "DYN_HTTP_PORT",
        "DYN_KUBE_DISCOVERY_MODE",
        "DYN_NAMESPACE",
        "DYN_REQUEST_PLANE",
        "DYN_STORE_KV",
        "DYN_SYSTEM_HOST",
        "DYN_SYSTEM_PORT",
        "DYNAMO_PORT",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }
)
"""Variables of `penstock_dynamo`, and of how a process is found; a service's variable would win over the runtime's."""

PROBE_REMEDY = "is set by the runtime; put another into podTemplate"
_LEFT_OUT = {
    "livenessProbe": PROBE_REMEDY,
    "readinessProbe": PROBE_REMEDY,
    "startupProbe": "is set by the runtime; its time is carried as startupTimeoutSeconds where it states one",
    "ports": "are chosen by the operator",
}
"""Keys of a container, and why a graph does without them."""
_PROBE_PERIOD_S = 10
"""Default of Kubernetes, where a probe states none."""

_FOREIGN_LABEL = re.compile(r"\bnvidia\.com/dynamo|\bgrove\.io/")
"""Labels and annotations that only Dynamo's operator and its schedulers write and read."""
_FOREIGN_SELECTION = (
    "goes by labels that Dynamo's operator puts on pods; write it with penstock.dev/graph, penstock.dev/service"
    " and penstock.dev/role"
)

_CARRIED_ELSEWHERE = frozenset({"image", "command", "args", "env", "envFrom"})
_PLACEMENT = frozenset({"nodeSelector", "tolerations"})
_LISTS = frozenset({"volumes", "containers"})
_SELECTING = frozenset({"affinity", "topologySpreadConstraints"})
"""Parts of a pod that choose other pods by their labels."""
_CACHE_MOUNT = "/root/.cache/vllm"
"""Where Dynamo's operator mounts a compilation cache of vLLM's, if no path is given."""


@dataclass(slots=True)
class PodParts:
    """What a service's pod needs beyond its command, in manifest form."""

    env: list[dict[str, Any]] = field(default_factory=list)
    env_from: list[dict[str, Any]] = field(default_factory=list)
    placement: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    pod: dict[str, Any] = field(default_factory=dict)
    container: dict[str, Any] = field(default_factory=dict)
    grace_seconds: int | None = None
    startup_seconds: int | None = None

    def service_fields(self, pools: dict[str, Any]) -> dict[str, Any]:
        """Return the service's keys that follow; a node pool that is new is added to ``pools``."""
        pod = dict(self.pod)
        if self.container:
            pod["containers"] = [{"name": MAIN, **self.container}, *pod.get("containers", ())]
        template = {"metadata": self.metadata, "spec": pod}
        fields = {
            "env": self.env,
            "envFrom": self.env_from,
            "nodePool": _pool_name(self.placement, pools) if self.placement else None,
            "terminationGracePeriodSeconds": self.grace_seconds,
            "startupTimeoutSeconds": self.startup_seconds,
            "podTemplate": {key: value for key, value in template.items() if value},
        }
        return {key: value for key, value in fields.items() if value not in (None, [], {})}


def read_pod(component: Component, claims: dict[str, str]) -> PodParts:
    """Read one service's pod settings; what is read counts as carried.

    Args:
        component: Frontend or worker.
        claims: PersistentVolumeClaims by the name that the graph gives them.
    """
    parts = PodParts()
    _read_environment(component, parts)
    _read_pod_spec(component, parts)
    _read_resources(component, parts)
    _read_shared_memory(component, parts)
    _read_volumes(component.source, parts, claims)
    for owner in (component.source, component.metadata):
        for key in ("labels", "annotations"):
            if found := drop_foreign_marks(owner.at(key), owner.take_map(key)):
                parts.metadata.setdefault(key, {}).update(json.loads(json.dumps(found, default=str)))
    for part in (parts.pod, parts.container):
        _state_privileges(part)
    return parts


def _pool_name(placement: dict[str, Any], taken: dict[str, Any]) -> str:
    """Return the node pool that ``placement`` describes, added to ``taken`` if it is new."""
    for name, known in taken.items():
        if known == placement:
            return name
    selector = placement.get("nodeSelector")
    values = [str(value) for value in selector.values()] if isinstance(selector, dict) else []
    stem = re.sub(r"[^a-z0-9]+", "-", "-".join(values).lower()).strip("-")[:40].strip("-") or "pool"
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    taken[name] = placement
    return name


def is_owned_variable(name: object) -> bool:
    """Return whether the runtime sets an environment variable itself."""
    return isinstance(name, str) and name in _OWNED_VARIABLES


def drop_foreign_marks(source: ManifestSource, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the labels or annotations at ``source`` without those that only Dynamo's operator reads."""
    foreign = {key for key in metadata if _FOREIGN_LABEL.match(str(key))}
    for key in sorted(foreign):
        source.at(key).note("is read by Dynamo's operator alone")
    return {key: value for key, value in metadata.items() if key not in foreign}


def _selects_by_foreign_labels(value: object) -> bool:
    if isinstance(value, dict):
        return any(_selects_by_foreign_labels(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return any(map(_selects_by_foreign_labels, value))
    return isinstance(value, str) and _FOREIGN_LABEL.search(value) is not None


def _without_foreign_terms(part: ManifestSource) -> Any:
    """Return affinities or spreading without the terms that go by foreign labels, which are noted; None: nothing is left."""
    value = part.peek()
    if not _selects_by_foreign_labels(value):
        return part.take()
    if isinstance(value, dict):
        kept = {key: _without_foreign_terms(part.at(key)) for key in part.names()}
        return {key: each for key, each in kept.items() if each is not None} or None
    terms = part.elements()
    for term in terms:
        if _selects_by_foreign_labels(term.peek()):
            term.note(_FOREIGN_SELECTION)
    return [term.take() for term in terms if not _selects_by_foreign_labels(term.peek())] or None


def _read_environment(component: Component, parts: PodParts) -> None:
    source, container = component.source, component.container
    parts.env = [*read_env(source.at("envs")), *read_env(container.at("env"))]
    secret = source.take("envFromSecret")
    if isinstance(secret, str):
        parts.env_from.append({"secretRef": {"name": secret}})
    for index, item in enumerate(container.take_list("envFrom")):
        if isinstance(item, dict) and item.keys() <= {"secretRef", "configMapRef", "prefix"}:
            parts.env_from.append(item)
        else:
            container.at("envFrom", index).note("is not a secretRef or configMapRef")


def read_env(listed: ManifestSource) -> list[dict[str, Any]]:
    """Return the environment variables of a list that a graph can hold."""
    found = []
    for index, item in enumerate(listed.take_list()):
        at = listed.at(index)
        if not (isinstance(item, dict) and "name" in item and item.keys() <= {"name", "value", "valueFrom"}):
            at.note("is not an environment variable with name and value")
        elif is_owned_variable(item["name"]):
            at.note(f"{item['name']} is set by the runtime", item.get("value"))
        elif _selects_by_foreign_labels(item.get("valueFrom")):
            at.note(_FOREIGN_SELECTION, item["name"])
        else:
            found.append({key: str(value) if key == "value" else value for key, value in item.items()})
    return found


def _read_pod_spec(component: Component, parts: PodParts) -> None:
    pod, main = component.pod, component.container
    for key in pod.names():
        if key in _SELECTING:
            kept = _without_foreign_terms(pod.at(key))
            parts.pod |= {} if kept is None else {key: kept}
        elif key in _PLACEMENT:
            parts.placement[key] = pod.take(key)
        elif key == "terminationGracePeriodSeconds" and isinstance(pod.peek(key), int):
            parts.grace_seconds = pod.take(key)
        elif key == "containers" and component.is_beta:
            if sidecars := [each.take() for each in pod.elements(key) if each.base != main.base]:
                parts.pod[key] = sidecars
        elif key in _LISTS:
            if found := pod.take_list(key):
                parts.pod[key] = [*found]
        elif (*pod.base, key) != main.base:
            parts.pod[key] = pod.take(key)
    _read_main_container(component, parts)


def _read_main_container(component: Component, parts: PodParts) -> None:
    main = component.container
    parts.startup_seconds = _startup_seconds(main.peek("startupProbe"))
    main.note_given(_LEFT_OUT)
    elsewhere = _CARRIED_ELSEWHERE | ({"resources"} if component.is_beta else set())
    for key in [each for each in main.names() if (*main.base, each) not in main.taken]:
        if key == "volumeMounts":
            parts.container[key] = [*main.take_list(key)]
        elif key not in elsewhere:
            parts.container[key] = main.take(key)


def _startup_seconds(probe: Any) -> int | None:
    """Return how long a container's start may take, where its probe states that."""
    if not isinstance(probe, dict) or "failureThreshold" not in probe:
        return None
    period, failures = probe.get("periodSeconds", _PROBE_PERIOD_S), probe["failureThreshold"]
    delay = probe.get("initialDelaySeconds", 0)
    are_counts = all(isinstance(each, int) and each >= 0 for each in (delay, period, failures))
    return delay + period * failures if are_counts else None


def _state_privileges(part: dict[str, Any]) -> None:
    """Complete a security context that the operator's own, which is restricted, would contradict."""
    given = part.get("securityContext")
    if isinstance(given, dict):
        implied = {"allowPrivilegeEscalation": True} if given.get("privileged") is True else {}
        implied |= {"runAsNonRoot": False} if given.get("runAsUser") == 0 else {}
        part["securityContext"] = {**implied, **given}


def _read_resources(component: Component, parts: PodParts) -> None:
    """CPU, memory and custom resources go to the container; GPUs are the service's own number."""
    resources, container = component.resources, parts.container
    if component.is_beta:
        _read_native_resources(resources, container)
    else:
        for kind in ("requests", "limits"):
            own = [key for key in resources.names(kind) if key in {"cpu", "memory"}]
            _add_amounts(container, kind, {key: resources.take(kind, key) for key in own})
            custom = resources.take_map(kind, "custom")
            _add_amounts(container, kind, {key: str(each) for key, each in custom.items()})
        if claims := resources.take_list("claims"):
            container["resources"] = {**_map_of(container, "resources"), "claims": claims}
        if resources.word("limits", "gpuType") is not None:
            parts.placement["gpuResourceName"] = resources.take("limits", "gpuType")
    limits = _map_of(_map_of(container, "resources"), "limits")
    has_another = bool(parts.pod.get("resourceClaims")) or any("/" in str(key) for key in limits)
    counts = [resources.peek(kind, component.gpu_key) for kind in ("limits", "requests")]
    if has_another and counts == [None, None]:
        for kind in ("requests", "limits"):
            _add_amounts(container, kind, {GPU_RESOURCE: "0"})


def _read_native_resources(resources: ManifestSource, container: dict[str, Any]) -> None:
    if resources.peek() is not None and not resources.names():
        container["resources"] = resources.take()
    for key in resources.names():
        if others := [name for name in resources.names(key) if name != GPU_RESOURCE]:
            _add_amounts(container, key, {name: resources.take(key, name) for name in others})
        elif not resources.names(key):
            container["resources"] = {**_map_of(container, "resources"), key: resources.take(key)}


def _add_amounts(container: dict[str, Any], kind: str, amounts: dict[str, Any]) -> None:
    if amounts:
        own = _map_of(container, "resources")
        container["resources"] = {**own, kind: {**_map_of(own, kind), **amounts}}


def _map_of(holder: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the map at ``key``; empty if there is none, or a value of another type, which no pod could hold."""
    value = holder.get(key)
    return value if isinstance(value, dict) else {}


def _read_shared_memory(component: Component, parts: PodParts) -> None:
    memory = component.source.at("sharedMemorySize" if component.is_beta else "sharedMemory")
    size = memory if component.is_beta else memory.at("size")
    if memory.peek("disabled") is True or str(memory.peek()) == "0":
        memory.note("is switched off; the operator mounts one for engines all the same")
    if size.peek() is not None and size.base not in size.taken:
        volume = {"medium": "Memory", "sizeLimit": str(size.take())}
        _mount(parts, {"name": "shared-memory", "emptyDir": volume}, "/dev/shm")  # noqa: S108 - the kernel's own path


def _mount(parts: PodParts, volume: dict[str, Any], path: str) -> None:
    parts.pod.setdefault("volumes", []).append(volume)
    parts.container.setdefault("volumeMounts", []).append({"name": volume["name"], "mountPath": path})


def _read_volumes(source: ManifestSource, parts: PodParts, claims: dict[str, str]) -> None:
    """`volumeMounts` names claims of the graph; `pvc` is the older form with the claim in the service."""
    for mount in [*source.elements("volumeMounts"), source.at("pvc"), source.at("compilationCache")]:
        is_cache = mount.peek("useAsCompilationCache") is True or "pvcName" in mount.names()
        name = mount.peek("name") or mount.peek("pvcName")
        target = mount.peek("mountPoint") or mount.peek("mountPath") or (_CACHE_MOUNT if is_cache else None)
        if isinstance(name, str) and isinstance(target, str):
            for key in ("name", "pvcName", "mountPoint", "mountPath", "useAsCompilationCache"):
                mount.take(key)
            claim = {"claimName": claims.get(name, name)}
            _mount(parts, {"name": name, "persistentVolumeClaim": claim}, target)
