"""One operator process: client, election, watches, queue and reconciler put together; called by the command line."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from penstock.api import GraphDeployment, GraphPhase
from penstock.core.errors import ClusterError
from penstock.core.http.client import ConnectionPool
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.events import EventRecorder, EventReporter
from penstock.kube.informer import ObjectKey
from penstock.kube.kinds import GRAPH_DEPLOYMENT, PROFILE_REQUEST, Kind
from penstock.kube.lease import Election, own_pod
from penstock.kube.objects.names import CLASS_LABEL, COMPONENT_LABEL, OPERATOR, lease_name
from penstock.operator.apply import Applier
from penstock.operator.cluster import Cluster
from penstock.operator.draining import Drains
from penstock.operator.gates import Gates
from penstock.operator.loads import LoadReader, MetricsReader
from penstock.operator.metrics import GraphReplicas, OperatorMetrics, StatusServer
from penstock.operator.profiles import ProfileParts, Profiles
from penstock.operator.queue import Key, RateLimits, WorkQueue, serve
from penstock.operator.reconcile import Dependencies, Reconciler
from penstock.operator.resources.metadata import BuildContext
from penstock.operator.settings import OperatorSettings
from penstock.operator.trim import Object
from penstock.operator.validity import validated

log = get_logger(__name__)

SERVED_S: Final = 2.0
"""Between two looks for a kind that the API server does not serve yet; real seconds, chosen."""

STOP_S: Final = 20.0
"""Longest wait for the work's end at SIGTERM; real seconds, chosen: more than a term of the Lease, behind which
another operator works anyway."""


class Operator:
    """Everything that acts, from the moment this process may act; made anew whenever it becomes leader."""

    def __init__(
        self,
        client: KubeClient,
        settings: OperatorSettings,
        *,
        loads: LoadReader,
        metrics: OperatorMetrics,
        pace: RateLimits | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            client: Reads and writes.
            settings: Of the process.
            loads: Asks draining workers.
            metrics: Counts.
            pace: Of the queue; None: the default.
        """
        namespace = watched_namespace(settings, client)
        self._client = client
        self._namespace = namespace
        self._settings = settings
        self._unserved: Kind | None = None
        self.queue = WorkQueue(pace or RateLimits(), now_s=time.monotonic)
        self.cluster = Cluster(client, namespace=namespace, enqueue=self._enqueue)
        applier = Applier(client, metrics, on_written=self.cluster.note)
        recorder = EventRecorder(
            client, EventReporter(OPERATOR, instance(), "Reconcile"), on_dropped=metrics.event_dropped
        )
        context = BuildContext(
            owner_uid="",
            namespace="",
            operator_namespace=_own_namespace(client),
            penstock_image=settings.penstock_image,
            image_pull_policy=settings.image_pull_policy,
            allows_privileges=settings.allow_privileged_pod_templates,
        )
        self.reconciler = Reconciler(
            Dependencies(
                cluster=self.cluster,
                applier=applier,
                drains=Drains(applier, loads),
                gates=Gates(applier),
                recorder=recorder,
                metrics=metrics,
                context=context,
                operator_class=settings.operator_class,
            )
        )
        parts = ProfileParts(client, applier, recorder, context, graph=self._graph)
        self.profiles = Profiles(parts, namespace=namespace, pace=self.queue.pace)

    async def run(self) -> None:
        """Watch and reconcile until cancelled.

        Raises:
            ClusterError: kopf ended, which a new process may get over.
        """
        from penstock.operator.handlers import Handled, KopfOperator  # noqa: PLC0415 - a standby needs no kopf: 30 MB, 1 s

        handled = Handled(
            graphs=self.cluster,
            requests=self.profiles,
            enqueue=self.queue.enqueue,
            deleted=self.reconciler.deleted,
            problem=self.problem,
        )
        kopf = KopfOperator(
            self._client,
            handled,
            namespace=self._namespace,
            operator_class=self._settings.operator_class,
            resync_s=self._settings.resync_interval,
            liveness_endpoint=_liveness_endpoint(self._settings),
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.cluster.run(), name="watches")
                # Before the graphs are known: a child that is not seen would be made once more.
                await self.cluster.synced()
                for kind in (GRAPH_DEPLOYMENT, PROFILE_REQUEST):
                    await self._wait_for(kind)
                group.create_task(kopf.run(), name="kopf")
                group.create_task(self.profiles.run(), name="profiles")
                work = serve(self.queue, self.reconciler.reconcile, workers=self._settings.workers)
                group.create_task(work, name="workers")
        except ExceptionGroup as failures:
            # The task group wraps even the one error that this function promises.
            if len(failures.exceptions) == 1 and isinstance(failures.exceptions[0], ClusterError):
                raise failures.exceptions[0] from None
            raise

    def problem(self) -> str | None:
        """Return why graphs may not be acted on; None if all is well."""
        if self._unserved is not None:
            return f"{self._unserved.plural}: not served; apply the CustomResourceDefinitions"
        return self.cluster.problem()

    async def _wait_for(self, kind: Kind) -> None:
        """Wait until the API server serves a kind, which kopf looks for but once."""
        self._unserved = kind
        while not await self._is_served(kind):  # noqa: ASYNC110 - it asks the server
            await asyncio.sleep(SERVED_S)
        self._unserved = None

    async def _is_served(self, kind: Kind) -> bool:
        try:
            return await self.cluster.knows(kind)
        except ClusterError as exc:  # the API server is away for a moment
            log.warning("kind not looked up", kind=kind.kind, error=str(exc), retry_s=SERVED_S)
            return False

    def phases(self) -> Mapping[str, int]:
        """Return the number of graphs in each phase."""
        found: Counter[str] = Counter()
        for key in self.cluster.known():
            graph = self.cluster.snapshot(key).graph
            if graph is not None:
                found[graph.get("status", {}).get("phase") or GraphPhase.PENDING.value] += 1
        return found

    def replicas(self) -> Iterator[GraphReplicas]:
        """Yield the ready replicas of each graph that is not being deleted."""
        for key in self.cluster.known():
            graph = self.cluster.snapshot(key).graph
            if graph is not None and "deletionTimestamp" not in graph["metadata"]:
                yield graph_replicas(graph)

    def _graph(self, key: Key) -> tuple[GraphDeployment | None, str]:
        """Return a graph as the validated model, and what is wrong with it."""
        raw = self.cluster.snapshot(key).graph
        if raw is None:
            return None, ""
        model, problems = validated(raw)
        return model, "; ".join(f"{each.path}: {each.message}" for each in problems)

    def _enqueue(self, key: Key, urgent: bool) -> None:  # noqa: FBT001 - the cluster's callback
        self.queue.enqueue(key, urgent=urgent)


class OperatorService:
    """The process: stands for election if asked to, serves /metrics meanwhile, and runs the operator."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._metrics = OperatorMetrics()
        self._operator: Operator | None = None
        self._election: Election | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set; the Lease is given back then.

        Raises:
            ConfigError: no credentials, or the metrics port is taken.
        """
        settings = self._settings
        log.info("operator options", **settings.model_dump(mode="json"))
        client = await KubeClient.connect(kubeconfig=_path(settings.kubeconfig), context=settings.context)
        self._metrics.watch(depth=self._depth, phases=self._phases, graphs=self._replicas)
        try:
            async with self._status_server():
                work = asyncio.create_task(self._elect(client), name="operator")
                stopped = asyncio.create_task(stop.wait(), name="stop")
                try:
                    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopped.cancel()
                    work.cancel()
                    await asyncio.wait({work}, timeout=STOP_S)
                if work.done() and not work.cancelled():
                    work.result()
        finally:
            await client.close()
        log.info("operator stopped")

    async def _elect(self, client: KubeClient) -> None:
        if not self._settings.leader_election:
            await self._lead(client)
            return
        namespace, name = lease_of(self._settings, client)
        election = Election(
            client,
            name=name,
            namespace=namespace,
            identity=f"{instance()}-{random.SystemRandom().randrange(16**8):08x}",
            labels={COMPONENT_LABEL: "operator", CLASS_LABEL: self._settings.operator_class},
            owner=own_pod(os.environ, namespace),
        )
        self._election = election
        fenced = client.fenced(lambda: election.is_leading)
        await election.lead(lambda: self._lead(fenced))

    async def _lead(self, client: KubeClient) -> None:
        """Act until cancelled."""
        pool = ConnectionPool()
        operator = Operator(client, self._settings, loads=MetricsReader(pool), metrics=self._metrics)
        self._operator = operator
        self._metrics.leads(True)
        try:
            await operator.run()
        finally:
            self._operator = None
            self._metrics.leads(False)
            await pool.close()

    @asynccontextmanager
    async def _status_server(self) -> AsyncIterator[None]:
        if not self._settings.metrics_port:
            yield
            return
        server = StatusServer(
            self._metrics, unready=self._unready, standing=self._standing, fault=self._fault
        )
        await server.start(self._settings.host, self._settings.metrics_port)
        try:
            yield
        finally:
            await server.close()

    def _unready(self) -> str | None:
        """Return why this process neither acts nor stands by; None if it does."""
        if self._operator is not None:
            return self._operator.problem()
        if self._election is None:
            return "starts"
        return self._election.problem

    def _fault(self) -> str | None:
        """Return why only a restart helps; None if all is well."""
        return None if self._election is None else self._election.overdue

    def _standing(self) -> str:
        """Return whom this process stands by for; empty if it acts."""
        if self._operator is None and self._election is not None and self._election.holder:
            return f"standby for {self._election.holder}"
        return ""

    def _depth(self) -> float:
        return 0 if self._operator is None else self._operator.queue.depth

    def _phases(self) -> Mapping[str, int]:
        return {} if self._operator is None else self._operator.phases()

    def _replicas(self) -> Iterable[GraphReplicas]:
        return () if self._operator is None else self._operator.replicas()


def graph_replicas(graph: Object) -> GraphReplicas:
    """Return what a graph's specification and status say of its replicas."""
    spec, shown = graph["spec"], (graph.get("status") or {}).get("services") or {}
    ready: Counter[str] = Counter()
    target: Counter[str] = Counter()
    for name, service in spec.get("services", {}).items():
        said = shown.get(name) or {}
        ready[service["role"]] += said.get("ready", 0)
        if "target" in said:
            target[service["role"]] += said["target"]
    is_planned = (spec.get("planner") or {}).get("enabled", True)
    metadata = graph["metadata"]
    return GraphReplicas(metadata["namespace"], metadata["name"], ready, target, is_planned)


def watched_namespace(settings: OperatorSettings, client: KubeClient) -> str | None:
    """Return the namespace to watch; None: all."""
    return None if settings.all_namespaces else settings.namespace or client.namespace


def lease_of(settings: OperatorSettings, client: KubeClient) -> ObjectKey:
    """Return namespace and name of the Lease of this process's installation."""
    namespace = watched_namespace(settings, client)
    name = lease_name(OPERATOR, cluster_wide=namespace is None, operator_class=settings.operator_class)
    return namespace or _own_namespace(client), name


def instance() -> str:
    """Return this process's name: the pod's, or the host's."""
    return os.environ.get("POD_NAME") or socket.gethostname()


def _liveness_endpoint(settings: OperatorSettings) -> str | None:
    port = settings.kopf_liveness_port
    return f"http://{settings.host}:{port}/healthz" if port else None


def _own_namespace(client: KubeClient) -> str:
    return os.environ.get("POD_NAMESPACE") or client.namespace


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
