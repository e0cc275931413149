"""What a podTemplate may not add to a pod: a way out of its container, or another account's rights.

Pure. Who may write a GraphDeployment may not, by that alone, run privileged pods: the operator would lend its
own right to create them. What the operator builds by itself (a node pool's cacheMount) is its user's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock_core.errors import Problem

ALLOWED_BY: Final = "operator.allowPrivilegedPodTemplates"
"""The chart's value that allows all of it."""

_HOST: Final = ("hostNetwork", "hostPID", "hostIPC")
_ACCOUNT: Final = ("serviceAccountName", "serviceAccount")
_CONTAINERS: Final = ("containers", "initContainers", "ephemeralContainers")


def added_privileges(built: Mapping[str, Any], template: Mapping[str, Any], path: str) -> tuple[Problem, ...]:
    """Return the privileges of ``template`` that ``built`` lacks.

    Args:
        built: The pod template before the user's overlay.
        template: The pod template after it.
        path: Where the overlay stands in the manifest, for messages.
    """
    before = set(_privileges(built.get("spec") or {}))
    found = [each for each in _privileges(template.get("spec") or {}) if each not in before]
    remedy = f"not allowed in a podTemplate; remove it, or set the chart's {ALLOWED_BY}"
    return tuple(Problem(path=f"{path}.spec.{key}", message=f"{value} is {remedy}") for key, value in found)


def _privileges(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield place and value of each privilege of a pod's specification."""
    for key in _HOST:
        if spec.get(key):
            yield key, "true"
    for key in _ACCOUNT:
        if spec.get(key):
            yield key, str(spec[key])
    for volume in _maps(spec.get("volumes")):
        if volume.get("hostPath"):
            yield f"volumes[{volume.get('name')}].hostPath", str(_map(volume["hostPath"]).get("path"))
    for kind in _CONTAINERS:
        for container in _maps(spec.get(kind)):
            where = f"{kind}[{container.get('name')}]"
            for key, value in _of_container(container):
                yield f"{where}.{key}", value


def _of_container(container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    security = _map(container.get("securityContext"))
    for key in ("privileged", "allowPrivilegeEscalation"):
        if security.get(key):
            yield f"securityContext.{key}", "true"
    added = _map(security.get("capabilities")).get("add")
    if added:
        yield "securityContext.capabilities.add", ", ".join(map(str, added))
    if security.get("procMount") not in {None, "Default"}:
        yield "securityContext.procMount", str(security["procMount"])
    for port in _maps(container.get("ports")):
        if port.get("hostPort"):
            yield "ports.hostPort", str(port["hostPort"])


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
