"""The pod-level parts of a Dynamo service become environment, node pool and pod template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from penstock.runtimes.dynamo.importer.left_out import (
    FOREIGN_SELECTION,
    drop_foreign_marks,
    is_owned_variable,
    read_startup_seconds,
    selects_by_foreign_labels,
)
from penstock.runtimes.dynamo.importer.source import ManifestSource

_CONTAINER = "main"
_CARRIED_BY_COMMAND = frozenset({"image", "command", "args", "env", "envFrom"})
_PLACEMENT = frozenset({"nodeSelector", "tolerations"})
_LISTS = frozenset({"volumes", "containers"})
_SELECTING = frozenset({"affinity", "topologySpreadConstraints"})
"""Parts of a pod that choose other pods by their labels."""

_GPU_RESOURCE = "nvidia.com/gpu"
_CACHE_MOUNT = "/root/.cache/vllm"
"""Where Dynamo's operator mounts a compilation cache of vLLM's, if no path is given."""


@dataclass(slots=True)
class PodParts:
    """What a service's pod needs beyond its command, in manifest form."""

    env: list[dict[str, Any]] = field(default_factory=list)
    env_from: list[dict[str, Any]] = field(default_factory=list)
    placement: dict[str, Any] = field(default_factory=dict)
    pod: dict[str, Any] = field(default_factory=dict)
    container: dict[str, Any] = field(default_factory=dict)
    grace_seconds: int | None = None
    startup_seconds: int | None = None

    def service_fields(self, pools: dict[str, Any]) -> dict[str, Any]:
        """Return the service's keys that follow; a node pool that is new is added to ``pools``."""
        fields = {
            "env": self.env,
            "envFrom": self.env_from,
            "nodePool": pool_name(self.placement, pools) if self.placement else None,
            "terminationGracePeriodSeconds": self.grace_seconds,
            "startupTimeoutSeconds": self.startup_seconds,
            "podTemplate": self.pod,
        }
        return {key: value for key, value in fields.items() if value not in (None, [], {})}


def read_pod(service: ManifestSource, claims: dict[str, str]) -> PodParts:
    """Read one service's pod settings.

    Args:
        service: What is read counts as carried.
        claims: PersistentVolumeClaims by the name that the graph gives them.
    """
    parts = PodParts()
    _read_environment(service, parts)
    _read_extra_pod_spec(service.at("extraPodSpec"), parts)
    _read_resources(service.at("resources"), parts.container)
    _read_device(service, parts)
    _read_shared_memory(service.at("sharedMemory"), parts)
    _read_volumes(service, parts, claims)
    metadata = _read_metadata(service)
    for part in (parts.pod, parts.container):
        _state_privileges(part)
    pod = parts.pod
    if parts.container:
        pod["containers"] = [{"name": _CONTAINER, **parts.container}, *pod.get("containers", ())]
    parts.pod = {
        **({"metadata": metadata} if metadata else {}),
        **({"spec": pod} if pod else {}),
    }
    return parts


def pool_name(placement: dict[str, Any], taken: dict[str, Any]) -> str:
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


def _read_environment(service: ManifestSource, parts: PodParts) -> None:
    container = service.at("extraPodSpec", "mainContainer")
    parts.env = [*read_env(service.at("envs")), *read_env(container.at("env"))]
    secret = service.take("envFromSecret")
    if isinstance(secret, str):
        parts.env_from.append({"secretRef": {"name": secret}})
    for index, item in enumerate(container.take_list("envFrom")):
        if isinstance(item, dict) and item.keys() <= {"secretRef", "configMapRef", "prefix"}:
            parts.env_from.append(item)
        else:
            container.at("envFrom", index).note("is no secretRef or configMapRef")


def read_env(listed: ManifestSource) -> list[dict[str, Any]]:
    """Return the environment variables of a list that a graph can hold."""
    found = []
    for index, item in enumerate(listed.take_list()):
        at = listed.at(index)
        if not (isinstance(item, dict) and "name" in item and item.keys() <= {"name", "value", "valueFrom"}):
            at.note("is no environment variable with name and value")
        elif is_owned_variable(item["name"]):
            at.note(f"{item['name']} is set by the runtime", item.get("value"))
        elif selects_by_foreign_labels(item.get("valueFrom")):
            at.note(FOREIGN_SELECTION, item["name"])
        else:
            found.append({key: str(value) if key == "value" else value for key, value in item.items()})
    return found


def _read_extra_pod_spec(extra: ManifestSource, parts: PodParts) -> None:
    for key in extra.names():
        if key == "mainContainer":
            _read_main_container(extra.at(key), parts)
        elif key in _SELECTING and selects_by_foreign_labels(extra.peek(key)):
            extra.at(key).note(FOREIGN_SELECTION)
        elif key in _PLACEMENT:
            parts.placement[key] = extra.take(key)
        elif key == "terminationGracePeriodSeconds" and isinstance(extra.peek(key), int):
            parts.grace_seconds = extra.take(key)
        elif key not in _LISTS:
            parts.pod[key] = extra.take(key)
        elif found := extra.take_list(key):
            parts.pod[key] = [*found]


def _read_main_container(container: ManifestSource, parts: PodParts) -> None:
    parts.startup_seconds = read_startup_seconds(container)
    for key in [each for each in container.names() if (*container.base, each) not in container.taken]:
        if key == "volumeMounts":
            parts.container[key] = [*container.take_list(key)]
        elif key not in _CARRIED_BY_COMMAND:
            parts.container[key] = container.take(key)


def _state_privileges(part: dict[str, Any]) -> None:
    """Complete a security context that the operator's own, which is restricted, would contradict."""
    given = part.get("securityContext")
    if isinstance(given, dict):
        implied = {"allowPrivilegeEscalation": True} if given.get("privileged") is True else {}
        implied |= {"runAsNonRoot": False} if given.get("runAsUser") == 0 else {}
        part["securityContext"] = {**implied, **given}


def _read_resources(resources: ManifestSource, container: dict[str, Any]) -> None:
    """CPU, memory and custom resources go to the container; GPUs are the service's own number."""
    for kind in ("requests", "limits"):
        own = [key for key in resources.names(kind) if key in {"cpu", "memory"}]
        _add_amounts(container, kind, {key: resources.take(kind, key) for key in own})
        custom = resources.take_map(kind, "custom")
        _add_amounts(container, kind, {key: str(each) for key, each in custom.items()})
    if claims := resources.take_list("claims"):
        container["resources"] = {**_map_of(container, "resources"), "claims": claims}


def _add_amounts(container: dict[str, Any], kind: str, amounts: dict[str, Any]) -> None:
    if amounts:
        own = _map_of(container, "resources")
        container["resources"] = {**own, kind: {**_map_of(own, kind), **amounts}}


def _map_of(holder: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the map at ``key``; empty if there is none, or a value of another type, which no pod could hold."""
    value = holder.get(key)
    return value if isinstance(value, dict) else {}


def _read_device(service: ManifestSource, parts: PodParts) -> None:
    """Carry the accelerator request of a component that is not ``nvidia.com/gpu``."""
    if service.word("resources", "limits", "gpuType") is not None:
        parts.placement["gpuResourceName"] = service.take("resources", "limits", "gpuType")
    amounts = _map_of(_map_of(parts.container, "resources"), "limits")
    has_another = bool(parts.pod.get("resourceClaims")) or any("/" in str(key) for key in amounts)
    if has_another and all(service.peek("resources", kind, "gpu") is None for kind in ("limits", "requests")):
        for kind in ("requests", "limits"):
            _add_amounts(parts.container, kind, {_GPU_RESOURCE: "0"})


def _read_shared_memory(memory: ManifestSource, parts: PodParts) -> None:
    if memory.peek("disabled") is True:
        memory.note("is switched off; the operator mounts one for engines all the same")
    if memory.peek("size") is not None:
        size = {"medium": "Memory", "sizeLimit": str(memory.take("size"))}
        _mount(parts, {"name": "shared-memory", "emptyDir": size}, "/dev/shm")  # noqa: S108 - the kernel's own path


def _mount(parts: PodParts, volume: dict[str, Any], path: str) -> None:
    parts.pod.setdefault("volumes", []).append(volume)
    parts.container.setdefault("volumeMounts", []).append({"name": volume["name"], "mountPath": path})


def _read_volumes(service: ManifestSource, parts: PodParts, claims: dict[str, str]) -> None:
    """`volumeMounts` names claims of the graph; `pvc` is the older form with the claim in the service."""
    for mount in [*service.elements("volumeMounts"), service.at("pvc"), service.at("compilationCache")]:
        is_cache = mount.peek("useAsCompilationCache") is True or "pvcName" in mount.names()
        name = mount.peek("name") or mount.peek("pvcName")
        target = mount.peek("mountPoint") or mount.peek("mountPath") or (_CACHE_MOUNT if is_cache else None)
        if isinstance(name, str) and isinstance(target, str):
            for key in ("name", "pvcName", "mountPoint", "mountPath", "useAsCompilationCache"):
                mount.take(key)
            claim = {"claimName": claims.get(name, name)}
            _mount(parts, {"name": name, "persistentVolumeClaim": claim}, target)


def _read_metadata(service: ManifestSource) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for owner in (service, service.at("extraPodMetadata")):
        for key in ("labels", "annotations"):
            if found := drop_foreign_marks(owner.at(key), owner.take_map(key)):
                metadata.setdefault(key, {}).update(json.loads(json.dumps(found, default=str)))
    return metadata
