"""Serves the operator's own /metrics, /healthz and /readyz; the metrics cover reconciles, writes, the queue, graphs and pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import orjson
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.api import GraphPhase
from penstock.core import metric_names as names
from penstock.core.http.messages import error_body
from penstock.core.http.server import HttpServer, Request, Responder
from penstock.kube.informer import key_of
from penstock_operator.pools.keys import graph_of, kind_of_pool
from penstock_operator.trim import Object

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Histogram buckets in seconds. Chosen: a reconcile that finds nothing to do takes a millisecond, one that writes
twenty objects takes tenths of a second."""


class _GraphCollector(Collector):
    """Metrics of the graphs in the operator's view; the series of a deleted graph are no longer exported."""

    def __init__(self) -> None:
        self.graphs: Callable[[], Iterable[Object]] = tuple

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families of graphs."""
        labels = ["namespace", "graph"]
        ready = GaugeMetricFamily(
            names.OPERATOR_READY_REPLICAS,
            "Ready replicas by graph and role; 0 also while there is no pod.",
            labels=[*labels, "role"],
        )
        target = GaugeMetricFamily(
            names.OPERATOR_TARGET_REPLICAS,
            "Target replicas by graph and role: the desired number limited to its bounds.",
            labels=[*labels, "role"],
        )
        planned = GaugeMetricFamily(
            names.OPERATOR_PLANNED, "1 for each graph that should have a planner.", labels=labels
        )
        phases = GaugeMetricFamily(names.OPERATOR_GRAPHS, "Graphs by phase.", labels=["phase"])
        found = dict.fromkeys((each.value for each in GraphPhase), 0)
        for graph in self.graphs():
            metadata, status = graph["metadata"], graph.get("status") or {}
            phase = status.get("phase") or GraphPhase.PENDING.value
            found[phase] = found.get(phase, 0) + 1
            if "deletionTimestamp" in metadata:
                continue
            of_graph = [metadata["namespace"], metadata["name"]]
            for role, (count, wanted) in _replicas(graph["spec"], status.get("services") or {}).items():
                ready.add_metric([*of_graph, role], count)
                if wanted is not None:
                    target.add_metric([*of_graph, role], wanted)
            if (graph["spec"].get("planner") or {}).get("enabled", True):
                planned.add_metric(of_graph, 1)
        for phase, count in found.items():
            phases.add_metric([phase], count)
        yield from (ready, target, planned, phases)


class _PoolCollector(Collector):
    """Metrics of the GPU pools, from their statuses; the series of a deleted pool are no longer exported."""

    def __init__(self) -> None:
        self.pools: Callable[[], Iterable[Object]] = tuple

    def collect(self) -> Iterator[Metric]:
        """Yield both metric families of GPU pools."""
        gpus = GaugeMetricFamily(
            names.OPERATOR_POOL_GPUS,
            "GPUs of a GPU pool: total, held, draining, free, borrowed; namespace is empty for a ClusterGpuPool.",
            labels=["namespace", "kind", "pool", "state"],
        )
        of_graphs = GaugeMetricFamily(
            names.OPERATOR_POOL_GRAPH_GPUS,
            "GPUs of a graph in a GPU pool: guaranteed, held, granted, wanted, and missing from its guarantee (shortfall); namespace is the graph's.",
            labels=["namespace", "kind", "pool", "graph", "state"],
        )
        for pool in self.pools():
            key, status = key_of(pool), pool.get("status") or {}
            of_pool = [kind_of_pool(key).kind, key[1]]
            for state, number in sorted((status.get("gpus") or {}).items()):
                gpus.add_metric([key[0], *of_pool, state], number)
            for row in status.get("graphs") or ():
                namespace, graph = graph_of(key, row["name"])
                for state in ("guaranteed", "held", "granted", "wanted", "shortfall"):
                    of_graphs.add_metric([namespace, *of_pool, graph, state], row.get(state, 0))
        yield from (gpus, of_graphs)


def _replicas(spec: Object, shown: Object) -> dict[str, tuple[int, int | None]]:
    """Return ready and target replicas by role for every declared role; the target is None if the status does not have it."""
    found: dict[str, tuple[int, int | None]] = {}
    for name, service in spec.get("services", {}).items():
        ready, target = found.get(service["role"], (0, None))
        shown_service = shown.get(name) or {}
        wanted = shown_service.get("target")
        target = target if wanted is None else (target or 0) + wanted
        found[service["role"]] = ready + shown_service.get("ready", 0), target
    return found


class OperatorMetrics:
    """Prometheus metrics of one operator process: reconciles, writes, queue, graphs and GPU pools."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.durations = Histogram(
            names.OPERATOR_RECONCILE_DURATION,
            "Seconds of one reconcile of one graph, writes included.",
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.reconciles = Counter(
            names.OPERATOR_RECONCILES,
            "Reconciles by result: unchanged, changed, waiting, invalid, conflict, error.",
            ["result"],
            registry=registry,
        )
        self.writes = Counter(
            names.OPERATOR_WRITES,
            "Writes that the API server accepted, by kind and verb.",
            ["kind", "verb"],
            registry=registry,
        )
        self.write_errors = Counter(
            names.OPERATOR_WRITE_ERRORS,
            "Writes that failed, by kind and error.",
            ["kind", "error"],
            registry=registry,
        )
        self.events_dropped = Counter(
            names.OPERATOR_EVENTS_DROPPED, "Events that could not be recorded.", registry=registry
        )
        self._depth = Gauge(names.OPERATOR_QUEUE_DEPTH, "Graphs that wait for a worker.", registry=registry)
        self.leader = Gauge(
            names.OPERATOR_LEADER,
            "1 while this process is active: it is the leader, or leader election is off.",
            registry=registry,
        )
        self._depth.set_function(lambda: 0)
        self._by_graph = _GraphCollector()
        registry.register(self._by_graph)
        self._by_pool = _PoolCollector()
        registry.register(self._by_pool)

    def watch(
        self,
        *,
        depth: Callable[[], float],
        graphs: Callable[[], Iterable[Object]],
        pools: Callable[[], Iterable[Object]],
    ) -> None:
        """Set the functions that every scrape of /metrics calls to get current values.

        Args:
            depth: Returns the number of graphs that wait for a reconcile worker.
            graphs: Returns the GraphDeployments, reduced to the fields that the operator needs.
            pools: Returns the GpuPools and ClusterGpuPools.
        """
        self._depth.set_function(depth)
        self._by_graph.graphs, self._by_pool.pools = graphs, pools

    def page(self) -> bytes:
        """Return the metrics page in the Prometheus text format."""
        return generate_latest(self._registry)


class StatusServer(HttpServer):
    """HTTP server of the operator process, for Prometheus and the kubelet.

    It answers /metrics, /healthz (200, or 503 if only a restart helps) and /readyz (200 if the process reconciles or
    is on standby, else 503).
    """

    def __init__(
        self,
        metrics: OperatorMetrics,
        *,
        unready: Callable[[], str | None],
        leadership: Callable[[], str] = lambda: "",
        fault: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Prepare; `start` listens.

        Args:
            metrics: Metrics that /metrics exports.
            unready: Returns why the process is not ready, as text; None if it is ready.
            leadership: Returns the text about a standby process that /readyz shows; empty for a leader.
            fault: Returns why only a restart helps, as text, which makes /healthz answer 503; None if all is
                well.
        """
        self._metrics = metrics
        self._unready = unready
        self._leadership = leadership
        self._fault = fault
        super().__init__(self._answer)

    async def _answer(self, request: Request, responder: Responder) -> None:
        if request.path == "/metrics":
            responder.send(200, self._metrics.page(), content_type=CONTENT_TYPE_LATEST)
        elif request.path == "/healthz":
            if (fault := self._fault()) is None:
                responder.send(200, b'{"status":"ok"}')
            else:
                responder.send(503, error_body(fault, kind="server_error", code="unhealthy"))
        elif request.path == "/readyz":
            why = self._unready()
            if why is None:
                leadership = self._leadership()
                body = {"status": "ready", "leadership": leadership} if leadership else {"status": "ready"}
                responder.send(200, orjson.dumps(body))
            else:
                responder.send(503, error_body(why, code="not_ready"))
        else:
            message = "path: only /metrics, /healthz and /readyz are served here"
            responder.send(404, error_body(message, code="not_found"))
