"""Holds the simulator against real time: one trace slice through real processes and through virtual time.

    python bench/live_proof.py [--policy prefix-cost,dualmap] [--instances 4P4D] [--rows 300] [--rate 2.5] [--plot PNG]

Without --rate arrivals come at the trace's own rate; --instances 8 are aggregated workers.

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
import live_page
import servers
import sse_load
from live_page import Request, Side
from options import read_options

from penstock.api import GraphDeployment, Role
from penstock.api.manifests import load_graph
from penstock.core.clock import SimulatedClock
from penstock.core.http.client import ConnectionPool
from penstock.core.http.loop import run
from penstock.core.local_state import EntryState
from penstock.engine.core.kv_blocks import prefix_keys
from penstock.local.ports import unused_port
from penstock.router.policy.prefixes import SUB_BLOCK_KEYS, prompt_keys
from penstock.runtimes.protocol import RuntimeContext
from penstock.runtimes.simulated import Simulated
from penstock.simulator.jobs import Job, PrefixChains
from penstock.simulator.scenario import Scenario, SimulatedRouters, graph_pools
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock.workload.arrivals import OnLong, Spread
from penstock.workload.exchange import Destination
from penstock.workload.prompts import PromptMaker
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.replay import Replayer
from penstock.workload.statistics import summarise
from penstock.workload.traces import TraceRequest

MODEL = "live"
_START_S = 240.0
"""Real seconds for a dozen processes to start on a machine that does much else."""


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
    path.write_text(servers.manifest("live", MODEL, pools, policy=policy, profile=profile))
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
    return prepare(spec, seed=arguments.seed, qps=arguments.rate or None).requests


# ---------------------------------------------------------------------- virtual time


def simulate(
    graph: GraphDeployment, requests: Sequence[TraceRequest], seed: int, *, routers: int = 1
) -> Side:
    """Run the slice in virtual time; several routers get requests in turn, and one picks for all."""
    config = graph.spec.router
    scenario = Scenario(
        pools=graph_pools(graph),
        router=config,
        routers=SimulatedRouters(routers),
        slo=graph.spec.slo,
        seed=seed,
    )
    world = Simulation(scenario, requests, chains=TextChains(PromptMaker(seed)))
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
        queued_s=(job.dispatched_s or arrival_s) - arrival_s,
        cached_tokens=job.cached_tokens,
        prompt_tokens=job.request.input_tokens,
        output_tokens=job.request.output_tokens,
        worker=job.worker,
        decoder=job.decoder,
    )


# ---------------------------------------------------------------------- real time


@contextlib.contextmanager
def processes(
    graph: GraphDeployment, path: Path, speed: float, *, routers: int = 1
) -> Iterator[tuple[list[str], dict[str, int]]]:
    """Run the graph's workers and routers before them; give the routers' URLs and every process's id."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    entries: dict[str, dict[str, Any]] = {}
    try:
        for name, role, argv in _worker_commands(graph, path, speed):
            url = f"http://127.0.0.1:{(port := str(unused_port()))}"
            started[name] = _start([port if word == "{port}" else word for word in argv], path.parent)
            entries[name] = {"role": role, "url": url, "state": EntryState.READY}
        for entry in entries.values():
            sse_load.wait_until_ready(f"{entry['url']}/health", within_s=_START_S)
        ports = [unused_port() for _ in range(routers)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        entries |= {
            f"router-{at}": {"role": Role.ROUTER, "url": url, "state": EntryState.READY}
            for at, url in enumerate(urls)
        }
        # Routers read workers and each other in a statefile, as under the local backend; the first is the oldest, and picks.
        statefile = path.with_name("state.json")
        statefile.write_bytes(orjson.dumps(entries))
        for at, port in enumerate(ports):
            words = ["--speed", f"{speed:g}", "--discovery", str(statefile)]
            words += ["--access-log", str(path.with_name(f"access-{at}.jsonl"))]
            log = path.with_name(f"router-{at}.log")
            started[f"router-{at}"] = servers.start_router(port, path, words, log)
        yield urls, {name: process.pid for name, process in started.items()}
    finally:
        sse_load.stop(*started.values())


def _worker_commands(
    graph: GraphDeployment, path: Path, speed: float
) -> Iterator[tuple[str, Role, Sequence[str]]]:
    context = RuntimeContext(sys.executable, str(path), discovery="", namespace=MODEL, speed=speed)
    for service in graph.spec.workers.values():
        argv = Simulated().worker(graph.spec, service, context).argv
        for number in range(service.replicas):
            yield f"{service.role}-{number}", service.role, argv


def _start(argv: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "processes.log").open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log)


def live(
    graph: GraphDeployment,
    path: Path,
    requests: Sequence[TraceRequest],
    *,
    seed: int,
    speed: float,
    routers: int = 1,
) -> Side:
    """Run the slice in real time; several routers get requests in turn."""
    with processes(graph, path, speed, routers=routers) as (urls, pids):
        before = {name: sse_load.sample(pid).cpu_s for name, pid in pids.items()}
        psutil.cpu_percent()
        results, summaries = run(lambda _: _replay(urls, requests, seed, speed))
        busy_cores = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
        seconds = max(each["throughput"]["duration_s"] for each in summaries) / speed
        cpu = {name: (sse_load.sample(pid).cpu_s - before[name]) / seconds for name, pid in pids.items()}
    lines = [line for log in path.parent.glob("access-*.jsonl") for line in log.read_bytes().splitlines()]
    logged = {line["request_id"]: line for line in map(orjson.loads, lines)}
    rows = [_result(result, logged[result.id]) for result in sorted(results, key=lambda each: each.line)]
    cpu |= {
        "client": max(each["lag"]["client_cpu_share"] for each in summaries),
        "whole machine": busy_cores,
    }
    itl_p50_s = max(each["latency"]["itl_s"]["p50"] for each in summaries)
    return Side(rows, itl_p50_s, _latest([each["lag"] for each in summaries]), cpu)


def _latest(lags: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the worst lateness that any of several replays saw, by process."""
    found: dict[str, float] = {}
    for lag in lags:
        seen = {"sending": lag["send_p99_s"], "client": lag["loop_p99_s"]}
        seen |= {each["name"]: each["p99_s"] for each in lag["servers"]}
        found |= {name: max(lag_s, found.get(name, 0.0)) for name, lag_s in seen.items()}
    return found


async def _replay(
    urls: Sequence[str], requests: Sequence[TraceRequest], seed: int, speed: float
) -> tuple[list[RequestResult], list[dict[str, Any]]]:
    """Return the requests' results, and a summary of what each router was sent."""
    clock, prompts = SimulatedClock(speed), PromptMaker(seed)
    pool = ConnectionPool()
    try:
        async with asyncio.TaskGroup() as group:
            replays = [
                group.create_task(_replay_one(pool, clock, url, prompts, requests[at :: len(urls)]))
                for at, url in enumerate(urls)
            ]
    finally:
        await pool.close()
    found = [replay.result() for replay in replays]
    results = [result for own, _ in found for result in own]
    failed = [result for result in results if result.status is not RequestStatus.OK]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed; the first: {failed[0].error}")
    summaries = [
        summarise(own, duration_s=replayer.duration_s, speed=speed, schedule_lag=replayer.schedule_lag)
        for own, replayer in found
    ]
    return results, summaries


async def _replay_one(
    pool: ConnectionPool,
    clock: SimulatedClock,
    url: str,
    prompts: PromptMaker,
    requests: Sequence[TraceRequest],
) -> tuple[list[RequestResult], Replayer]:
    results: list[RequestResult] = []
    replayer = Replayer(
        pool, clock, Destination(url, MODEL), prompts, run_id="live", on_result=results.append
    )
    await replayer.run(requests, stop=asyncio.Event())
    return results, replayer


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
    arguments = read_options(
        __doc__,
        choices={"spread": [each.value for each in Spread]},
        trace="mooncake",
        rows=300,
        rate=0.0,
        spread="poisson",
        max_input_tokens=32_768,
        instances="4P4D",
        profile=servers.PROFILE,
        policy="prefix-cost,dualmap",
        speed=1.0,
        runs=1,
        seed=0,
        jitter_ms=20.0,
        variants=20,
        plot=None,
    )
    found = []
    for policy in arguments.policy.split(","):
        found.append(prove(arguments, policy))
        if not arguments.json:
            live_page.show(found[-1], arguments)
    if arguments.plot is not None:
        live_page.draw(found, Path(arguments.plot))
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
