"""Kopf, on the operator's own event loop: what drives GraphDeployments and ScalingAdapters. The only importer of kopf.

Kopf holds the only watch of both kinds. Its handlers put every object of its first list, every change and every
deletion into the `HandlerStore` from which the reconciler reads, and that enqueues the graph. They write nothing:
no annotations, no finalizers of kopf's, no Events. Kopf that ends is started again, and lists everything again;
meanwhile the stores say why they may be out of date, which fails readiness.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any, Final

import aiohttp
import kopf

from penstock.core.errors import ClusterError, ConfigError
from penstock.core.http.loop import reclaim_signals
from penstock.core.logs import get_logger
from penstock.kube.backoff import Backoff
from penstock.kube.client import KubeClient, selector_of
from penstock.kube.informer import SETTLED_S, STREAM_S, ObjectKey, key_of
from penstock.kube.transport import ANSWER_S, CONNECT_S, SILENCE_S
from penstock.operator.handler_store import HandlerStore, Listed
from penstock.operator.trim import Object, version_of

CHECK_S: Final = 60.0
"""Chosen: between two comparisons with a list; a thousand graphs cost some 30 ms of processor time each."""

FIRST_CHECK_S: Final = 2.0
"""Chosen: between two comparisons until everything has been reported once, and after kopf listed again."""

STOP_S: Final = 5.0
"""Chosen: longest wait for kopf's end. Its handlers write nothing, so one that stays behind harms nothing."""

LOGIN_GAP_S: Final = 10.0
"""Chosen: credentials that are refused sooner than this after they were read will not get better by reading them."""

RETRIES_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Chosen: kopf's pauses between tries of one request; after the last it ends, and is started again."""

log = get_logger(__name__)


class KopfOperator:
    """Runs kopf for one store.

    One kopf a kind, because of several watches in one the others are left behind when one of them fails.
    """

    def __init__(
        self,
        client: KubeClient,
        store: HandlerStore,
        *,
        namespace: str | None,
        liveness_endpoint: str | None = None,
    ) -> None:
        """Prepare; `run` starts it.

        Args:
            client: Lists for comparison, and lends its credentials.
            store: Of the kind to watch; its objects change as handlers are called.
            namespace: None watches all.
            liveness_endpoint: ``http://HOST:PORT/PATH`` where kopf answers liveness probes; None: nowhere.
        """
        self._client = client
        self._store = store
        self._namespace = namespace
        self._liveness_endpoint = liveness_endpoint
        self._login_s: float | None = None
        self._sessions: list[aiohttp.ClientSession] = []
        self._credentials_version = 0
        # Kopf logs every event of every object; what matters of it the reconciler logs itself.
        for name in ("kopf", "kopf.objects"):
            logging.getLogger(name).setLevel(logging.WARNING)

    async def run(self) -> None:
        """Watch until cancelled; kopf that ends is started again with growing pauses."""
        backoff = Backoff(self._client.rng, first_s=0.2, limit_s=10.0)
        while True:
            started_s = time.monotonic()
            try:
                # Kopf looks for its kind once: it has to be there before it starts.
                await self._compare()
                ended = await self._run_kopf()
            except (ClusterError, ConfigError) as exc:
                ended = str(exc)
            except Exception as exc:  # noqa: BLE001 - whatever kopf ends with, which it has logged: it is started again
                ended = f"kopf: {type(exc).__name__}: {exc}"
            if ended is not None:
                self._complain(ended)
            if time.monotonic() - started_s >= SETTLED_S:
                backoff.reset()
            await asyncio.sleep(backoff.pause_s())

    async def _run_kopf(self) -> str | None:
        """Run kopf until it ends or has to; return what went wrong, None when it only reads new credentials."""
        self._login_s = None
        self._credentials_version = self._client.credentials_version
        self._store.restarted()
        # Cancelled between kopf's creation of its tasks and their return, nothing would end them.
        spawning = asyncio.create_task(self._spawn(), name="kopf")
        try:
            tasks = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            await self._stop(await spawning)
            raise
        checking = asyncio.create_task(self._check(), name="comparisons")
        try:
            done, _ = await asyncio.wait({*tasks, checking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            checking.cancel()
            await self._stop(tasks)
        if checking in done:
            return checking.result()
        for task in done:
            task.result()
        return f"kopf ended: {', '.join(sorted(each.get_name() for each in done))}"

    async def _spawn(self) -> Collection[asyncio.Task[None]]:
        """Start kopf's tasks.

        Not `kopf.operator`: that ends by cancelling every task of the loop that was made since it started.
        """
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=_settings(),
            clusterwide=self._namespace is None,
            namespaces=() if self._namespace is None else (self._namespace,),
            liveness_endpoint=self._liveness_endpoint,
        )
        reclaim_signals()
        return tasks

    async def _stop(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """End kopf's tasks and its connections."""
        for task in tasks:
            task.cancel()
        _, left = await asyncio.wait(tasks, timeout=STOP_S)
        if left:
            log.error("kopf does not end", tasks=sorted(each.get_name() for each in left), after_s=STOP_S)
        for session in self._sessions:
            await session.close()
        self._sessions.clear()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
        async def login(**_: Any) -> kopf.AiohttpSession:
            return await self._login()

        @kopf.on.probe(registry=registry, id="watches")
        async def probe(**_: Any) -> dict[str, str]:
            return {self._store.kind.plural: self._store.problem or "current"}

        @kopf.on.cleanup(registry=registry)
        async def ended(**_: Any) -> None:
            log.debug("kopf ended")

        kind = self._store.kind
        group, version = kind.api_version.split("/")

        @kopf.on.event(group, version, kind.plural, registry=registry)
        async def changed(event: Mapping[str, Any], **_: Any) -> None:
            self._store.report(event["type"], event["object"])

        return registry

    async def _login(self) -> kopf.AiohttpSession:
        """Give kopf a session with the client's credentials; a second call says that they were refused."""
        now_s = time.monotonic()
        if self._login_s is not None:
            if now_s - self._login_s < LOGIN_GAP_S:
                raise kopf.PermanentError(f"{self._client.server} refuses the credentials")
            await self._client.renew_credentials(self._credentials_version)
            self._credentials_version = self._client.credentials_version
        self._login_s = now_s
        self._sessions.append(self._client.session())
        return kopf.AiohttpSession(
            server=self._client.server,
            aiohttp_session=self._sessions[-1],
            default_namespace=self._client.namespace,
        )

    async def _check(self) -> str | None:
        """Compare the store with lists until kopf has to be started again; return what went wrong, None if nothing did."""
        while True:
            await self._pause()
            try:
                await self._compare()
            except (ClusterError, ConfigError) as exc:
                self._complain(str(exc))
                continue
            self._store.problem = None
            if (missed := self._store.stalled()) is not None:
                return missed
            if self._client.credentials_version != self._credentials_version:
                log.info("kopf starts again with new credentials", kind=self._store.kind.plural)
                return None

    async def _pause(self) -> None:
        """Wait until the next comparison is due."""
        store = self._store
        if store.problem is not None or not store.synced.is_set():
            await asyncio.sleep(FIRST_CHECK_S)
            return
        try:
            async with asyncio.timeout(CHECK_S):
                await store.relisted.wait()
        except TimeoutError:
            return
        await asyncio.sleep(FIRST_CHECK_S)  # its list is long
        store.relisted.clear()

    async def _compare(self) -> None:
        listed: dict[ObjectKey, Listed] = {}

        def take(obj: Object) -> None:
            listed[key_of(obj)] = Listed(obj["metadata"]["uid"], version_of(obj))

        version = await self._client.read_pages(
            self._store.kind,
            namespace=self._namespace,
            selector=selector_of(self._store.labels),
            take=take,
            restart=listed.clear,
        )
        self._store.compare(listed, int(version))

    def _complain(self, problem: str) -> None:
        log.warning("objects may be out of date", kind=self._store.kind.plural, problem=problem)
        self._store.problem = problem


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True  # the operator's own Leases say who acts
    settings.scanning.disabled = True  # needs rights to list CRDs and namespaces, for nothing used here
    settings.process.ultimate_exiting_timeout = None  # it would kill the whole process
    settings.watching.server_timeout = min(STREAM_S)  # an integer, or the server refuses it
    settings.watching.connect_timeout = CONNECT_S
    settings.watching.inactivity_timeout = SILENCE_S
    settings.watching.chunk_size = 500
    settings.networking.connect_timeout = CONNECT_S
    settings.networking.request_timeout = ANSWER_S
    settings.networking.error_backoffs = RETRIES_S
    return settings
