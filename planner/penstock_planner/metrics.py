"""The planner's own /metrics: what it sees, what it decided and why it held."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from penstock_core import metric_names as names
from penstock_planner.decide.decision import Decision
from penstock_planner.view import Phase, View
from penstock_wire.problem import error_body
from penstock_wire.server import HttpServer, Request, Responder


class PlannerMetrics:
    """A listener that keeps gauges and counters, and the handler that prints them."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._decisions = Counter(
            names.PLANNER_DECISIONS,
            "Recorded decisions per role; action hold carries its reason.",
            ["role", "action", "reason"],
            registry=registry,
        )
        self._replicas = Gauge(
            names.PLANNER_REPLICAS, "Replicas by state.", ["role", "state"], registry=registry
        )
        self._desired = Gauge(
            names.PLANNER_DESIRED_REPLICAS,
            "Replicas wanted by the last decision.",
            ["role"],
            registry=registry,
        )
        self._kv = Gauge(
            names.PLANNER_KV_USAGE, "Mean KV usage fraction of the newest pull.", registry=registry
        )
        self._queue = Gauge(
            names.PLANNER_QUEUE, "Requests waiting for prefill at the newest pull.", registry=registry
        )
        self._ages = Gauge(
            names.PLANNER_READING_AGE, "Oldest reading used, modelled seconds.", ["signal"], registry=registry
        )
        self._unknown = Gauge(
            names.PLANNER_UNKNOWN_READINGS,
            "Readings that were stale or missing.",
            ["signal"],
            registry=registry,
        )
        self._gpus = Gauge(
            names.PLANNER_GPUS, "GPUs of existing workers, draining ones included.", registry=registry
        )
        self._budget = Gauge(names.PLANNER_GPU_BUDGET, "Ceiling; infinite without one.", registry=registry)
        self._phase = Gauge(names.PLANNER_PHASE, "1 for the current phase.", ["phase"], registry=registry)
        self._lag = Gauge(
            names.SCHEDULE_LAG_P99, "Lateness of ticks, 99th percentile, modelled seconds.", registry=registry
        )
        self._ticks = Counter(names.SCHEDULE_LAG_SAMPLES, "Ticks measured.", registry=registry)
        self._ledger_errors = Counter(
            names.PLANNER_LEDGER_ERRORS, "Ledger records that could not be written.", registry=registry
        )
        self._errors_counted = 0

    def tick(self, view: View) -> None:
        """Take the newest numbers over; what is unknown becomes NaN."""
        self._ticks.inc()
        for phase in Phase:
            self._phase.labels(phase.value).set(phase is view.phase)
        for role, pool in view.pools.items():
            self._replicas.labels(role.value, "ready").set(pool.ready)
            self._replicas.labels(role.value, "starting").set(pool.starting)
            self._replicas.labels(role.value, "draining").set(pool.draining)
        for role, replicas in view.desired.items():
            self._desired.labels(role.value).set(replicas)
        self._gpus.set(view.gpus)
        self._budget.set(float("inf") if view.max_gpu_budget is None else view.max_gpu_budget)
        self._ledger_errors.inc(view.ledger_errors - self._errors_counted)
        self._errors_counted = view.ledger_errors
        if view.lag_p99_s is not None:
            self._lag.set(view.lag_p99_s)
        if view.pull is not None:
            kv, queue = view.pull.kv, view.pull.queue
            self._kv.set(_or_nan(kv.mean))
            self._ages.labels("kv").set(_or_nan(kv.age_s))
            self._unknown.labels("kv").set(kv.unknown)
            if queue is not None:
                self._queue.set(_or_nan(queue.value))
                self._ages.labels("queue").set(_or_nan(queue.age_s))
                self._unknown.labels("queue").set(not queue.is_known)

    def decided(self, decision: Decision, view: View) -> None:  # noqa: ARG002 - the listener's shape
        """Count the decision by role, action and reason."""
        for role in decision.roles:
            self._decisions.labels(role.role.value, role.action.value, role.reason.value).inc()

    def page(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self._registry)

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer /metrics and /health."""
        if request.path == "/metrics":
            responder.send(200, self.page(), content_type=CONTENT_TYPE_LATEST)
        elif request.path == "/health":
            responder.send(200, b'{"status":"ok"}')
        else:
            responder.send(404, error_body("path: only /metrics and /health are here", code="not_found"))


async def serve(metrics: PlannerMetrics, host: str, port: int) -> HttpServer:
    """Listen; port 0 takes a free one.

    Raises:
        PortInUseError: the port is taken.
    """
    server = HttpServer(metrics.handle)
    await server.start(host, port)
    return server


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
