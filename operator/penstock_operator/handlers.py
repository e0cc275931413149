"""Kopf's handlers: every event of a GraphDeployment or a ScalingAdapter marks its graph. The only importer of kopf.

Kopf runs in a thread with an event loop of its own, because it claims its loop's signals and ends by cancelling
every task there. Its handlers decide nothing and write nothing (no annotations, no finalizers, no Events):
what is true is read from the informers, so an event that comes early, late, twice or never changes nothing
but the time of the next look.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp
import kopf

from penstock_core.logs import get_logger
from penstock_kube.credentials import Credentials
from penstock_kube.kinds import GRAPH_DEPLOYMENT, SCALING_ADAPTER
from penstock_operator.queue import Key

LOGIN_S: Final = 600.0
"""How long kopf uses one reading of the credentials; kubelet replaces a pod's token long before it expires."""

RESTART_S: Final = 10.0
"""Pause before kopf is started again after it failed; the informers mark graphs meanwhile. Chosen."""

STOP_S: Final = 10.0
"""Longest wait for kopf's end; its thread is a daemon and writes nothing, so leaving it behind is harmless."""

log = get_logger(__name__)


class KopfThread:
    """Kopf beside the operator's own loop."""

    def __init__(
        self,
        mark: Callable[[Key], None],
        *,
        namespace: str | None,
        kubeconfig: Path | None = None,
        context: str | None = None,
    ) -> None:
        """Prepare; `start` runs it.

        Args:
            mark: Called in the event loop that calls `start`.
            namespace: None watches all.
            kubeconfig: As `KubeClient.connect`.
            context: As `KubeClient.connect`.
        """
        self._mark = mark
        self._namespace = namespace
        self._kubeconfig = kubeconfig
        self._context = context
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching."""
        # Kopf logs every event of every object; what matters of it the reconciler logs itself.
        for name in ("kopf", "kopf.objects"):
            logging.getLogger(name).setLevel(logging.WARNING)
        # It warns that signals are not its own here, which is what is wanted.
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="kopf", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End watching and wait for it for a while."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_S)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.is_set():
            try:
                asyncio.run(self._operator(loop))
            except Exception:  # root of the thread: informers go on without kopf
                log.exception("kopf ended; it is started again", retry_s=RESTART_S)
            self._stop.wait(RESTART_S)

    async def _operator(self, loop: asyncio.AbstractEventLoop) -> None:
        registry = kopf.OperatorRegistry()
        group, version = GRAPH_DEPLOYMENT.api_version.split("/")
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.peering.standalone = True
        settings.scanning.disabled = True  # needs rights to list CRDs and namespaces, for nothing used here
        settings.process.ultimate_exiting_timeout = None  # it would end the whole process

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            return await self._login()

        @kopf.on.event(group, version, GRAPH_DEPLOYMENT.plural, registry=registry)
        async def graph_changed(namespace: str | None, name: str | None, **_: Any) -> None:
            self._tell(loop, namespace, name)

        @kopf.on.event(group, version, SCALING_ADAPTER.plural, registry=registry)
        async def adapter_changed(namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
            self._tell(loop, namespace, spec.get("graph"))

        await kopf.operator(
            registry=registry,
            settings=settings,
            clusterwide=self._namespace is None,
            namespaces=() if self._namespace is None else (self._namespace,),
            stop_flag=self._stop,
        )

    async def _login(self) -> kopf.AiohttpSession:
        """Give kopf a session with the credentials that the client uses too."""
        credentials = await Credentials.load(kubeconfig=self._kubeconfig, context=self._context)
        token = credentials.token()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=await credentials.tls()),
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            proxy=credentials.proxy,
        )
        return kopf.AiohttpSession(
            server=credentials.server,
            aiohttp_session=session,
            default_namespace=credentials.namespace,
            expiration=datetime.now(UTC) + timedelta(seconds=LOGIN_S),
        )

    def _tell(self, loop: asyncio.AbstractEventLoop, namespace: str | None, name: Any) -> None:
        if namespace and isinstance(name, str) and not self._stop.is_set():
            loop.call_soon_threadsafe(self._mark, (namespace, name))
