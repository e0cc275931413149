"""Holds the simulator against real time: one trace slice through real processes and through virtual time.

    python bench/live_proof.py [--policy prefix-cost,dualmap] [--instances 4P4D] [--rows 300] [--qps 2.5]

Live: the router, worker processes and the load client's replayer, on this machine. Simulated: the same graph,
arrivals, lengths and prompts. With --runs N the live figures are medians of N runs. Queues are chaotic: who meets
whom in a batch hangs on milliseconds. So the simulator runs again with arrivals moved by less than a machine's
lateness, and the range of those runs says which differences mean anything. A machine too busy to be on time shows in
the lateness that every process reports of itself; as root, `nice -n -15` helps without harming others, because all
processes together need a tenth of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import psutil

sys.path.insert(0, str(Path(__file__).parent))
import graphs
import live_page
import sse_load
from live_page import Request, Side

from penstock_api import GraphDeployment
from penstock_core.clock import SimulatedClock
from penstock_engine.core.prefix_keys import prefix_keys
from penstock_local.ports import ephemeral_port
from penstock_manifests import load_graph
from penstock_router.policy.keys import SUB_BLOCK_KEYS, prompt_keys
from penstock_runtimes import simulated
from penstock_runtimes.process import RuntimeContext
from penstock_simulator.graph_scenario import graph_pools, graph_router
from penstock_simulator.jobs import Job, PrefixChains
from penstock_simulator.scenario import Scenario
from penstock_simulator.workload import WorkloadSpec, prepare
from penstock_simulator.world import World
from penstock_wire.client import ConnectionPool
from penstock_wire.loop import run
from penstock_workload.arrivals import Spread
from penstock_workload.exchange import SendSettings
from penstock_workload.prompts import PromptMaker
from penstock_workload.record import RequestResult, RequestStatus
from penstock_workload.replay import Replayer
from penstock_workload.selection import OnLong
from penstock_workload.statistics import summarise
from penstock_workload.traces import TraceRequest

MODEL = "live"


class TextChains(PrefixChains):
    """The keys that the live router and workers make of the load client's texts."""

    sub_block_keys = SUB_BLOCK_KEYS

    def __init__(self, prompts: PromptMaker) -> None:
        super().__init__(prompts.seed)
        self._prompts = prompts

    def chain(self, request: TraceRequest) -> tuple[int, ...]:
        """Return the router's keys."""
        return prompt_keys(self._prompts.make(request))

    def block_keys(self, job: Job, block_size: int) -> list[int]:
        """Return the worker's keys."""
        if job.keys is None:
            job.keys = prefix_keys(self._prompts.make(job.request), block_size)
        return job.keys


def write_graph(folder: Path, instances: str, policy: str, profile: str) -> Path:
    """Write a manifest for ``4P4D`` or ``8`` workers and return its path."""
    apart = re.fullmatch(r"(\d+)P(\d+)D", instances)
    if apart is None and not instances.isdigit():
        raise SystemExit(f"--instances {instances}: write 4P4D, or 8 for aggregated workers")
    counts = {"aggregated": instances} if apart is None else {"prefill": apart[1], "decode": apart[2]}
    pools = {role: int(count) for role, count in counts.items()}
    path = folder / "graph.yaml"
    path.write_text(graphs.manifest("live", MODEL, pools, policy=policy, profile=profile))
    return path


def read_requests(arguments: argparse.Namespace) -> tuple[TraceRequest, ...]:
    """Return the slice with its arrivals, the same for both sides."""
    spec = WorkloadSpec(
        arguments.trace,
        spread=Spread(arguments.spread),
        max_input_tokens=arguments.max_input_tokens,
        on_long=OnLong.TRUNCATE,
        limit=arguments.rows,
    )
    return prepare(spec, seed=arguments.seed, qps=arguments.qps).requests


# ---------------------------------------------------------------------- virtual time


def simulate(graph: GraphDeployment, requests: Sequence[TraceRequest], seed: int) -> Side:
    """Run the slice in virtual time."""
    slo_s = graph.spec.router.ttft_slo_seconds
    scenario = Scenario(pools=graph_pools(graph), router=graph_router(graph), slo_s=slo_s, seed=seed)
    world = World(scenario, requests, chains=TextChains(PromptMaker(seed)))
    recording = world.run()
    return Side([_job(job) for job in world.jobs], recording.itl_s["p50"] or 0.0)


def moved(requests: Sequence[TraceRequest], most_s: float, seed: int) -> tuple[TraceRequest, ...]:
    """Return the requests a little later, each by another time, and all of them in another phase of the scrapes."""
    rng = random.Random(seed)
    phase_s = rng.random()
    later = [replace(each, arrival_s=each.arrival_s + phase_s + most_s * rng.random()) for each in requests]
    return tuple(sorted(later, key=lambda each: each.arrival_s))


def _job(job: Job) -> Request:
    arrival_s = job.request.arrival_s
    return Request(
        ttft_s=None if job.first_token_s is None else job.first_token_s - arrival_s,
        e2e_s=None if job.ended_s is None else job.ended_s - arrival_s,
        queued_s=(job.handed_s or arrival_s) - arrival_s,
        cached_tokens=job.cached_tokens,
        prompt_tokens=job.request.input_tokens,
        output_tokens=job.request.output_tokens,
        worker=job.worker,
        decoder=job.decoder,
    )


# ---------------------------------------------------------------------- real time


@contextlib.contextmanager
def processes(graph: GraphDeployment, path: Path, speed: float) -> Iterator[tuple[str, dict[str, int]]]:
    """Run the graph's workers and a router before them; give the router's URL and every process's id."""
    context = RuntimeContext(sys.executable, str(path), discovery="", namespace=MODEL, speed=speed)
    started: dict[str, subprocess.Popen[bytes]] = {}
    urls: list[tuple[str, str]] = []
    try:
        for service in graph.spec.workers.values():
            argv = simulated.worker(graph.spec, service, context).argv
            for number in range(service.replicas):
                port = str(ephemeral_port())
                words = [port if word == "{port}" else word for word in argv]
                started[f"{service.role}-{number}"] = _start(words, path.parent)
                urls.append((service.role, f"http://127.0.0.1:{port}"))
        for _, url in urls:
            sse_load.wait_until_ready(f"{url}/health", within_s=60.0)
        port = str(ephemeral_port())
        words = [
            sys.executable,
            "-m",
            "penstock_cli",
            "router",
            "serve",
            "--graph",
            str(path),
            "--port",
            port,
        ]
        words += ["--speed", f"{speed:g}", "--access-log", str(path.with_name("access.jsonl"))]
        started["router"] = _start([*words, *(f"--worker={role}={url}" for role, url in urls)], path.parent)
        sse_load.wait_until_ready(f"http://127.0.0.1:{port}/ready", within_s=60.0)
        yield f"http://127.0.0.1:{port}", {name: process.pid for name, process in started.items()}
    finally:
        sse_load.stop(*started.values())


def _start(argv: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "processes.log").open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log)


def live(
    graph: GraphDeployment, path: Path, requests: Sequence[TraceRequest], *, seed: int, speed: float
) -> Side:
    """Run the slice in real time."""
    with processes(graph, path, speed) as (url, pids):
        before = {name: sse_load.sample(pid).cpu_s for name, pid in pids.items()}
        psutil.cpu_percent()
        results, summary = run(lambda _: _replay(url, requests, seed, speed))
        busy_cores = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
        seconds = summary["throughput"]["duration_s"] / speed
        cpu = {name: (sse_load.sample(pid).cpu_s - before[name]) / seconds for name, pid in pids.items()}
    lines = path.with_name("access.jsonl").read_bytes().splitlines()
    logged = {line["request_id"]: line for line in map(orjson.loads, lines)}
    rows = [_result(result, logged[result.id]) for result in sorted(results, key=lambda each: each.line)]
    lag = summary["lag"]
    lags = {"sending": lag["send_p99_s"], "client": lag["loop_p99_s"]}
    lags |= {each["name"]: each["p99_s"] for each in lag["servers"]}
    cpu |= {"client": lag["client_cpu_share"], "whole machine": busy_cores}
    return Side(rows, summary["latency"]["itl_s"]["p50"], lags, cpu)


async def _replay(
    url: str, requests: Sequence[TraceRequest], seed: int, speed: float
) -> tuple[list[RequestResult], dict[str, Any]]:
    results: list[RequestResult] = []
    pool = ConnectionPool()
    sending = SendSettings(url, MODEL)
    clock, prompts = SimulatedClock(speed), PromptMaker(seed)
    replayer = Replayer(pool, clock, sending, prompts, run_id="live", on_result=results.append)
    try:
        await replayer.run(requests, stop=asyncio.Event())
    finally:
        await pool.close()
    failed = [result for result in results if result.status is not RequestStatus.OK]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed; the first: {failed[0].error}")
    punctuality, duration_s = replayer.punctuality, replayer.duration_s
    return results, summarise(results, duration_s=duration_s, speed=speed, punctuality=punctuality)


def _result(result: RequestResult, line: dict[str, Any]) -> Request:
    """Return one request; its times count from when it was to be sent, as the simulator's do."""
    late_s = result.sent_s - result.arrival_s
    return Request(
        ttft_s=None if result.ttft_s is None else result.ttft_s + late_s,
        e2e_s=None if result.e2e_s is None else result.e2e_s + late_s,
        queued_s=line["queued_s"],
        cached_tokens=result.cached_tokens or 0,
        prompt_tokens=result.prompt_tokens or 0,
        output_tokens=result.output_tokens or 0,
        worker=line["prefill_worker"] or line["worker"],
        decoder=line["worker"] if line["prefill_worker"] else "",
    )


# ---------------------------------------------------------------------- main


def prove(arguments: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Run both sides under one policy and return everything."""
    requests = read_requests(arguments)
    sides = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            path = write_graph(Path(folder), arguments.instances, policy, arguments.profile)
            graph = load_graph(path)
            sides.append(live(graph, path, requests, seed=arguments.seed, speed=arguments.speed))
    seed, most_s = arguments.seed, arguments.jitter_ms / 1000
    variants = [
        simulate(graph, moved(requests, most_s, number), seed).figures()
        for number in range(arguments.variants)
    ]
    return live_page.compare(policy, simulate(graph, requests, seed), variants, sides)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", default="mooncake", help="a Mooncake or Azure file, or the packaged mooncake"
    )
    parser.add_argument("--rows", "--limit", type=int, default=300, help="requests from its start")
    parser.add_argument(
        "--qps", "--rate", type=float, help="mean arrivals per simulated second; default: the trace's"
    )
    parser.add_argument("--spread", default="poisson", choices=[each.value for each in Spread])
    parser.add_argument("--max-input-tokens", type=int, default=32_768, help="longer prompts are cut")
    parser.add_argument("--instances", default="4P4D", help="4P4D, or 8 for aggregated workers")
    parser.add_argument("--profile", default="a100-llama-8b-bf16-tp1")
    parser.add_argument("--policy", default="prefix-cost,dualmap", help="one or more, with commas")
    parser.add_argument("--speed", type=float, default=1.0, help="simulated seconds per real second")
    parser.add_argument("--runs", type=int, default=1, help="live runs; medians are shown")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")
    parser.add_argument("--jitter-ms", type=float, default=20.0, help="by which arrivals are moved at most")
    parser.add_argument("--variants", type=int, default=20, help="simulations with moved arrivals")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw both TTFT distributions")
    parser.add_argument("--json", action="store_true", help="print JSON, each request included")
    arguments = parser.parse_args()
    found = []
    for policy in arguments.policy.split(","):
        found.append(prove(arguments, policy))
        if not arguments.json:
            live_page.show(found[-1], arguments)
    if arguments.plot is not None:
        live_page.draw(found, arguments.plot)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
