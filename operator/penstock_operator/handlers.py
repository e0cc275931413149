"""Runs kopf on the operator's own event loop; its handlers report GraphDeployments and ProfileRequests. The only importer of kopf.

A handler reports its object to the in-memory view that the reconciler reads, and the view enqueues it. Kopf manages
the drain finalizer: a graph is reported only after it has the finalizer, so no child is created before. Kopf removes
the finalizer after the reconciler has removed everything that belongs to a deleted graph. A graph therefore cannot
disappear while kopf's watch is broken. A ProfileRequest has no finalizer; the reconciler notices its deletion at its
next write.

Kopf's record of handled versions is kept only in this process, so that kopf writes nothing while nothing changes.
After a restart every object is new to kopf, which costs one reconcile per object that changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final, cast

import aiohttp
import kopf

from penstock.core.errors import ClusterError, ConfigError
from penstock.core.http.loop import reclaim_signals
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.informer import STREAM_S, ObjectKey, key_of
from penstock.kube.kinds import GRAPH_DEPLOYMENT, PROFILE_REQUEST, Kind
from penstock.kube.objects.names import OPERATOR, drain_finalizer, is_of_class
from penstock.kube.objects.refusals import Refusals
from penstock.kube.transport import ANSWER_S, CONNECT_S, SILENCE_S
from penstock_operator.cluster import Cluster
from penstock_operator.profiles import Profiles
from penstock_operator.trim import Object

TOUCH_ANNOTATION: Final = "penstock.dev/touch"
"""Annotation on a graph whose deletion takes long: time at which kopf last changed the graph to trigger its own
retry."""


class MemoryDiffBase(kopf.DiffBaseStorage):
    """In-memory storage of the resource version of each object that the handlers of kopf (operator framework) saw last.

    Any new version counts as an update.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, kopf.BodyEssence] = {}

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:  # noqa: ARG002 - kopf's
        """Return what kopf compares of an object (its "essence") to notice a change: the resource version of ``body``.

        ``extra_fields`` is ignored.
        """
        version = body["metadata"]["resourceVersion"]
        return cast("kopf.BodyEssence", {"metadata": {"resourceVersion": version}})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """Return the essence (resource version) stored last for the object ``body``; None if it has not been handled."""
        return self._seen.get(body["metadata"]["uid"])

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:  # noqa: ARG002 - kopf's
        """Store ``essence`` (the resource version) in memory as the state of the object ``body`` that was handled last.

        ``patch`` is ignored, since nothing is written to the object.
        """
        self._seen[body["metadata"]["uid"]] = essence

    def forget(self, uid: str) -> None:
        """Drop the resource version that is stored for a deleted object; does nothing if there is none."""
        self._seen.pop(uid, None)


class MemoryProgress(kopf.ProgressStorage):
    """In-memory storage of kopf's progress records: how often each handler of each object was tried, and when it is retried."""

    def __init__(self) -> None:
        super().__init__()
        self._records: dict[tuple[str, str], kopf.ProgressRecord] = {}

    def fetch(self, *, key: str, body: kopf.Body) -> kopf.ProgressRecord | None:
        """Return how often handler ``key`` was tried for the object ``body``, and when it is retried; None if it was not tried."""
        return self._records.get((body["metadata"]["uid"], key))

    def store(self, *, key: str, record: kopf.ProgressRecord, body: kopf.Body, patch: kopf.Patch) -> None:  # noqa: ARG002 - kopf's
        """Store ``record`` in memory: how often handler ``key`` was tried for the object ``body``, and when it is retried.

        ``patch`` is ignored, since nothing is written to the object.
        """
        self._records[body["metadata"]["uid"], key] = record

    def purge(self, *, key: str, body: kopf.Body, patch: kopf.Patch) -> None:  # noqa: ARG002 - kopf's
        """Drop the record of how often handler ``key`` was tried for the object ``body``; does nothing if there is none.

        ``patch`` is ignored.
        """
        self._records.pop((body["metadata"]["uid"], key), None)

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        """Put annotation ``penstock.dev/touch`` with the time ``value`` into ``patch``, or its removal if ``value`` is None.

        Kopf (the operator framework) then writes the patch to the object ``body``; the watch event of that write makes
        it retry its handler. Does nothing if the annotation to remove is absent.
        """
        if value is not None or TOUCH_ANNOTATION in body["metadata"].get("annotations", {}):
            patch.metadata.annotations[TOUCH_ANNOTATION] = value

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Return ``essence`` (the part of an object that kopf compares) unchanged: progress records are never stored in the object."""
        return essence


FIRST_FINALIZER_RETRY_S: Final = 2.0
FINALIZER_RETRY_S: Final = 10.0
"""Wall-clock seconds until the operator itself writes a new graph's finalizer if kopf has not (2 s,
``FIRST_FINALIZER_RETRY_S``), and between its further tries (10 s, ``FINALIZER_RETRY_S``). Chosen. Kopf treats a rejected write like a
version conflict and waits for the next event."""

DELETION_S: Final = 30.0
"""Maximum seconds that one call of the deletion handler waits. Chosen: every further call costs a write, whose event
triggers the call."""

RECALL_S: Final = 1.0
"""Seconds until the next call of the deletion handler, and minimum seconds between two logins of kopf. Chosen."""

STOP_S: Final = 5.0
"""Maximum seconds to wait for kopf's tasks to end. Chosen. Kopf writes nothing but finalizers, so a task that does
not end does no harm."""

BACKOFFS_S: Final = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *(10.0,) * 10_000)
"""Seconds between kopf's tries of one request, enough for a day: an unavailable API server returns."""

LOGIN_GAP_S: Final = 10.0
"""Seconds between two readings of credentials that the API server rejects. Chosen: the kubelet writes a new token
long before the old one expires."""

log = get_logger(__name__)


class KopfOperator:
    """Runs kopf, the operator framework, which watches GraphDeployments and ProfileRequests while this process is the leader.

    Each object that is new or changed is stored in the in-memory views and enqueued for a reconcile. Kopf also adds
    the finalizer that delays a graph's deletion until its workers have finished their requests.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        graphs: Cluster,
        requests: Profiles,
        enqueue: Callable[[ObjectKey], None],
        wait_deleted: Callable[[str], Awaitable[None]],
        report_refusal: Callable[[Object, Refusals], Awaitable[None]],
        namespace: str | None,
        operator_class: str,
        resync_s: float,
    ) -> None:
        """Prepare; `run` starts kopf.

        Args:
            client: Client of the Kubernetes API.
            graphs: View to which GraphDeployments are reported.
            requests: View to which ProfileRequests are reported.
            enqueue: Enqueues a graph for reconciliation.
            wait_deleted: Waits until nothing is left of the deleted graph with this UID.
            report_refusal: Called with a graph and the refused write if the graph's finalizer cannot be added.
            namespace: Namespace to watch; None watches all.
            operator_class: Only objects of this ``spec.operatorClass`` are handled.
            resync_s: Seconds without a change after which a graph is reported and enqueued again.
        """
        self._client = client
        self._graphs = graphs
        self._requests = requests
        self._enqueue = enqueue
        self._wait_deleted = wait_deleted
        self._report_refusal = report_refusal
        self._namespace = namespace
        self._operator_class = operator_class
        self._finalizer = drain_finalizer(operator_class)
        self._resync_s = resync_s
        self._login_s = 0.0
        self._version = 0
        self._session: aiohttp.ClientSession | None = None
        self._diffbase = MemoryDiffBase()
        self._reported: dict[str, str] = {}  # newest version of each object, by its UID
        # Kopf logs every event of every object; the reconciler itself logs the important ones.
        for name in ("kopf", "kopf.objects"):
            logging.getLogger(name).setLevel(logging.WARNING)

    async def run(self) -> None:
        """Run kopf, the operator framework, until cancelled.

        Raises:
            ClusterError: Kopf ended, because its rights or the CustomResourceDefinitions are wrong. A new process may
                find the rights or definitions corrected.
        """
        # Without the shield, a cancellation after kopf created its tasks and before it returned them would leave them running.
        spawning = asyncio.create_task(self._spawn(), name="kopf")
        try:
            tasks = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            await self._stop(await spawning)
            raise
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._stop(tasks)
        errors = [repr(each.exception()) for each in done if not each.cancelled() and each.exception()]
        raise ClusterError(
            f"kopf ended: {'; '.join(errors) or 'without an error'}; see its log, and penstock doctor"
        )

    async def _spawn(self) -> Collection[asyncio.Task[None]]:
        """Start kopf's tasks.

        `kopf.operator` is not used: at its end it cancels every task of the event loop that was created after its
        start.
        """
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=self._settings(),
            clusterwide=self._namespace is None,
            namespaces=() if self._namespace is None else (self._namespace,),
        )
        reclaim_signals()
        return tasks

    async def _stop(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """End kopf's tasks and its connections."""
        for task in tasks:
            task.cancel()
        _, running = await asyncio.wait(tasks, timeout=STOP_S)
        if running:
            log.error("kopf does not end", tasks=sorted(each.get_name() for each in running), after_s=STOP_S)
        if self._session is not None:
            await self._session.close()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
        async def login(**_: Any) -> kopf.AiohttpSession:
            return await self._login()

        self._register(registry, GRAPH_DEPLOYMENT, self._graphs)
        self._register(registry, PROFILE_REQUEST, self._requests)
        graphs = _selector(GRAPH_DEPLOYMENT)

        @kopf.on.delete(*graphs, registry=registry, when=self._is_ours, backoff=RECALL_S)
        async def delete(body: kopf.Body, **_: Any) -> None:
            self._graphs.report(dict(body))
            try:
                async with asyncio.timeout(DELETION_S):
                    await self._wait_deleted(body["metadata"]["uid"])
            except TimeoutError as exc:
                raise kopf.TemporaryError("its workers finish their requests", delay=RECALL_S) from exc

        @kopf.timer(
            *graphs,
            registry=registry,
            when=self._is_ours,
            interval=self._resync_s,
            initial_delay=self._resync_s,
        )
        async def resync(body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
            if self._finalizer in body["metadata"].get("finalizers", ()):
                self._graphs.report(dict(body))
                self._enqueue(key_of(body))
            else:  # the webhook or policy that refused the finalizer may accept it now
                patch.fns.append(self._add_finalizer)

        @kopf.timer(
            *graphs,
            registry=registry,
            when=self._lacks_finalizer,
            interval=FINALIZER_RETRY_S,
            initial_delay=FIRST_FINALIZER_RETRY_S,
        )
        async def retry_finalizer(body: kopf.Body, **_: Any) -> None:
            await self._retry_finalizer(dict(body))

        return registry

    def _register(self, registry: kopf.OperatorRegistry, kind: Kind, view: Cluster | Profiles) -> None:
        """Register the handler that reports objects of one kind to their view."""

        @kopf.on.resume(*_selector(kind), registry=registry, when=self._is_ours)
        @kopf.on.create(*_selector(kind), registry=registry, when=self._is_ours)
        @kopf.on.update(*_selector(kind), registry=registry, when=self._is_ours)
        async def change(body: kopf.Body, **_: Any) -> None:
            self._report(view, body)

        @kopf.on.event(*_selector(kind), registry=registry, when=self._is_ours)
        async def seen(body: kopf.Body, **_: Any) -> None:
            # Kopf skips its handlers while it does not know whether its finalizer was written, and calls them only
            # at a further event. If the answer to that write was lost, there may be none.
            metadata = body["metadata"]
            if self._finalizer in metadata.get("finalizers", ()) and metadata["uid"] not in self._reported:
                self._report(view, body)

        @kopf.on.event(*_selector(kind), registry=registry, when=_is_gone)
        async def gone(body: kopf.Body, **_: Any) -> None:
            self._diffbase.forget(body["metadata"]["uid"])
            self._reported.pop(body["metadata"]["uid"], None)
            view.remove(dict(body))

    def _report(self, view: Cluster | Profiles, body: kopf.Body) -> None:
        """Report a version of an object; does nothing if that version was already reported."""
        metadata = body["metadata"]
        if self._reported.get(metadata["uid"]) != metadata["resourceVersion"]:
            self._reported[metadata["uid"]] = metadata["resourceVersion"]
            view.report(dict(body))

    def _is_ours(self, spec: Mapping[str, Any], **_: Any) -> bool:
        return is_of_class(spec, self._operator_class)

    def _lacks_finalizer(self, spec: Mapping[str, Any], meta: Mapping[str, Any], **_: Any) -> bool:
        has_it = self._finalizer in meta.get("finalizers", ())
        return self._is_ours(spec) and not has_it and not meta.get("deletionTimestamp")

    async def _retry_finalizer(self, graph: Object) -> None:
        """Add the finalizer to a graph; if that is rejected, report the refusal."""
        metadata, refusals = graph["metadata"], Refusals()
        wanted = {"finalizers": [*metadata.get("finalizers", ()), self._finalizer]}
        patch = {"metadata": {**wanted, "resourceVersion": metadata["resourceVersion"]}}
        namespace, name = key_of(graph)
        try:
            with refusals.of(f"GraphDeployment {name}: its finalizer", "Adopt"):
                await self._client.patch(
                    GRAPH_DEPLOYMENT, name, patch, namespace=namespace, field_manager=OPERATOR
                )
            await self._report_refusal(graph, refusals)
        except ClusterError as exc:
            log.warning("finalizer not written", namespace=namespace, name=name, error=str(exc))

    def _add_finalizer(self, body: Any) -> None:
        body["metadata"].setdefault("finalizers", []).append(self._finalizer)

    async def _login(self) -> kopf.AiohttpSession:
        """Return a session with the client's credentials; a second call means that the API server rejected them.

        It waits for better credentials and never fails: without credentials kopf would continue to run and do
        nothing.
        """
        transport = self._client.transport
        if self._session is not None:
            await self._renew()
            await self._session.close()
        self._login_s, self._version = time.monotonic(), transport.version
        self._session = transport.session()
        return kopf.AiohttpSession(
            server=self._client.server,
            aiohttp_session=self._session,
            default_namespace=self._client.namespace,
        )

    async def _renew(self) -> None:
        """Read the credentials again unless the client already did; the first time at once, then at most every `LOGIN_GAP_S`."""
        transport = self._client.transport
        await asyncio.sleep(max(0.0, self._login_s + RECALL_S - time.monotonic()))
        while transport.version == self._version:
            log.warning("kopf's credentials are refused", server=self._client.server)
            await asyncio.sleep(max(0.0, self._login_s + LOGIN_GAP_S - time.monotonic()))
            self._login_s = time.monotonic()
            try:
                await transport.renew(self._version)
            except ConfigError as exc:
                log.warning("credentials not read", error=str(exc), retry_s=LOGIN_GAP_S)

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.persistence.finalizer = self._finalizer
        settings.persistence.diffbase_storage = self._diffbase
        settings.persistence.progress_storage = MemoryProgress()
        settings.posting.enabled = False
        settings.peering.standalone = True  # a Lease elects the leader; kopf's peering does not fence
        settings.scanning.disabled = True  # unused; it needs rights to list CRDs and namespaces
        settings.process.ultimate_exiting_timeout = None  # it would kill the entire process
        settings.queueing.exit_timeout = 1.0  # a deletion handler waits longer than a leader has time to stop
        settings.watching.server_timeout = min(STREAM_S)  # an integer, or the server refuses it
        settings.watching.connect_timeout = CONNECT_S
        settings.watching.inactivity_timeout = SILENCE_S
        settings.watching.chunk_size = 500
        settings.networking.connect_timeout = CONNECT_S
        settings.networking.request_timeout = ANSWER_S
        settings.networking.error_backoffs = BACKOFFS_S
        return settings


def _selector(kind: Kind) -> tuple[str, str, str]:
    group, _, version = kind.api_version.partition("/")
    return group, version, kind.plural


def _is_gone(event: Mapping[str, Any], **_: Any) -> bool:
    return bool(event["type"] == "DELETED")
