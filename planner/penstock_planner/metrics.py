"""The planner's own /metrics page: its observations, decisions and their reasons, by namespace and graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock.core.http.messages import error_body
from penstock.core.http.server import HttpServer, Request, Responder
from penstock_planner.series import SERIES, samples
from penstock_planner.stats import PlannerStats

_GRAPH = ("namespace", "graph")


class PlannerMetrics(Collector):
    """Statistics of all graphs of one process, and their metrics page."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[str, str], PlannerStats] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of(self, namespace: str, graph: str) -> PlannerStats:
        """Return the statistics of a graph's planner; they are created at the first call for that graph."""
        return self._graphs.setdefault((namespace, graph), PlannerStats())

    def all(self) -> list[PlannerStats]:
        """Return the statistics of all graphs whose planners this process runs or has run, without removed graphs (`forget`)."""
        return list(self._graphs.values())

    def forget(self, namespace: str, graph: str) -> None:
        """Remove a graph from the metrics page. Does nothing if the graph is unknown."""
        self._graphs.pop((namespace, graph), None)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield every metric with its samples; called by the Prometheus registry."""
        found: dict[str, list[tuple[tuple[str, ...], float | None]]] = {}
        for graph, stats in self._graphs.items():
            for name, labels, value in samples(stats):
                found.setdefault(name, []).append(((*graph, *labels), value))
        for name, series in SERIES.items():
            if series.metric is None:
                continue
            kind = CounterMetricFamily if series.is_counter else GaugeMetricFamily
            family = kind(series.metric, series.text, labels=[*_GRAPH, *series.labels])
            for labels, value in found.get(name, ()):
                if value is not None or series.is_nan:
                    family.add_metric(labels, math.nan if value is None else value)
            yield family

    def page(self) -> bytes:
        """Return the metrics page in Prometheus' text format."""
        return generate_latest(self._registry)


async def serve(
    metrics: PlannerMetrics,
    host: str,
    port: int,
    *,
    unready: Callable[[], str | None],
    fault: Callable[[], str | None] = lambda: None,
) -> HttpServer:
    """Serve /metrics, /readyz and /healthz (also as /health) over HTTP, and return the running server.

    Args:
        metrics: Metrics of all graphs.
        host: Address to listen on.
        port: Port to listen on; 0 chooses a free one.
        unready: Function that returns the reason for which the process is not ready, or None if it is ready.
        fault: Function that returns the reason for which the process must be restarted, or None if it is healthy.

    Raises:
        PortInUseError: the port is in use.
    """
    states = {
        "/readyz": (unready, "not_ready"),
        "/healthz": (fault, "unhealthy"),
        "/health": (fault, "unhealthy"),
    }

    async def handle(request: Request, responder: Responder) -> None:
        if request.path == "/metrics":
            responder.send(200, metrics.page(), content_type=CONTENT_TYPE_LATEST)
        elif request.path not in states:
            message = "path: only /metrics, /healthz and /readyz are served"
            responder.send(404, error_body(message, code="not_found"))
        else:
            problem, code = states[request.path]
            if (why := problem()) is None:
                responder.send(200, b'{"status":"ok"}')
            else:
                responder.send(503, error_body(why, kind="server_error", code=code))

    server = HttpServer(handle)
    await server.start(host, port)
    return server
