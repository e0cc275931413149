"""The pod-level parts of a Dynamo service become environment, node pool and pod template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from penstock.api.rule import KeyPath
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
    template: dict[str, Any] = field(default_factory=dict)
    grace_seconds: int | None = None
    startup_seconds: int | None = None


def read_pod(source: ManifestSource, path: KeyPath, claims: dict[str, str]) -> PodParts:
    """Read one service's pod settings.

    Args:
        source: The manifest; what is read counts as carried.
        path: Of the service.
        claims: PersistentVolumeClaims by the name that the graph gives them.
    """
    parts = PodParts()
    container: dict[str, Any] = {}
    pod: dict[str, Any] = {}
    _read_environment(source, path, parts)
    _read_extra_pod_spec(source, path, parts, pod, container)
    _read_resources(source, path, container)
    _read_device(source, path, parts, pod, container)
    _read_shared_memory(source, path, pod, container)
    _read_volumes(source, path, pod, container, claims)
    metadata = _read_metadata(source, path)
    for part in (pod, container):
        _state_privileges(part)
    if container:
        pod["containers"] = [{"name": _CONTAINER, **container}, *pod.get("containers", ())]
    if metadata:
        parts.template["metadata"] = metadata
    if pod:
        parts.template["spec"] = pod
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


def _read_environment(source: ManifestSource, path: KeyPath, parts: PodParts) -> None:
    for env_path in ((*path, "envs"), (*path, "extraPodSpec", "mainContainer", "env")):
        parts.env += read_env(source, env_path)
    secret = source.take((*path, "envFromSecret"))
    if isinstance(secret, str):
        parts.env_from.append({"secretRef": {"name": secret}})
    from_path = (*path, "extraPodSpec", "mainContainer", "envFrom")
    for index, item in enumerate(source.take_list(from_path)):
        if isinstance(item, dict) and item.keys() <= {"secretRef", "configMapRef", "prefix"}:
            parts.env_from.append(item)
        else:
            source.note((*from_path, index), "is no secretRef or configMapRef")


def read_env(source: ManifestSource, path: KeyPath) -> list[dict[str, Any]]:
    """Return the environment variables at ``path`` that a graph can hold."""
    found = []
    for index, item in enumerate(source.take_list(path)):
        if isinstance(item, dict) and "name" in item and item.keys() <= {"name", "value", "valueFrom"}:
            if is_owned_variable(item["name"]):
                source.note((*path, index), f"{item['name']} is set by the runtime", item.get("value"))
            elif selects_by_foreign_labels(item.get("valueFrom")):
                source.note((*path, index), FOREIGN_SELECTION, item["name"])
            else:
                found.append({key: str(value) if key == "value" else value for key, value in item.items()})
        else:
            source.note((*path, index), "is no environment variable with name and value")
    return found


def _read_extra_pod_spec(
    source: ManifestSource, path: KeyPath, parts: PodParts, pod: dict[str, Any], container: dict[str, Any]
) -> None:
    spec_path = (*path, "extraPodSpec")
    for key in source.keys(spec_path):
        key_path = (*spec_path, key)
        if key == "mainContainer":
            _read_main_container(source, key_path, parts, container)
        elif key in _SELECTING and selects_by_foreign_labels(source.peek(key_path)):
            source.note(key_path, FOREIGN_SELECTION)
        elif key in _PLACEMENT:
            parts.placement[key] = source.take(key_path)
        elif key == "terminationGracePeriodSeconds" and isinstance(source.peek(key_path), int):
            parts.grace_seconds = source.take(key_path)
        elif key in _LISTS:
            found = source.take_list(key_path)
            if found:
                pod[key] = [*found]
        else:
            pod[key] = source.take(key_path)


def _read_main_container(
    source: ManifestSource, path: KeyPath, parts: PodParts, container: dict[str, Any]
) -> None:
    parts.startup_seconds = read_startup_seconds(source, path)
    for key in [each for each in source.keys(path) if (*path, each) not in source.taken]:
        if key == "volumeMounts":
            container[key] = [*source.take_list((*path, key))]
        elif key not in _CARRIED_BY_COMMAND:
            container[key] = source.take((*path, key))


def _state_privileges(part: dict[str, Any]) -> None:
    """Complete a security context that the operator's own, which is restricted, would contradict."""
    given = part.get("securityContext")
    if isinstance(given, dict):
        implied = {"allowPrivilegeEscalation": True} if given.get("privileged") is True else {}
        implied |= {"runAsNonRoot": False} if given.get("runAsUser") == 0 else {}
        part["securityContext"] = {**implied, **given}


def _read_resources(source: ManifestSource, path: KeyPath, container: dict[str, Any]) -> None:
    """CPU, memory and custom resources go to the container; GPUs are the service's own number."""
    for kind in ("requests", "limits"):
        for key in source.keys((*path, "resources", kind)):
            if key in {"cpu", "memory"}:
                quantity = source.take((*path, "resources", kind, key))
                _add_amounts(container, kind, {key: quantity})
        custom = source.take_map((*path, "resources", kind, "custom"))
        _add_amounts(container, kind, {key: str(each) for key, each in custom.items()})
    claims = source.take_list((*path, "resources", "claims"))
    if claims:
        container["resources"] = {**_map_of(container, "resources"), "claims": claims}


def _add_amounts(container: dict[str, Any], kind: str, amounts: dict[str, Any]) -> None:
    if amounts:
        own = _map_of(container, "resources")
        container["resources"] = {**own, kind: {**_map_of(own, kind), **amounts}}


def _map_of(holder: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the map at ``key``; empty if there is none, or a value of another type, which no pod could hold."""
    value = holder.get(key)
    return value if isinstance(value, dict) else {}


def _read_device(
    source: ManifestSource,
    path: KeyPath,
    parts: PodParts,
    pod: dict[str, Any],
    container: dict[str, Any],
) -> None:
    """Carry how a component asks for its accelerator beside the number of GPUs."""
    device = (*path, "device")
    shares = {
        key: str(source.take((*device, "resources", key)))
        for key in source.keys((*device, "resources"))
        if (*device, "resources", key) not in source.taken
    }
    _add_amounts(container, "limits", shares)
    for key in _PLACEMENT & set(source.keys(device)):
        parts.placement[key] = source.take((*device, key))
    if source.word((*device, "schedulerName")) is not None:
        pod["schedulerName"] = source.take((*device, "schedulerName"))
    resource = source.word((*path, "resources", "limits", "gpuType"))
    if resource is not None:
        source.take((*path, "resources", "limits", "gpuType"))
        parts.placement["gpuResourceName"] = resource
    if _asks_for_another_device(pod, container) and not _states_gpus(source, path):
        for kind in ("requests", "limits"):
            _add_amounts(container, kind, {_GPU_RESOURCE: "0"})


def _asks_for_another_device(pod: dict[str, Any], container: dict[str, Any]) -> bool:
    """Say whether a pod claims a device, or asks for an extended resource, which has a domain in its name."""
    amounts = _map_of(_map_of(container, "resources"), "limits")
    return bool(pod.get("resourceClaims")) or any("/" in str(key) for key in amounts)


def _states_gpus(source: ManifestSource, path: KeyPath) -> bool:
    places = [(*path, "resources", kind, "gpu") for kind in ("limits", "requests")]
    keys = source.keys((*path, "device", "resources"))
    return any(source.peek(each) is not None for each in places) or any(key.endswith("/gpu") for key in keys)


def _read_shared_memory(
    source: ManifestSource, path: KeyPath, pod: dict[str, Any], container: dict[str, Any]
) -> None:
    size = source.peek((*path, "sharedMemory", "size"))
    if source.peek((*path, "sharedMemory", "disabled")) is True:
        source.note(
            (*path, "sharedMemory"), "is switched off; the operator mounts one for engines all the same"
        )
    if size is None:
        return
    source.take((*path, "sharedMemory", "size"))
    volume = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}
    pod.setdefault("volumes", []).append(volume)
    mount = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108 - the kernel's own path
    container.setdefault("volumeMounts", []).append(mount)


def _read_volumes(
    source: ManifestSource,
    path: KeyPath,
    pod: dict[str, Any],
    container: dict[str, Any],
    claims: dict[str, str],
) -> None:
    """`volumeMounts` names claims of the graph; `pvc` is the older form with the claim in the service."""
    mounts = [(*path, "volumeMounts", index) for index in range(source.length((*path, "volumeMounts")))]
    for mount_path in [*mounts, (*path, "pvc"), (*path, "compilationCache")]:
        is_cache = source.peek((*mount_path, "useAsCompilationCache")) is True or "pvcName" in source.keys(
            mount_path
        )
        name = source.peek((*mount_path, "name")) or source.peek((*mount_path, "pvcName"))
        target = source.peek((*mount_path, "mountPoint")) or source.peek((*mount_path, "mountPath"))
        target = target or (_CACHE_MOUNT if is_cache else None)
        if not isinstance(name, str) or not isinstance(target, str):
            continue
        for key in ("name", "pvcName", "mountPoint", "mountPath", "useAsCompilationCache"):
            source.take((*mount_path, key))
        claim = {"name": name, "persistentVolumeClaim": {"claimName": claims.get(name, name)}}
        pod.setdefault("volumes", []).append(claim)
        container.setdefault("volumeMounts", []).append({"name": name, "mountPath": target})


def _read_metadata(source: ManifestSource, path: KeyPath) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for owner in (path, (*path, "extraPodMetadata")):
        for key in ("labels", "annotations"):
            found = drop_foreign_marks(source, source.take_map((*owner, key)), (*owner, key))
            if found:
                metadata.setdefault(key, {}).update(json.loads(json.dumps(found, default=str)))
    return metadata
