"""Runs one operator process: client, leader election, watches, queue and reconciler; called by the command line."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.core.errors import ClusterError
from penstock.core.http.client import ConnectionPool
from penstock.core.http.loop import run_until
from penstock.core.http.tls import UNVERIFIED
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.clock import ServerClock
from penstock.kube.events import EventRecorder
from penstock.kube.informer import ObjectKey
from penstock.kube.kinds import GRAPH_DEPLOYMENT, PROFILE_REQUEST, Kind
from penstock.kube.lease import STOP_S, Election, election_of, instance
from penstock.kube.objects.names import OPERATOR, PLANNER, drain_finalizer, lease_name
from penstock_operator.apply import Applier
from penstock_operator.claims import ClaimReader
from penstock_operator.cluster import Cluster
from penstock_operator.departure import release_graphs
from penstock_operator.gates import Gates
from penstock_operator.loads import MetricsReader
from penstock_operator.metrics import OperatorMetrics, StatusServer
from penstock_operator.namespaces import NamespaceAllowances
from penstock_operator.pools.driver import GpuPools
from penstock_operator.profiles import Profiles
from penstock_operator.queue import Key, RateLimits, WorkQueue, serve
from penstock_operator.reconcile import Dependencies, Reconciler
from penstock_operator.resources.allowances import allowances_of, profiles_of
from penstock_operator.resources.metadata import BuildContext
from penstock_operator.settings import OperatorSettings
from penstock_operator.silence import PlannerLeaseMonitor
from penstock_operator.trim import Object

log = get_logger(__name__)

SERVED_S: Final = 2.0
"""Seconds between two checks for a kind that the API server does not serve yet; wall-clock time, chosen."""


DEPART_S: Final = 10.0
"""Maximum seconds for the last requests to the API server before the process ends. Wall-clock time, chosen: together
with the other steps of the shutdown it fits in a pod's 30 s."""


class Operator:
    """Watches the cluster and reconciles its graphs while the operator process is the leader; each election creates a new object.

    It contains the in-memory views of graphs, GPU pools and ProfileRequests, the queue of graphs to reconcile, and the
    reconcilers.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: OperatorSettings,
        *,
        loads: MetricsReader,
        metrics: OperatorMetrics,
        limits: RateLimits | None = None,
    ) -> None:
        namespace = watched_namespace(settings, client)
        self._client = client
        self._namespace = namespace
        self._settings = settings
        self._unserved: Kind | None = None
        self.queue = WorkQueue(limits or RateLimits(), now_s=time.monotonic)
        self.cluster = Cluster(client, namespace=namespace, enqueue=self._enqueue)
        recorder = EventRecorder(
            client, OPERATOR, instance(), "Reconcile", on_dropped=metrics.events_dropped.inc
        )
        context = BuildContext(
            owner_uid="",
            namespace="",
            operator_namespace=_own_namespace(client),
            penstock_image=settings.penstock_image,
            image_pull_policy=settings.image_pull_policy,
            gpu_resources=tuple(settings.gpu_resources.split(",")),
            is_ipv6=":" in settings.pod_ip,
            ip_family_policy=settings.ip_family_policy,
        )
        self.clock = ServerClock(client)
        applier = Applier(client, metrics, on_written=self.cluster.record_write)
        gates = Gates(applier)
        self.pools = GpuPools(
            client,
            self.cluster,
            recorder,
            gates,
            namespace=namespace,
            operator_class=settings.operator_class,
            enqueue=self._enqueue,
            now_s=self.clock.now_s,
        )
        parts = Dependencies(
            client=client,
            cluster=self.cluster,
            applier=applier,
            gates=gates,
            pools=self.pools,
            now_s=self.clock.now_s,
            loads=loads,
            recorder=recorder,
            metrics=metrics,
            context=context,
            allowances=NamespaceAllowances(
                client,
                everywhere=allowances_of(settings.allow_pod_templates),
                profiles=profiles_of(settings.pod_template_profiles),
            ),
            claims=ClaimReader(client, context.gpu_resources),
            operator_class=settings.operator_class,
        )
        self.reconciler = Reconciler(parts)
        self.profiles = Profiles(parts, namespace=namespace, limits=self.queue.limits)
        self.silence = PlannerLeaseMonitor(
            client,
            lease_of(settings, client, PLANNER),
            namespace=namespace,
            operator_class=settings.operator_class,
        )

    async def run(self) -> None:
        """Watch the cluster and reconcile its graphs, pools and ProfileRequests until cancelled.

        Raises:
            ClusterError: Kopf, the operator framework, ended; a new process may recover.
        """
        from penstock_operator.handlers import KopfOperator  # noqa: PLC0415 - 30 MB and 1 s that a standby can save

        kopf = KopfOperator(
            self._client,
            graphs=self.cluster,
            requests=self.profiles,
            enqueue=self.queue.enqueue,
            wait_deleted=self.reconciler.wait_deleted,
            report_refusal=self.reconciler.report_refusal,
            namespace=self._namespace,
            operator_class=self._settings.operator_class,
            resync_s=self._settings.resync_interval,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.cluster.run(), name="watches")
                # Wait for the children before graphs are reported; otherwise existing children would be created again.
                await self.cluster.synced()
                await self.clock.measure()
                group.create_task(self.clock.run(), name="clock")
                for kind in (GRAPH_DEPLOYMENT, PROFILE_REQUEST):
                    await self._wait_for(kind)
                # Wait for the pools, so that the first reconcile of a graph already respects its pool's grant.
                pools = asyncio.Event()
                group.create_task(self.pools.run(pools), name="gpu pools")
                await pools.wait()
                group.create_task(kopf.run(), name="kopf")
                group.create_task(self.profiles.run(), name="profiles")
                group.create_task(self.silence.run(), name="planner's silence")
                work = serve(self.queue, self.reconciler.reconcile, workers=self._settings.workers)
                group.create_task(work, name="workers")
        except ExceptionGroup as failures:
            # The task group wraps even a single error; unwrap it.
            if len(failures.exceptions) == 1 and isinstance(failures.exceptions[0], ClusterError):
                raise failures.exceptions[0] from None
            raise

    def problem(self) -> str | None:
        """Return why graphs cannot be reconciled reliably, such as a watch that fails; None if all watches work."""
        if self._unserved is not None:
            return f"{self._unserved.plural}: not served; apply the CustomResourceDefinitions"
        return self.cluster.problem() or self.pools.problem()

    async def _wait_for(self, kind: Kind) -> None:
        """Wait until the API server serves ``kind``; kopf itself checks only once."""
        self._unserved = kind
        while not await self._is_served(kind):  # noqa: ASYNC110 - each check is an API call
            await asyncio.sleep(SERVED_S)
        self._unserved = None

    async def _is_served(self, kind: Kind) -> bool:
        try:
            return await self.cluster.has_kind(kind)
        except ClusterError as exc:  # the API server is temporarily unavailable
            log.warning("kind not looked up", kind=kind.kind, error=str(exc), retry_s=SERVED_S)
            return False

    def graphs(self) -> Iterator[Object]:
        """Yield the GraphDeployments in this process's view of the cluster, reduced to the fields that the operator needs."""
        return (
            graph for key in self.cluster.known() if (graph := self.cluster.snapshot(key).graph) is not None
        )

    def _enqueue(self, key: Key, urgent: bool) -> None:  # noqa: FBT001 - the cluster's callback
        self.queue.enqueue(key, urgent=urgent)


class OperatorService:
    """The operator process, which runs the reconcilers (`Operator`) while it is the leader.

    It serves /metrics, and takes part in leader election unless that is disabled.
    """

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._metrics = OperatorMetrics()
        self._operator: Operator | None = None
        self._election: Election | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run the operator process until ``stop`` is set; then release the Lease of leader election and return.

        Raises:
            ConfigError: There are no credentials, or the metrics port is in use.
        """
        settings = self._settings
        log.info("operator options", **settings.model_dump(mode="json"))
        kubeconfig = None if settings.kubeconfig is None else Path(settings.kubeconfig)
        client = await KubeClient.connect(kubeconfig=kubeconfig, context=settings.context)
        self._metrics.watch(depth=self._depth, graphs=self._graphs, pools=self._pools)
        try:
            async with self._status_server():
                await run_until(stop, self._elect(client), grace_s=STOP_S)
                await self._depart(client)
        finally:
            await client.close()
        log.info("operator stopped")

    async def _depart(self, client: KubeClient) -> None:
        """Release the graphs in the operator's own namespace if that namespace is being deleted, and this process with it."""
        own = os.environ.get("POD_NAMESPACE")
        if own is None or watched_namespace(self._settings, client) not in {None, own}:
            return
        finalizer = drain_finalizer(self._settings.operator_class)
        with suppress(TimeoutError):
            async with asyncio.timeout(DEPART_S):
                await release_graphs(client, own, finalizer=finalizer)

    async def _elect(self, client: KubeClient) -> None:
        if not self._settings.leader_election:
            await self._lead(client)
            return
        namespace, name = lease_of(self._settings, client)
        election = election_of(
            client,
            "operator",
            namespace=namespace,
            name=name,
            operator_class=self._settings.operator_class,
        )
        self._election = election
        fenced = client.fenced(lambda: election.is_leading)
        await election.lead(lambda: self._lead(fenced))

    async def _lead(self, client: KubeClient) -> None:
        """Run the operator until cancelled."""
        pool = ConnectionPool(tls=UNVERIFIED)
        operator = Operator(client, self._settings, loads=MetricsReader(pool), metrics=self._metrics)
        self._operator = operator
        self._metrics.leader.set(1)
        try:
            await operator.run()
        finally:
            self._operator = None
            self._metrics.leader.set(0)
            await pool.close()

    @asynccontextmanager
    async def _status_server(self) -> AsyncIterator[None]:
        if not self._settings.metrics_port:
            yield
            return
        server = StatusServer(
            self._metrics, unready=self._unready, leadership=self._leadership, fault=self._fault
        )
        await server.start(self._settings.host, self._settings.metrics_port)
        try:
            yield
        finally:
            await server.close(grace_s=1.0)

    def _unready(self) -> str | None:
        """Return why this process is neither an active leader nor on standby; None if it is one of them."""
        if self._operator is not None:
            return self._operator.problem()
        if self._election is None:
            return "starts"
        return self._election.problem

    def _fault(self) -> str | None:
        """Return why only a restart helps; None if all is well."""
        return None if self._election is None else self._election.overdue

    def _leadership(self) -> str:
        """Return the text that a standby process reports; empty if this process leads."""
        if self._operator is None and self._election is not None and self._election.holder:
            return f"standby for {self._election.holder}"
        return ""

    def _depth(self) -> float:
        return 0 if self._operator is None else self._operator.queue.depth

    def _graphs(self) -> Iterable[Object]:
        return () if self._operator is None else self._operator.graphs()

    def _pools(self) -> Iterable[Object]:
        return () if self._operator is None else self._operator.pools.all()


def watched_namespace(settings: OperatorSettings, client: KubeClient) -> str | None:
    """Return the namespace to watch: that in ``settings``, else that of ``client``; None means all namespaces."""
    return None if settings.all_namespaces else settings.namespace or client.namespace


def lease_of(settings: OperatorSettings, client: KubeClient, component: str = OPERATOR) -> ObjectKey:
    """Return namespace and name of the Lease of this installation's operator, or of its planner.

    Args:
        settings: Settings of the operator.
        client: Client of the Kubernetes API.
        component: ``penstock-operator`` or ``penstock-planner``.
    """
    namespace = watched_namespace(settings, client)
    name = lease_name(component, cluster_wide=namespace is None, operator_class=settings.operator_class)
    return namespace or _own_namespace(client), name


def _own_namespace(client: KubeClient) -> str:
    return os.environ.get("POD_NAMESPACE") or client.namespace
