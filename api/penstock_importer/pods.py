"""The pod-level parts of a Dynamo service become environment, node pool and pod template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from penstock_api.base import KeyPath
from penstock_importer.source import ManifestSource

_CONTAINER = "main"
_CARRIED_BY_COMMAND = frozenset({"image", "command", "args", "env", "envFrom"})
_PLACEMENT = frozenset({"nodeSelector", "tolerations"})


@dataclass(slots=True)
class PodParts:
    """What a service's pod needs beyond its command, in manifest form."""

    env: list[dict[str, Any]] = field(default_factory=list)
    env_from: list[dict[str, Any]] = field(default_factory=list)
    placement: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    grace_seconds: int | None = None


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
    _read_shared_memory(source, path, pod, container)
    _read_volumes(source, path, pod, container, claims)
    metadata = _read_metadata(source, path)
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
            for inner in source.keys(key_path):
                if inner == "volumeMounts":
                    container[inner] = [*source.take_list((*key_path, inner))]
                elif inner not in _CARRIED_BY_COMMAND:
                    container[inner] = source.take((*key_path, inner))
        elif key in _PLACEMENT:
            parts.placement[key] = source.take(key_path)
        elif key == "terminationGracePeriodSeconds" and isinstance(source.peek(key_path), int):
            parts.grace_seconds = source.take(key_path)
        elif key == "volumes":
            pod[key] = [*source.take_list(key_path)]
        else:
            pod[key] = source.take(key_path)


def _read_resources(source: ManifestSource, path: KeyPath, container: dict[str, Any]) -> None:
    """CPU and memory go to the container; GPUs are the service's own number."""
    resources: dict[str, Any] = {}
    for kind in ("requests", "limits"):
        for key in source.keys((*path, "resources", kind)):
            if key in {"cpu", "memory"}:
                quantity = source.take((*path, "resources", kind, key))
                resources.setdefault(kind, {})[key] = quantity
    for kind, amounts in resources.items():
        own = container.get("resources") or {}
        container["resources"] = {**own, kind: {**(own.get(kind) or {}), **amounts}}


def _read_shared_memory(
    source: ManifestSource, path: KeyPath, pod: dict[str, Any], container: dict[str, Any]
) -> None:
    size = source.peek((*path, "sharedMemory", "size"))
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
    for mount_path in [*mounts, (*path, "pvc")]:
        name = source.peek((*mount_path, "name"))
        target = source.peek((*mount_path, "mountPoint"))
        if not isinstance(name, str) or not isinstance(target, str):
            continue
        source.take((*mount_path, "name"))
        source.take((*mount_path, "mountPoint"))
        claim = {"name": name, "persistentVolumeClaim": {"claimName": claims.get(name, name)}}
        pod.setdefault("volumes", []).append(claim)
        container.setdefault("volumeMounts", []).append({"name": name, "mountPath": target})


def _read_metadata(source: ManifestSource, path: KeyPath) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for owner in (path, (*path, "extraPodMetadata")):
        for key in ("labels", "annotations"):
            found = source.take_map((*owner, key))
            if found:
                metadata.setdefault(key, {}).update(json.loads(json.dumps(found, default=str)))
    return metadata
