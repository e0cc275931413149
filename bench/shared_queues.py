"""Router processes that come to share the workers' queues out under load, and one of them killed.

    python bench/shared_queues.py [--routers 2] [--seconds 60] [--concurrency 12] [--no-kill] [--json]

Each router gets a closed loop of short requests with many prefixes from a client of its own. Below 0.7 cores together the oldest keeps all
queues; above, each keeps some, and all pass requests on. After two thirds of the time one gets SIGKILL. What is looked for:
that clients of the others lose nothing, neither then nor when the queues are shared out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).parent))
import graphs
import router_process
import sse_load

from penstock.core.errors import PenstockError
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.http.loop import run
from penstock.local.ports import ephemeral_port

WORKERS = 4
PREFIXES = 64
_TIMEOUTS = Timeouts.each(30.0)


def load(url: str, seconds: float, concurrency: int, seed: int) -> dict[str, int]:
    """Send requests one after the other in as many loops, and return how many ended how."""
    rng, ended = random.Random(seed), Counter[str]()
    bodies = [
        orjson.dumps({"model": sse_load.MODEL, "prompt": f"{number:04d} prefix " * 60, "max_tokens": 8})
        for number in range(PREFIXES)
    ]

    async def loop(pool: ConnectionPool, end_s: float) -> None:
        headers = ((b"content-type", b"application/json"),)
        while time.perf_counter() < end_s:
            body = rng.choice(bodies)
            try:
                answer = await pool.request(
                    "POST", f"{url}/v1/completions", body=body, headers=headers, timeouts=_TIMEOUTS
                )
                ended["ok" if answer.status == 200 else f"status {answer.status}"] += 1
            except PenstockError as exc:
                ended[type(exc).__name__] += 1
                await asyncio.sleep(0.1)

    async def loops(_: object) -> None:
        pool = ConnectionPool()
        end_s = time.perf_counter() + seconds
        await asyncio.gather(*(loop(pool, end_s) for _ in range(concurrency)))
        await pool.close()

    run(loops)
    return dict(ended)


@contextmanager
def routers(count: int, folder: Path) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Run sources, and as many routers before them; yield the routers' URLs and processes."""
    graph, statefile = folder / "graph.yaml", folder / "state.json"
    graph.write_text(graphs.manifest("bench", sse_load.MODEL, {"aggregated": WORKERS}))
    started, sources = [], []
    try:
        for _ in range(WORKERS):
            process, url = sse_load.spawn_source(0.0)
            started.append(process)
            sources.append(url)
        ports = [ephemeral_port() for _ in range(count)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        router_process.list_all(statefile, sources, urls)
        words = ["--discovery", str(statefile)]
        for port in ports:
            process = router_process.start(port, graph, words, folder / f"{port}.log")
            started.append(process)
        yield urls, started[WORKERS:]
    finally:
        sse_load.stop(*started)


def figures(url: str, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the requests that a router has passed on, and its CPU seconds since its start."""
    return {"passed_on": router_process.passed_on(url), "cpu_s": sse_load.sample(process.pid).cpu_s}


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Return what each router did, up to its death or the end, and what its clients saw."""
    with routers(arguments.routers, folder) as (urls, processes):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.routers, mp_context=context) as clients:
            loads = [
                clients.submit(load, url, arguments.seconds, arguments.concurrency, seed)
                for seed, url in enumerate(urls)
            ]
            outcomes: list[dict[str, object]] = []
            if not arguments.no_kill:
                time.sleep(arguments.seconds * 2 / 3)
                outcomes.append({**figures(urls[0], processes[0]), "killed": True})
                processes[0].kill()
            ended = [each.result() for each in loads]
        living = list(zip(urls, processes, strict=True))[len(outcomes) :]
        outcomes += [{**figures(url, process), "killed": False} for url, process in living]
        return [{**each, "clients": seen} for each, seen in zip(outcomes, ended, strict=True)]


def show(outcomes: Sequence[dict[str, object]]) -> None:
    """Print a line for each router."""
    for number, each in enumerate(outcomes):
        end = " when killed" if each["killed"] else ""
        print(
            f"router {number}: {each['passed_on']:,.0f} passed on, CPU {each['cpu_s']:.1f} s{end}; {each['clients']}"
        )


def main() -> None:
    """Measure and print; exit with 1 where clients of a router that lives lost a request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the load")
    parser.add_argument("--concurrency", type=int, default=12, help="requests in flight at each router")
    parser.add_argument("--no-kill", action="store_true", help="let all live")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = measure(arguments, Path(folder))
    if arguments.json:
        print(json.dumps(outcomes))
    else:
        show(outcomes)
    if any(set(each["clients"]) != {"ok"} for each in outcomes if not each["killed"]):  # type: ignore[call-overload]
        raise SystemExit(1)


if __name__ == "__main__":
    main()
