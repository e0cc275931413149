"""Token events per CPU-second of the load client, against a fake source in a process of its own.

The source streams events of vLLM's size, one token at a time, to many streams at once. The same bytes
are read once by the replayer and once by a bare uvloop protocol that only counts event ends: the ratio
of the two says what parsing and measuring cost, whatever the machine does meanwhile.

    python bench/load_client.py [--streams 64] [--tokens 400] [--itl-ms 5] [--json]
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import cast

import sse_load
from options import read_options

from penstock.core.clock import SimulatedClock
from penstock.core.http.client import ConnectionPool
from penstock.core.http.loop import run
from penstock.workload.exchange import Destination
from penstock.workload.prompts import PromptMaker
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.replay import Replayer
from penstock.workload.traces import TraceRequest


class BareReader(asyncio.Protocol):
    """Counts event ends and nothing else."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        cast("asyncio.WriteTransport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        self.events += data.count(b"\n\n")
        if b"[DONE]" in data:
            self.done.set_result(None)


async def bare(url: str, streams: int, tokens: int) -> tuple[int, float]:
    """Return events and CPU seconds of the bare reader."""
    body = b'{"max_tokens":%d,"stream":true}' % tokens
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    loop, port = asyncio.get_running_loop(), int(url.rsplit(":", 1)[1])
    cpu_s = time.process_time()
    readers = [
        (await loop.create_connection(lambda: BareReader(request), "127.0.0.1", port))[1]
        for _ in range(streams)
    ]
    await asyncio.gather(*(reader.done for reader in readers))
    return sum(reader.events - 1 for reader in readers), time.process_time() - cpu_s


async def replayed(url: str, streams: int, tokens: int) -> tuple[int, float]:
    """Return token events and CPU seconds of the replayer."""
    results: list[RequestResult] = []
    pool = ConnectionPool()
    replayer = Replayer(
        pool,
        SimulatedClock(1.0),
        Destination(url, sse_load.MODEL),
        PromptMaker(),
        run_id="bench",
        on_result=results.append,
    )
    requests = [TraceRequest(0.0, 16, tokens, (0,), line) for line in range(1, streams + 1)]
    cpu_s = time.process_time()
    await replayer.run(requests, stop=asyncio.Event())
    cpu_s = time.process_time() - cpu_s
    await pool.close()
    if any(result.status is not RequestStatus.OK for result in results):
        raise SystemExit(f"a request failed: {next(r for r in results if r.error)}")
    return sum(len(result.itl_s) + 1 for result in results), cpu_s


def main() -> None:
    """Run both readers and print events per CPU-second."""
    arguments = read_options(__doc__, streams=64, tokens=400, itl_ms=5.0)
    source, url = sse_load.spawn_source(arguments.itl_ms)
    try:
        bare_events, bare_cpu_s = run(lambda _: bare(url, arguments.streams, arguments.tokens))
        events, cpu_s = run(lambda _: replayed(url, arguments.streams, arguments.tokens))
    finally:
        sse_load.stop(source)
    figures = {
        "token_events": events,
        "events_per_cpu_s": round(events / cpu_s),
        "bare_events_per_cpu_s": round(bare_events / bare_cpu_s),
        "ratio_to_bare": round((events / cpu_s) / (bare_events / bare_cpu_s), 3),
        "target_events_per_cpu_s": 10_000,
    }
    print(
        json.dumps(figures)
        if arguments.json
        else "\n".join(f"{name}: {value}" for name, value in figures.items())
    )


if __name__ == "__main__":
    main()
