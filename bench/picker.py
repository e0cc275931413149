"""Several router processes before simulated workers, and their picker killed, stopped or cut off in the middle of the load.

    python bench/picker.py [--routers 4] [--workers 8] [--seconds 40] [--rps 5] [--event EVENT] [--json]

Each router gets streams at a steady rate from a client of its own. After a quarter of the time the oldest router, which picks
for all, gets SIGKILL (``kill``) or SIGSTOP for 3 s (``stop``), or nothing that it and the others send each other arrives for 15 s,
while no connection is closed: all others (``partition``) or the next picker alone (``cut``). What is looked for: no stream is
lost but those that a killed router relays itself, no request waits for more than a second but those of a stopped one's
clients, and none runs twice.
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
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).parent))
import servers
import sse_load
from options import read_options

from penstock.core.errors import PenstockError
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.http.loop import run
from penstock.local.ports import unused_port

TOKENS, ITL_MS, PREFIXES = 64, 20.0, 64
LASTS_S = {"kill": 4.0, "stop": 3.0, "partition": 15.0, "cut": 15.0, "none": 4.0}
"""By event: what of the time from its beginning counts as during it."""
IN_TIME_S = 1.0
AFTER_S = 120.0
"""After the event: for this long the share in time is measured."""
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


class Wire:
    """The way from one router to another; while it is cut, it holds whatever comes, an end of the connection, too."""

    def __init__(self, url: str) -> None:
        self.url = ""
        self._target_port = int(url.rsplit(":", 1)[1])
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._tasks = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self, *, is_cut: bool) -> None:
        """Hold what comes, or let it continue."""
        self._whole.clear() if is_cut else self._whole.set()

    async def close(self) -> None:
        """End all."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        for pair in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pass_on(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self._whole.wait()
                writer.write(data)
        except OSError:
            pass
        finally:
            await self._whole.wait()
            writer.transport.abort()


@dataclass(slots=True)
class Running:
    """The processes under test, and the ways between them by the places of the two routers."""

    urls: list[str]
    routers: list[subprocess.Popen[bytes]]
    sources: list[str]
    wires: dict[tuple[int, int], Wire]


@asynccontextmanager
async def routers(count: int, workers: int, folder: Path) -> AsyncIterator[Running]:
    """Run workers, and as many routers before them; each has a statefile with its own ways to the others."""
    graph = folder / "graph.yaml"
    graph.write_text(servers.manifest("bench", sse_load.MODEL, {"aggregated": workers}))
    started, sources = [], []
    ports = [unused_port() for _ in range(count)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    wires = {
        (one, other): Wire(urls[other]) for one in range(count) for other in range(count) if one != other
    }
    try:
        for wire in wires.values():
            await wire.start()
        for _ in range(workers):
            process, url = sse_load.spawn_source(ITL_MS, 20.0)
            started.append(process)
            sources.append(url)
        for number, port in enumerate(ports):
            statefile = folder / f"{number}.json"
            listed = [urls[at] if at == number else wires[number, at].url for at in range(count)]
            servers.list_all(statefile, sources, listed)
            words = ["--discovery", str(statefile)]
            begin = partial(servers.start_router, port, graph, words, folder / f"{port}.log")
            started.append(await asyncio.to_thread(begin))
        yield Running(urls, started[workers:], sources, wires)
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(sse_load.stop, *started)
        for wire in wires.values():
            await wire.close()


async def strike(running: Running, event: str, after_s: float) -> float:
    """Let an event happen to the picker after a while; return when it began."""
    await asyncio.sleep(after_s)
    at_s, picker = time.perf_counter(), running.routers[0]
    cut = [wire for pair, wire in running.wires.items() if 0 in pair and (event == "partition" or 1 in pair)]
    if event == "kill":
        picker.kill()
    elif event == "stop":
        picker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LASTS_S[event])
        picker.send_signal(signal.SIGCONT)
    elif event in {"partition", "cut"}:
        for wire in cut:
            wire.cut(is_cut=True)
        await asyncio.sleep(LASTS_S[event])
        for wire in cut:
            wire.cut(is_cut=False)
    return at_s


def figures(number: int, streams: list[Stream], at_s: float, lasts_s: float) -> dict[str, float]:
    """Return what the clients of one router saw."""
    own = [each for each in streams if each.router == number]
    inflight = [each for each in own if each.sent_s <= at_s < each.ended_s]
    during = [each for each in own if at_s < each.sent_s <= at_s + lasts_s]
    after = [each for each in own if at_s + lasts_s < each.sent_s <= at_s + lasts_s + AFTER_S]
    found: dict[str, float] = {"router": number}
    for name, group in (("inflight", inflight), ("during", during), ("after", after)):
        found |= {name: len(group), f"{name}_lost": sum(bool(each.problem) for each in group)}
    before = [each for each in own if each.ended_s < at_s]
    for name, group in (("before", before), ("during", during), ("after", after)):
        ttft_ms = [1e3 * (each.first_s - each.sent_s) for each in group if each.first_s and not each.problem]
        found |= {
            f"ttft_p50_ms_{name}": sse_load.percentile(ttft_ms, 0.5),
            f"ttft_p99_ms_{name}": sse_load.percentile(ttft_ms, 0.99),
            f"ttft_max_ms_{name}": max(ttft_ms, default=float("nan")),
        }
    in_time = [each.first_s is not None and each.first_s - each.sent_s < IN_TIME_S for each in after]
    return found | {"in_time_after": sum(in_time) / len(in_time) if in_time else float("nan")}


def requests_seen(sources: list[str]) -> int:
    """Return how many requests the workers had."""
    found = 0
    for url in sources:
        with urllib.request.urlopen(f"{url}/seen", timeout=5) as answer:
            found += json.loads(answer.read())["requests"]
    return found


async def measure(arguments: argparse.Namespace, folder: Path, _stop: object) -> list[dict[str, float]]:
    """Return each router's figures, and how many requests ran more than once."""
    async with routers(arguments.routers, arguments.workers, folder) as running:
        await asyncio.sleep(2.0)
        streams, at_s = await asyncio.gather(
            load(running.urls, arguments.seconds, arguments.rps),
            strike(running, arguments.event, arguments.seconds / 4),
        )
        lost = sum(bool(each.problem) for each in streams)
        twice = await asyncio.to_thread(requests_seen, running.sources) - (len(streams) - lost)
    lasts_s = LASTS_S[arguments.event]
    rows = [figures(number, streams, at_s, lasts_s) for number in range(arguments.routers)]
    # What was lost may have run once, too.
    return [row | {"ran_twice": max(0, twice - lost)} for row in rows]


def show(rows: list[dict[str, float]]) -> None:
    """Print a line for each router."""
    for row in rows:
        lost = ", ".join(
            f"{name} {row[f'{name}_lost']} of {row[name]}" for name in ("inflight", "during", "after")
        )
        print(
            f"router {row['router']}: lost {lost}; {100 * row['in_time_after']:.1f}% in time after; TTFT p50, p99, longest in ms",
            end="",
        )
        for name in ("before", "during", "after"):
            p50, p99, most = (row[f"ttft_{each}_ms_{name}"] for each in ("p50", "p99", "max"))
            print(f"; {name} {p50:.0f}, {p99:.0f}, {most:,.0f}", end="")
        print()
    print(f"{rows[0]['ran_twice']} requests ran twice")


def main() -> None:
    """Measure and print; exit with 1 where a router lost streams that the struck one did not relay."""
    choices = {"event": list(LASTS_S)}
    arguments = read_options(
        __doc__, choices=choices, routers=4, workers=8, seconds=40.0, rps=5.0, event="kill"
    )
    rows: list[dict[str, float]] = []

    async def work(stop: asyncio.Event) -> None:
        with tempfile.TemporaryDirectory() as folder:
            rows.extend(await measure(arguments, Path(folder), stop))

    run(partial(work))
    print(json.dumps(rows)) if arguments.json else show(rows)
    if any(row["inflight_lost"] or row["during_lost"] or row["after_lost"] for row in rows[1:]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
