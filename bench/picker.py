"""Several router processes before simulated workers, and their picker killed or stopped in the middle of the load.

    python bench/picker.py [--routers 4] [--workers 8] [--seconds 12] [--rps 5] [--event kill|stop|none] [--json]

Each router gets streams at a steady rate from a client of its own. After half of the time the oldest router, which picks
for all, gets SIGKILL, or SIGSTOP and 3 s later SIGCONT. What is looked for: no stream is lost but those that this router
relays itself, and no request waits for more than a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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

TOKENS, ITL_MS, PREFIXES = 64, 20.0, 64
STOPPED_S = 3.0
AFTER_S = 4.0
"""Of what came after the event, the part that is shown as such."""
_TIMEOUTS = Timeouts.each(30.0)
_JSON = ((b"content-type", b"application/json"),)


@dataclass(slots=True)
class Stream:
    """One request: when it was sent, its first byte, its end, and how it ended; seconds of `time.perf_counter`."""

    router: int
    sent_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    problem: str = ""


async def one(pool: ConnectionPool, url: str, body: bytes, stream: Stream) -> None:
    """Send one request and read its answer."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tail = b""

    def on_data(data: bytes) -> None:
        nonlocal tail
        if stream.first_s is None:
            stream.first_s = time.perf_counter()
        tail = (tail + data)[-64:]

    try:
        response = await pool.stream(
            "POST", f"{url}/v1/completions", body=body, headers=_JSON, timeouts=_TIMEOUTS
        )
        response.set_sink(on_data, lambda: done.set_result(None), done.set_exception)
        await done
        if response.status != 200:
            stream.problem = f"status {response.status}"
        elif b"[DONE]" not in tail:
            stream.problem = "broken off"
    except PenstockError as exc:
        stream.problem = type(exc).__name__
    stream.ended_s = time.perf_counter()


async def load(urls: list[str], seconds: float, rps: float) -> list[Stream]:
    """Send streams at a steady rate to every router; return all of them."""
    rng, found = random.Random(0), list[Stream]()
    pools = [ConnectionPool() for _ in urls]
    bodies = [
        orjson.dumps(
            {
                "model": sse_load.MODEL,
                "prompt": f"{number:04d} prefix " * 200,
                "max_tokens": TOKENS,
                "stream": True,
            }
        )
        for number in range(PREFIXES)
    ]
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    async with asyncio.TaskGroup() as group:
        for _ in range(int(rps * seconds)):
            for number, url in enumerate(urls):
                stream = Stream(number, time.perf_counter())
                found.append(stream)
                group.create_task(one(pools[number], url, rng.choice(bodies), stream))
            due_s += 1 / rps
            await asyncio.sleep(max(0.0, due_s - loop.time()))
    for pool in pools:
        await pool.close()
    return found


@contextmanager
def routers(
    count: int, workers: int, folder: Path
) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Run workers, and as many routers before them; yield the routers' URLs and processes."""
    graph, statefile = folder / "graph.yaml", folder / "state.json"
    graph.write_text(graphs.manifest("bench", sse_load.MODEL, {"aggregated": workers}))
    started, sources = [], []
    try:
        for _ in range(workers):
            process, url = sse_load.spawn_source(ITL_MS, 20.0)
            started.append(process)
            sources.append(url)
        ports = [ephemeral_port() for _ in range(count)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        router_process.list_all(statefile, sources, urls)
        for port in ports:
            words = ["--discovery", str(statefile)]
            started.append(router_process.start(port, graph, words, folder / f"{port}.log"))
        yield urls, started[workers:]
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
        sse_load.stop(*started)


async def strike(process: subprocess.Popen[bytes], event: str, after_s: float) -> float:
    """Kill or stop a process after a while; return when."""
    await asyncio.sleep(after_s)
    at_s = time.perf_counter()
    if event == "kill":
        process.kill()
    elif event == "stop":
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        process.send_signal(signal.SIGCONT)
    return at_s


def figures(number: int, streams: list[Stream], at_s: float) -> dict[str, float]:
    """Return what the clients of one router saw."""
    own = [each for each in streams if each.router == number]
    inflight = [each for each in own if each.sent_s <= at_s < each.ended_s]
    later = [each for each in own if each.sent_s > at_s]

    def ttft_s(group: list[Stream]) -> list[float]:
        return [each.first_s - each.sent_s for each in group if each.first_s is not None and not each.problem]

    before, after = (
        ttft_s([e for e in own if e.ended_s < at_s]),
        ttft_s([e for e in later if e.sent_s < at_s + AFTER_S]),
    )
    return {
        "router": number,
        "inflight": len(inflight),
        "inflight_lost": sum(bool(each.problem) for each in inflight),
        "later": len(later),
        "later_lost": sum(bool(each.problem) for each in later),
        "ttft_p50_ms_before": 1e3 * sse_load.percentile(before, 0.5),
        "ttft_p50_ms_after": 1e3 * sse_load.percentile(after, 0.5),
        "ttft_max_ms_after": 1e3 * max(ttft_s([*inflight, *later]), default=float("nan")),
    }


async def measure(arguments: argparse.Namespace, folder: Path, _stop: object) -> list[dict[str, float]]:
    """Return each router's figures."""
    with routers(arguments.routers, arguments.workers, folder) as (urls, processes):
        await asyncio.sleep(2.0)
        streams, at_s = await asyncio.gather(
            load(urls, arguments.seconds, arguments.rps),
            strike(processes[0], arguments.event, arguments.seconds / 2),
        )
    return [figures(number, streams, at_s) for number in range(arguments.routers)]


def show(rows: list[dict[str, float]]) -> None:
    """Print a line for each router."""
    for row in rows:
        print(
            f"router {row['router']}: {row['inflight_lost']} of {row['inflight']} in flight lost,"
            f" {row['later_lost']} of {row['later']} later ones; TTFT p50 {row['ttft_p50_ms_before']:.1f} →"
            f" {row['ttft_p50_ms_after']:.1f} ms, at most {row['ttft_max_ms_after']:,.0f} ms"
        )


def main() -> None:
    """Measure and print; exit with 1 where a router lost streams that the struck one did not relay."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=12.0, help="length of the load")
    parser.add_argument("--rps", type=float, default=5.0, help="requests per second at each router")
    parser.add_argument("--event", choices=["kill", "stop", "none"], default="kill")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows: list[dict[str, float]] = []

    async def work(stop: asyncio.Event) -> None:
        with tempfile.TemporaryDirectory() as folder:
            rows.extend(await measure(arguments, Path(folder), stop))

    run(partial(work))
    print(json.dumps(rows)) if arguments.json else show(rows)
    if any(row["inflight_lost"] or row["later_lost"] for row in rows[1:]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
