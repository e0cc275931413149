"""The planner's own /metrics: what it sees, what it decided and why it held, by namespace and graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock.core import metric_names as names
from penstock.core.http.problem import error_body
from penstock.core.http.server import HttpServer, Request, Responder
from penstock.planner.core.state import PlannerPhase
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Decision
from penstock.planner.decide.observation import Pull
from penstock.planner.observers import View
from penstock.planner.target_metrics import TargetMetrics, target_families

_GRAPH = ["namespace", "graph"]

Values = Iterator[tuple[tuple[str, ...], float]]
"""Label values behind namespace and graph, and the number."""


class GraphMetrics:
    """One graph's listener; keeps the newest numbers, so that a tick costs next to nothing."""

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        self.ticks = 0
        self.ledger_errors = 0
        self._errors_seen = 0
        self.desired: dict[str, int] = {}
        self.pull: Pull | None = None
        self.view: View | None = None
        self.targets: TargetMetrics | None = None

    def begin(self, config: DecideConfig) -> None:
        """Take note that a loop begins to plan by this configuration; without it, no targets are shown."""
        self.targets = TargetMetrics(config)

    def tick(self, view: View) -> None:
        """Take the newest numbers over; those of a pull stay until the next one."""
        self.ticks += 1
        self.view = view
        self.pull = view.pull or self.pull
        self.ledger_errors += view.ledger_errors - self._errors_seen
        self._errors_seen = view.ledger_errors
        self.desired.update({role.value: count for role, count in view.desired.items()})
        if self.targets is not None:
            self.targets.tick(view)

    def decided(self, decision: Decision, view: View) -> None:
        """Count the decision by role, action and reason."""
        for role in decision.roles:
            self.decisions[role.role.value, role.action.value, role.reason.value] += 1
        if self.targets is not None:
            self.targets.decided(decision, view)

    def restarted(self) -> None:
        """Go on counting behind a loop that ended; the next one's counters begin at 0."""
        self._errors_seen = 0

    def replicas(self) -> Values:
        """Yield (role, state) and replicas."""
        for role, pool in self.view.pools.items() if self.view else ():
            yield (role.value, "ready"), pool.ready
            yield (role.value, "starting"), pool.starting
            yield (role.value, "draining"), pool.draining

    def signals(self) -> Mapping[str, tuple[float, float, float]]:
        """Return by signal its value, age and unknown readings; what is unknown is NaN."""
        if self.pull is None:
            return {}
        kv, queue = self.pull.kv, self.pull.queue
        found = {"kv": (_or_nan(kv.mean), _or_nan(kv.age_s), float(kv.unknown))}
        if queue is not None:
            found["queue"] = (_or_nan(queue.value), _or_nan(queue.age_s), float(not queue.is_known))
        return found

    def demand(self) -> tuple[float, float, float]:
        """Return arrivals/s, rejected requests/s and the oldest wait; NaN while unknown."""
        demand = self.pull.demand if self.pull is not None else None
        if demand is None:
            return math.nan, math.nan, math.nan
        rejected = demand.refused + demand.timed_out
        period_s = demand.period_s
        return demand.arrivals / period_s, rejected / period_s, demand.oldest_wait_s or 0.0


class PlannerMetrics(Collector):
    """All graphs of one process, and the handler that prints them."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[str, str], GraphMetrics] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of(self, namespace: str, graph: str) -> GraphMetrics:
        """Return a graph's listener; the same one for the same graph."""
        return self._graphs.setdefault((namespace, graph), GraphMetrics())

    def all(self) -> list[GraphMetrics]:
        """Return every graph's listener."""
        return list(self._graphs.values())

    def forget(self, namespace: str, graph: str) -> None:
        """Leave a graph out from now on."""
        self._graphs.pop((namespace, graph), None)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield every family; called by the registry."""
        yield self._counter(
            names.PLANNER_DECISIONS,
            "Recorded decisions per role; action hold carries its reason.",
            ["role", "action", "reason"],
            {key: tuple(each.decisions.items()) for key, each in self._graphs.items()},
        )
        yield self._counter(
            names.PLANNER_LEDGER_ERRORS,
            "Ledger records that could not be written.",
            [],
            {key: (((), each.ledger_errors),) for key, each in self._graphs.items()},
        )
        yield self._counter(
            names.SCHEDULE_LAG_SAMPLES,
            "Ticks measured.",
            [],
            {key: (((), each.ticks),) for key, each in self._graphs.items()},
        )
        yield from self._pools()
        yield from self._signals()
        yield from self._demand()
        yield from self._gauges()
        yield from target_families(
            {key: each.targets for key, each in self._graphs.items() if each.targets is not None}
        )

    def _pools(self) -> Iterator[GaugeMetricFamily]:
        replicas = GaugeMetricFamily(
            names.PLANNER_REPLICAS, "Replicas by state.", labels=[*_GRAPH, "role", "state"]
        )
        desired = GaugeMetricFamily(
            names.PLANNER_DESIRED_REPLICAS, "Replicas wanted by the last decision.", labels=[*_GRAPH, "role"]
        )
        for key, each in self._graphs.items():
            for labels, count in each.replicas():
                replicas.add_metric([*key, *labels], count)
            for role, count in each.desired.items():
                desired.add_metric([*key, role], count)
        yield replicas
        yield desired

    def _signals(self) -> Iterator[GaugeMetricFamily]:
        means = {
            "kv": GaugeMetricFamily(
                names.PLANNER_KV_USAGE, "Mean KV usage fraction of the newest pull.", labels=_GRAPH
            ),
            "queue": GaugeMetricFamily(
                names.PLANNER_QUEUE, "Requests waiting for prefill at the newest pull.", labels=_GRAPH
            ),
        }
        ages = GaugeMetricFamily(
            names.PLANNER_READING_AGE, "Oldest reading used, simulated seconds.", labels=[*_GRAPH, "signal"]
        )
        unknown = GaugeMetricFamily(
            names.PLANNER_UNKNOWN_READINGS,
            "Readings that were stale or missing.",
            labels=[*_GRAPH, "signal"],
        )
        for key, each in self._graphs.items():
            for signal, (value, age_s, missing) in each.signals().items():
                means[signal].add_metric(key, value)
                ages.add_metric([*key, signal], age_s)
                unknown.add_metric([*key, signal], missing)
        yield from (*means.values(), ages, unknown)

    def _demand(self) -> Iterator[GaugeMetricFamily]:
        families = [
            GaugeMetricFamily(name, text, labels=_GRAPH)
            for name, text in (
                (names.PLANNER_ARRIVALS, "Requests that arrive at the routers, newest pull."),
                (names.PLANNER_REJECTED, "Of those, refused or timed out in the queue."),
                (names.PLANNER_OLDEST_WAIT, "Longest wait in a router's queue now, simulated seconds."),
            )
        ]
        startup = GaugeMetricFamily(
            names.PLANNER_STARTUP,
            "Simulated seconds from the newest replica's decision until it was ready.",
            labels=[*_GRAPH, "role"],
        )
        for key, each in self._graphs.items():
            if each.pull is not None:
                for family, value in zip(families, each.demand(), strict=True):
                    family.add_metric(key, value)
            for role, took_s in each.view.startup_s.items() if each.view is not None else ():
                startup.add_metric([*key, role.value], took_s)
        yield from (*families, startup)

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        gpus = GaugeMetricFamily(
            names.PLANNER_GPUS, "GPUs of existing workers, draining ones included.", labels=_GRAPH
        )
        budget = GaugeMetricFamily(names.PLANNER_GPU_BUDGET, "Ceiling; infinite without one.", labels=_GRAPH)
        phase = GaugeMetricFamily(names.PLANNER_PHASE, "1 for the current phase.", labels=[*_GRAPH, "phase"])
        lag = GaugeMetricFamily(
            names.SCHEDULE_LAG_P99,
            "Lateness of ticks, 99th percentile, simulated seconds.",
            labels=_GRAPH,
        )
        for key, each in self._graphs.items():
            if (view := each.view) is None:
                continue
            gpus.add_metric(key, view.gpus)
            budget.add_metric(key, float("inf") if view.max_gpu_budget is None else view.max_gpu_budget)
            for name in PlannerPhase:
                phase.add_metric([*key, name.value], view.phase is name)
            if view.lag_p99_s is not None:
                lag.add_metric(key, view.lag_p99_s)
        yield from (gpus, budget, phase, lag)

    @staticmethod
    def _counter(
        name: str,
        text: str,
        labels: list[str],
        values: Mapping[tuple[str, str], tuple[tuple[tuple[str, ...], int], ...]],
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=[*_GRAPH, *labels])
        for key, counts in values.items():
            for extra, count in counts:
                family.add_metric([*key, *extra], count)
        return family

    def page(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self._registry)


def _no_fault() -> str | None:
    return None


async def serve(
    metrics: PlannerMetrics, host: str, port: int, *, fault: Callable[[], str | None] = _no_fault
) -> HttpServer:
    """Answer /metrics, and /healthz (also as /health).

    Args:
        metrics: To show.
        host: To listen on.
        port: To listen on; 0 takes a free one.
        fault: Returns why only a restart of this process helps, which fails /healthz; None: all is well.

    Raises:
        PortInUseError: the port is taken.
    """

    async def handle(request: Request, responder: Responder) -> None:
        if request.path == "/metrics":
            responder.send(200, metrics.page(), content_type=CONTENT_TYPE_LATEST)
        elif request.path not in ("/healthz", "/health"):
            responder.send(404, error_body("path: only /metrics and /healthz are here", code="not_found"))
        elif (why := fault()) is None:
            responder.send(200, b'{"status":"ok"}')
        else:
            responder.send(503, error_body(why, kind="server_error", code="unhealthy"))

    server = HttpServer(handle)
    await server.start(host, port)
    return server


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
