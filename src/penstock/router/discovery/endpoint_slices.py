"""Which workers and routers a graph's EndpointSlices name. Pure.

The operator labels each service's Service; Kubernetes copies the labels to its slices, and takes a pod out of
them when it drains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.api import WORKER_ROLES, Role
from penstock.kube.objects.names import HTTP_PORT, ROLE_LABEL
from penstock.router.core.worker_spec import WorkerSpec

_FAMILIES: Final = {"IPv4": "http://{}:{}", "IPv6": "http://[{}]:{}"}
"""Address types in order of preference; FQDN is deprecated and names no pod."""


def parse_slices(slices: Iterable[Mapping[str, Any]]) -> tuple[WorkerSpec, ...]:
    """Return the workers of a graph's EndpointSlices, by name; endpoints that are no workers are left out.

    A pod may stand in several slices: of both address families, of which IPv4 is taken, and for a moment in
    two of one family while it is moved between them; then it is ready if one says so, and leaving likewise.
    """
    found: dict[str, WorkerSpec] = {}
    known = [each for each in slices if each.get("addressType") in _FAMILIES]
    for each in sorted(known, key=lambda each: str(each["addressType"])):
        for spec in _workers(each):
            other = found.get(spec.name)
            if other is None or _is_newer(spec, other):
                found[spec.name] = spec
            elif other.url == spec.url:
                found[spec.name] = _merged(other, spec)
    return tuple(found[name] for name in sorted(found))


def router_urls(slices: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the base URLs of the graph's routers, leaving ones included: their requests go on."""
    return tuple(
        sorted(
            form.format(addresses[0], port)
            for part in slices
            if _role(part) == Role.ROUTER
            and (form := _FAMILIES.get(part.get("addressType") or "")) is not None
            and (port := _port(part.get("ports") or ())) is not None
            for endpoint in part.get("endpoints") or ()
            if (addresses := endpoint.get("addresses") or ())
        )
    )


def _role(part: Mapping[str, Any]) -> object:
    return (part.get("metadata", {}).get("labels") or {}).get(ROLE_LABEL)


def _workers(part: Mapping[str, Any]) -> Iterable[WorkerSpec]:
    role, port = _role(part), _port(part.get("ports") or ())
    if role not in WORKER_ROLES or port is None:
        return
    form = _FAMILIES[part["addressType"]]
    for endpoint in part.get("endpoints") or ():
        addresses = endpoint.get("addresses") or ()
        if addresses:
            # One address per endpoint is what Kubernetes writes and what consumers read.
            yield _worker(endpoint, Role(str(role)), form.format(addresses[0], port))


def _worker(endpoint: Mapping[str, Any], role: Role, url: str) -> WorkerSpec:
    conditions = endpoint.get("conditions") or {}
    # Unknown conditions are to be read as ready and not terminating: discovery.k8s.io/v1.
    is_leaving = conditions.get("terminating") is True
    is_ready = conditions.get("ready") is not False and not is_leaving
    pod = endpoint.get("targetRef") or {}
    return WorkerSpec(
        name=str(pod.get("name") or url.removeprefix("http://")),
        role=role,
        url=url,
        ready=is_ready,
        draining=is_leaving,
        supervised=True,
        incarnation=str(pod.get("uid") or ""),
        reason="" if is_ready or is_leaving else "the pod's readiness probe has not passed",
    )


def _port(ports: Iterable[Mapping[str, Any]]) -> int | None:
    numbers = {each.get("name") or "": each.get("port") for each in ports}
    number = numbers.get(HTTP_PORT)
    if number is None and len(numbers) == 1:
        (number,) = numbers.values()
    return number if isinstance(number, int) else None


def _is_newer(spec: WorkerSpec, other: WorkerSpec) -> bool:
    """Whether a name that two pods had in turn (a StatefulSet's) is by now the first one's."""
    return spec.incarnation != other.incarnation and other.draining and not spec.draining


def _merged(one: WorkerSpec, other: WorkerSpec) -> WorkerSpec:
    if one.incarnation != other.incarnation:
        return one
    if one.draining or other.draining:
        return replace(one, ready=False, draining=True, reason="")
    return one if one.ready else other
