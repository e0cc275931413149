"""Watches a graph's EndpointSlices, and reads the graph's workers and routers from them.

The operator labels the Service of each service of the graph; Kubernetes copies the labels to its slices, and removes a pod
from them when it drains. While the API server is unavailable, the last good view is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from penstock.api import WORKER_ROLES, Role
from penstock.core.errors import ClusterError
from penstock.core.http.own_lag import PatientTimeout
from penstock.core.logs import get_logger
from penstock.core.ports import SIDE_CHANNEL_PORT
from penstock.kube.client import KubeClient
from penstock.kube.informer import Informer
from penstock.kube.kinds import ENDPOINT_SLICE, GRAPH_DEPLOYMENT
from penstock.kube.objects.names import (
    GRAPH_LABEL,
    HTTP_PORT,
    ROLE_LABEL,
)
from penstock.router.core.worker import WorkerSpec
from penstock.router.discovery.statefile import Discovery

_FAMILIES: Final = {"IPv4": "{}:{}", "IPv6": "[{}]:{}"}
"""Address types in order of preference; FQDN is deprecated and does not identify a pod."""


def parse_slices(slices: Iterable[Mapping[str, Any]], scheme: str = "http") -> tuple[WorkerSpec, ...]:
    """Return the workers in a graph's EndpointSlices, sorted by name; other endpoints are ignored.

    A pod can be in several slices: one per address family (IPv4 is preferred), and for a short time in two of one family
    while it is moved between them. It is then ready if one slice says so, and draining likewise.

    Args:
        slices: EndpointSlice objects of the graph.
        scheme: ``http`` or ``https``; the same for all workers of a graph.
    """
    found: dict[str, WorkerSpec] = {}
    for each in sorted(slices, key=lambda each: str(each.get("addressType"))):
        for spec in _workers(each, scheme):
            known = found.get(spec.name)
            found[spec.name] = spec if known is None else _merged(known, spec)
    return tuple(found[name] for name in sorted(found))


def router_urls(slices: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the base URLs of a graph's routers, as the EndpointSlices ``slices`` list them.

    Draining routers are included, because their requests continue.
    """
    found = (at for part in slices for role, at, _ in _endpoints(part) if role == Role.ROUTER)
    return tuple(sorted(f"http://{at}" for at in found))


def _workers(part: Mapping[str, Any], scheme: str) -> Iterable[WorkerSpec]:
    for role, address, endpoint in _endpoints(part):
        if role in WORKER_ROLES:
            yield _worker(endpoint, Role(str(role)), f"{scheme}://{address}")


def _endpoints(part: Mapping[str, Any]) -> Iterable[tuple[object, str, Mapping[str, Any]]]:
    """Yield the role, host with port, and entry of each endpoint of a slice."""
    role = (part.get("metadata", {}).get("labels") or {}).get(ROLE_LABEL)
    form, port = _FAMILIES.get(part.get("addressType") or ""), _port(part.get("ports") or ())
    for endpoint in part.get("endpoints") or ():
        addresses = endpoint.get("addresses") or ()
        if form is not None and port is not None and addresses:
            # Kubernetes writes one address per endpoint, and consumers read only the first.
            yield role, form.format(addresses[0], port), endpoint


def _worker(endpoint: Mapping[str, Any], role: Role, url: str) -> WorkerSpec:
    conditions = endpoint.get("conditions") or {}
    # Unknown conditions must be interpreted as ready and not terminating: discovery.k8s.io/v1.
    is_leaving = conditions.get("terminating") is True
    is_ready = conditions.get("ready") is not False and not is_leaving
    pod = endpoint.get("targetRef") or {}
    return WorkerSpec(
        name=str(pod.get("name") or url.partition("://")[2]),
        role=role,
        url=url,
        ready=is_ready,
        draining=is_leaving,
        supervised=True,
        incarnation=str(pod.get("uid") or ""),
        side_channel_port=SIDE_CHANNEL_PORT,
        reason="" if is_ready or is_leaving else "the pod's readiness probe has not passed",
    )


def _port(ports: Iterable[Mapping[str, Any]]) -> int | None:
    numbers = {each.get("name") or "": each.get("port") for each in ports}
    number = numbers.get(HTTP_PORT)
    if number is None and len(numbers) == 1:
        (number,) = numbers.values()
    return number if isinstance(number, int) else None


def _merged(one: WorkerSpec, other: WorkerSpec) -> WorkerSpec:
    if one.incarnation != other.incarnation:
        # If two pods have had the same name (in a StatefulSet), the one that is not draining is used.
        return other if one.draining and not other.draining else one
    if one.url != other.url:
        return one
    if one.draining or other.draining:
        return replace(one, ready=False, draining=True, reason="")
    return one if one.ready else other


log = get_logger(__name__)

FIRST_VIEW_S: Final = 5.0
"""Maximum wait in real seconds for the first list of workers at the start. Chosen; after it the router listens without workers and
reports why."""


class KubernetesDiscovery(Discovery):
    """Discovery of the workers and routers of one graph by its EndpointSlices.

    Args:
        graph: Name of the graph.
        namespace: Namespace of the graph; None uses the service account's or the kubeconfig context's.
        scheme: ``http`` or ``https``, for all workers.
    """

    def __init__(self, *, graph: str, namespace: str | None, scheme: str = "http") -> None:
        super().__init__(routers=())
        self._scheme = scheme
        self._graph = graph
        self._namespace = namespace
        self._client: KubeClient | None = None
        self._informer: Informer | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_changed = False

    @property
    def problem(self) -> str | None:
        """Why the list of workers may be out of date; None if it is current."""
        if self._informer is None:
            return "not started"
        if self._informer.problem is not None:
            return f"Kubernetes: {self._informer.problem}"
        return None if self._informer.synced.is_set() else "Kubernetes: the first list is not in yet"

    async def start(self) -> None:
        """Start to watch, and wait for the first list of workers, at most 5 real seconds (`FIRST_VIEW_S`).

        Raises:
            ConfigError: there are no credentials, or they cannot be used.
        """
        client = self._client = await KubeClient.connect()
        namespace = self._namespace or client.namespace
        log.info("watching EndpointSlices", graph=self._graph, namespace=namespace, server=client.server)
        labels = {GRAPH_LABEL: self._graph}
        informer = self._informer = Informer(
            client, ENDPOINT_SLICE, namespace=namespace, labels=labels, on_change=self._note
        )
        self._task = asyncio.create_task(informer.run(), name="EndpointSlices")
        with suppress(TimeoutError):
            async with PatientTimeout(FIRST_VIEW_S):
                await informer.synced.wait()

    def _refresh(self) -> None:
        if not self._is_changed or self._informer is None:
            return
        self._is_changed = False
        try:
            slices = self._informer.objects.values()
            self._found, self.routers = parse_slices(slices, self._scheme), router_urls(slices)
        except (KeyError, TypeError, ValueError, AttributeError):
            log.exception("EndpointSlices not readable; the last good view is kept", graph=self._graph)

    async def graph(self) -> dict[str, Any]:
        """Return the GraphDeployment object of the graph.

        Raises:
            ClusterError: it cannot be read, or discovery was not started.
        """
        if self._client is None:
            raise ClusterError(f"{self._graph}: discovery has not begun")
        return await self._client.get(GRAPH_DEPLOYMENT, self._graph, namespace=self._namespace)

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _note(self, _what: str, _obj: dict[str, Any]) -> None:
        self._is_changed = True
