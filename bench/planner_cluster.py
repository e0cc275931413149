"""Prints what planning many graphs in one process costs: CPU seconds per second, at one pull a second each.

Everything but the API server is real: watched pods are counted, router pages fetched over HTTP and parsed,
ledgers, state files and dashboards written, decisions made. Pages come from a server in a process of its own.

Run: python bench/planner_cluster.py [--graphs 200] [--workers 16] [--seconds 60] [--dashboard 0] [--profile 1]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import multiprocessing
import multiprocessing.connection
import pstats
import resource
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import uvloop
from options import read_options

from penstock.api import GraphDeployment, Role
from penstock.core.clock import SimulatedClock
from penstock.core.http import loop as event_loop
from penstock.core.http.client import ConnectionPool
from penstock.core.http.server import HttpServer
from penstock.core.logs import configure
from penstock.kube.client import KubeClient
from penstock_planner.cluster.fleet import last_report, plan_of
from penstock_planner.cluster.status import PlannerReason, StatusListener, StatusWriter
from penstock_planner.core.planner_settings import PlannerSettings
from penstock_planner.dashboard import Dashboard
from penstock_planner.files import SnapshotWriter
from penstock_planner.ledger import Ledger
from penstock_planner.loop import PlannerClock, PlannerLoop
from penstock_planner.metrics import PlannerMetrics
from penstock_planner.observers import Observer, Observers
from penstock_planner.service import boot_id
from penstock_planner.sources.base import ReadingSource, SourceChain
from penstock_planner.sources.router import RouterSource, at
from penstock_planner.sources.scrape import MetricsPages, ScrapeSource
from penstock_planner.targets.kubernetes import KubernetesTarget
from penstock_planner.targets.pods import PodFacts

BUDGET = 1.0
"""CPU seconds per second for 200 graphs of 16 workers; the product's bound."""

HISTOGRAMS = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "prefill_queue")
BOUNDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    "+Inf",
)


def worker_names(workers: int) -> list[tuple[str, Role]]:
    """Return the workers of every graph, half of them for prefill."""
    roles = [Role.PREFILL if i < workers // 2 else Role.DECODE for i in range(workers)]
    return [(f"llama-{role.value}-6f9c{i:02d}", role) for i, role in enumerate(roles)]


def router_page(workers: int) -> bytes:
    """Return a page of the length and kind that the router serves."""
    lines = [
        "# HELP penstock_router_prefill_queue_requests Requests that wait for prefill.",
        'penstock_router_prefill_queue_requests{model_name="m"} 2',
        'penstock_router_prefill_queue_tokens{model_name="m"} 2048',
        'penstock_router_prefill_queue_oldest_seconds{model_name="m"} 0.25',
    ]
    for series, value in (
        ("worker_ready", 1),
        ("worker_inflight_requests", 12),
        ("worker_inflight_tokens", 10240),
        ("worker_kv_usage_fraction", 0.7012345),
        ("worker_metrics_age_seconds", 0.1234567),
    ):
        lines += [
            f'penstock_router_{series}{{role="{role.value}",worker="{name}"}} {value}'
            for name, role in worker_names(workers)
        ]
    for histogram in HISTOGRAMS:
        lines += [
            f'penstock_router_{histogram}_seconds_bucket{{le="{bound}",model_name="m"}} {index * 1000}.0'
            for index, bound in enumerate(BOUNDS)
        ]
    lines += [f'penstock_router_requests_total{{code="200",endpoint="/{i}"}} 12345' for i in range(10)]
    return "\n".join([*lines, ""]).encode()


def serve_pages(page: bytes, port: multiprocessing.connection.Connection) -> None:
    """Serve one page on every path until killed; tells its port."""

    async def main(stop: asyncio.Event) -> None:
        async def handle(_request: Any, responder: Any) -> None:
            responder.send(200, page, content_type="text/plain; version=0.0.4")

        server = HttpServer(handle)
        await server.start("127.0.0.1", 0)
        port.send(server.port)
        await stop.wait()
        await server.close(grace_s=0)

    event_loop.run(main)


class FixedGraph:
    """What a watch would show of one graph whose workers are all ready."""

    def __init__(self, workers: int) -> None:
        ready = {
            name: PodFacts(
                name, name, role, name, True, f"http://10.0.0.1:8000/{name}", True, True, False, False, True
            )
            for name, role in worker_names(workers)
        }
        self._pods = MappingProxyType(ready)
        self._adapter = {
            "metadata": {"name": "a", "uid": "a", "generation": 1, "resourceVersion": "1"},
            "spec": {"replicas": workers // 2},
            "owner": "penstock-planner",
        }

    def problem(self) -> str | None:
        """Return None: the watch works."""
        return None

    def adapter(self, service: str) -> Mapping[str, Any] | None:  # noqa: ARG002 - both are alike
        """Return the adapter of either service."""
        return self._adapter

    def pods(self) -> Mapping[str, PodFacts]:
        """Return the workers."""
        return self._pods

    def grant(self) -> int | None:
        """Return None: there is no GPU pool."""
        return None


def graph_of(index: int, workers: int) -> GraphDeployment:
    """Return one graph's manifest."""
    scaling = {"minReplicas": 1, "maxReplicas": workers}
    half = {"replicas": workers // 2, "scaling": scaling}
    services = {
        "frontend": {"role": "router", "replicas": 1},
        "prefill": {"role": "prefill", **half},
        "decode": {"role": "decode", **half},
    }
    spec = {
        "model": {"name": "m"},
        "runtime": "simulated",
        "services": services,
        "planner": {"maxGpuBudget": workers * 2},
    }
    return GraphDeployment.model_validate(
        {"metadata": {"name": f"graph-{index}", "namespace": "bench"}, "spec": spec}
    )


@dataclass(frozen=True)
class Cost:
    """CPU after everything has started: seconds per second, and milliseconds per tick of one graph."""

    per_second: float
    per_tick_ms: float


async def plan(arguments: argparse.Namespace, url: str, folder: Path) -> tuple[Cost, PlannerMetrics]:
    """Plan all graphs for a while."""
    pool, metrics, clock, stop = ConnectionPool(), PlannerMetrics(), SimulatedClock(1.0), asyncio.Event()
    status = StatusWriter(cast(Any, None), lambda _key: None)
    dashboards: list[Dashboard] = []
    pages = MetricsPages(pool, real_now_s=time.monotonic)
    scrape = ScrapeSource(pages)

    async def one(index: int) -> None:
        graph = graph_of(index, arguments.workers)
        plan = plan_of(graph, {})
        home = folder / graph.name
        home.mkdir()
        live = {"metadata": {"generation": 1}, "status": {}}
        listeners: list[Observer] = [
            metrics.of("bench", graph.name),
            StatusListener(
                last_report(live, PlannerReason.OBSERVING, ""),
                plan.config,
                say=lambda report: status.say(("bench", graph.name), report),
            ),
            SnapshotWriter(home, plan.config, now_s=time.monotonic),
        ]
        if arguments.dashboard:
            dashboards.append(Dashboard(home, plan.config))
            listeners.append(dashboards[-1])
        await asyncio.sleep(2 * index / arguments.graphs)
        view = FixedGraph(arguments.workers)
        sources: list[ReadingSource] = [RouterSource(pages, at(f"{url}/{index}"), now_s=clock.now_s), scrape]
        await PlannerLoop(
            PlannerSettings(
                plan.config, 600.0, f"{boot_id()}@1", max_age_s=10.0, about={"namespace": "bench"}
            ),
            target=KubernetesTarget(cast(KubeClient, None), graph, view),
            source=SourceChain(sources, now_s=clock.now_s, real_now_s=time.monotonic),
            ledger=Ledger(home / "ledger.jsonl"),
            time=PlannerClock(clock),
            observers=Observers(listeners),
        ).run(stop)

    async with asyncio.TaskGroup() as group:
        for index in range(arguments.graphs):
            group.create_task(one(index))
        await asyncio.sleep(5)
        ticks = sum(each.ticks for each in metrics.all())
        cpu_s, wall_s = time.process_time(), time.monotonic()
        await asyncio.sleep(arguments.seconds)
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        ticks = sum(each.ticks for each in metrics.all()) - ticks
        cost = Cost(cpu_s / wall_s, cpu_s / ticks * 1000)
        stop.set()
    for dashboard in dashboards:
        dashboard.close()
    await pool.close()
    return cost, metrics


def main() -> None:
    """Start the page server, plan, print."""
    arguments = read_options(__doc__, graphs=200, workers=16, seconds=60.0, dashboard=1, profile=0)
    configure("warning")
    mine, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve_pages, args=(router_page(arguments.workers), theirs), daemon=True
    )
    server.start()
    url = f"http://127.0.0.1:{mine.recv()}"
    profile = cProfile.Profile(time.process_time)
    event_loop.raise_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.profile:
            profile.enable()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            cost, metrics = runner.run(plan(arguments, url, Path(folder)))
        profile.disable()
    server.terminate()
    server.join()
    lags = [each.view.lag_p99_s or 0.0 for each in metrics.all() if each.view is not None]
    ticks = sum(each.ticks for each in metrics.all())
    unknown = sum(1 for each in metrics.all() if each.pull is None or each.pull.kv.unknown)
    print(f"graphs {arguments.graphs}, workers {arguments.workers} each, dashboard {arguments.dashboard}")
    print(f"CPU seconds per second   {cost.per_second:6.2f}   (bound {BUDGET:g})")
    wanted = cost.per_tick_ms / 1000 * arguments.graphs
    print(f"CPU per pull             {cost.per_tick_ms:6.2f} ms, so {wanted:.2f} s/s when no pull is late")
    print(
        f"ticks {ticks}, graphs with unknown metrics {unknown}, worst p99 lateness {max(lags) * 1000:.0f} ms"
    )
    print(f"memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
