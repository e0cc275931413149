"""Send requests that are reset at once through a router, and count what they leave behind.

    python bench/early_disconnects.py [--count 20000] [--concurrency 100] [--within-ms 2] [--json]

Router and worker run in this process; the clients in another one, which resets each connection at a random time.
Expected: no connection beyond the idle ones, no request in flight, the next request served, a prompt shutdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import struct
import sys
import time
from contextlib import suppress

from options import read_options

from penstock.api import Role, RouterConfig
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.http.loop import run
from penstock.core.http.server import HttpServer, Request, Responder
from penstock.router.core.worker import WorkerSpec
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

_BODY = b'{"model":"m","prompt":"hello","max_tokens":1}'
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)
_ANSWER = b'{"choices":[{"index":0,"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
_WORK_S = 0.01
_SETTLE_S = 30.0


async def _work(request: Request, responder: Responder) -> None:
    if request.method == "POST":
        await asyncio.sleep(_WORK_S)
    responder.send(200, _ANSWER)


async def _leave_early(port: int, within_s: float, rng: random.Random) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as sock, suppress(OSError):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, _HEAD % len(_BODY) + _BODY)
        await asyncio.sleep(rng.uniform(0, within_s))


async def _clients(port: int, count: int, concurrency: int, within_s: float) -> None:
    """The other process: this many requests, each reset at a random time."""
    rng, left = random.Random(1), iter(range(count))

    async def one_by_one() -> None:
        for _ in left:
            await _leave_early(port, within_s, rng)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_by_one())


async def _measure(arguments: argparse.Namespace) -> dict[str, float]:
    worker = HttpServer(_work)
    await worker.start("127.0.0.1", 0)
    spec = WorkerSpec("w", Role.AGGREGATED, f"http://127.0.0.1:{worker.port}")
    router = RouterServer(
        RouterSettings(
            model="m", disaggregated=False, config=RouterConfig(), workers=(spec,), shutdown_grace_s=5.0
        )
    )
    await router.start()
    words = ["--clients-of", str(router.port), "--count", str(arguments.count)]
    words += ["--concurrency", str(arguments.concurrency), "--within-ms", str(arguments.within_ms)]
    began_s = time.monotonic()
    clients = await asyncio.create_subprocess_exec(sys.executable, __file__, *words)
    if await clients.wait():
        raise SystemExit("the clients failed")
    took_s = time.monotonic() - began_s
    upstream = router.context.pool
    deadline_s = time.monotonic() + _SETTLE_S
    while upstream.connections > upstream.idle_connections and time.monotonic() < deadline_s:  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0.05)
    leaked = upstream.connections - upstream.idle_connections
    in_flight = sum(each.inflight_requests for each in router.core.pool)
    pool = ConnectionPool()
    answer = await pool.request(
        "POST",
        f"http://127.0.0.1:{router.port}/v1/completions",
        body=_BODY,
        timeouts=Timeouts(total_s=10),
        headers=[(b"content-type", b"application/json")],
    )
    await pool.close()
    began_s = time.monotonic()
    await asyncio.wait_for(router.close(), 60)
    closed_s = time.monotonic() - began_s
    await worker.close(grace_s=0)
    return {
        "requests": arguments.count,
        "seconds": round(took_s, 1),
        "leaked_connections": leaked,
        "requests_in_flight": in_flight,
        "next_status": answer.status,
        "close_seconds": round(closed_s, 2),
    }


def main() -> int:
    """Run the measurement, or, as the other process, the clients."""
    arguments = read_options(__doc__, count=20_000, concurrency=100, within_ms=2.0, clients_of=0)
    if arguments.clients_of:  # the port of the router: this is the other process
        within_s = arguments.within_ms / 1000
        asyncio.run(_clients(arguments.clients_of, arguments.count, arguments.concurrency, within_s))
        return 0
    found = run(lambda _stop: _measure(arguments))
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:20} {value}")
    is_clean = (
        not found["leaked_connections"] and not found["requests_in_flight"] and found["next_status"] == 200
    )
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
