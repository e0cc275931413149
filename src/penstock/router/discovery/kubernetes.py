"""Watches a graph's EndpointSlices; the last good view survives an API server that is away."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from penstock.core.errors import ClusterError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.informer import Informer
from penstock.kube.kinds import ENDPOINT_SLICE, GRAPH_DEPLOYMENT
from penstock.kube.objects.names import GRAPH_LABEL
from penstock.router.core.worker_spec import WorkerSpec
from penstock.router.discovery.endpoint_slices import parse_slices, router_urls

log = get_logger(__name__)

FIRST_VIEW_S: Final = 5.0
"""Chosen: longest wait for the first view at start; later the router listens without one and says why."""


class KubernetesDiscovery:
    """Workers of one graph in one namespace."""

    def __init__(self, *, graph: str, namespace: str | None) -> None:
        """Prepare; nothing is read yet.

        Args:
            graph: The graph's name.
            namespace: Where it lives; None takes the service account's or the kubeconfig context's.
        """
        self._graph = graph
        self._namespace = namespace
        self._client: KubeClient | None = None
        self._informer: Informer | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_changed = False
        self._view: tuple[WorkerSpec, ...] = ()
        self._routers: tuple[str, ...] = ()

    @property
    def problem(self) -> str | None:
        """Why the view may be out of date, or None."""
        if self._informer is None:
            return "not started"
        if self._informer.problem is not None:
            return f"Kubernetes: {self._informer.problem}"
        return None if self._informer.synced.is_set() else "Kubernetes: the first list is not in yet"

    async def start(self) -> None:
        """Watch, and wait some seconds for the first view.

        Raises:
            ConfigError: there are no credentials, or they cannot be used.
        """
        self._client = await KubeClient.connect()
        namespace = self._namespace or self._client.namespace
        log.info(
            "watching EndpointSlices", graph=self._graph, namespace=namespace, server=self._client.server
        )
        self._informer = Informer(
            self._client,
            ENDPOINT_SLICE,
            namespace=namespace,
            labels={GRAPH_LABEL: self._graph},
            on_change=self._note,
        )
        self._task = asyncio.create_task(self._informer.run(), name="EndpointSlices")
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_VIEW_S):
                await self._informer.synced.wait()

    def poll(self) -> tuple[WorkerSpec, ...] | None:
        """Return the workers if they have changed since the last call, else None; never raises."""
        if not self._is_changed or self._informer is None:
            return None
        self._is_changed = False
        try:
            view = parse_slices(self._informer.objects.values())
            self._routers = router_urls(self._informer.objects.values())
        except (KeyError, TypeError, ValueError, AttributeError):
            log.exception("EndpointSlices not readable; the last good view is kept", graph=self._graph)
            return None
        if view == self._view:
            return None
        self._view = view
        return view

    def routers(self) -> tuple[str, ...]:
        """Return the base URLs of the graph's routers as last seen."""
        return self._routers

    async def graph(self) -> dict[str, Any]:
        """Return the graph's object.

        Raises:
            ClusterError: it cannot be read, or discovery has not begun.
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
