"""Measure a minimal HTTP relay built on penstock.core.http against one on aiohttp, a bare byte relay and nginx, in one run.

    python bench/relay.py [--seconds 6] [--json]

Each relay stands between the same SSE source and the same client, one after the other. Figures are per
CPU-second of the relay process, so that they hold on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))
import sse_load
from aiohttp import web

from penstock.core.http.client import ConnectionPool
from penstock.core.http.loop import run
from penstock.core.http.server import HttpServer, Request, Responder
from penstock.core.http.streaming import relay
from penstock.local.ports import ephemeral_port

_ITL_MS = 5.0
_STREAMS = 64
_NGINX_CONF = """
daemon off; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_buffer_size 1m;
  client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/f;
  uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  upstream source {{ server {source}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://source; proxy_http_version 1.1; proxy_set_header Connection "";
                 proxy_buffering off; }}
  }}
}}
"""


# ---------------------------------------------------------------------- relays under test


async def _serve_wire_relay(stop: asyncio.Event, source: str) -> None:
    pool = ConnectionPool()

    async def handle(request: Request, responder: Responder) -> None:
        url = source + request.target.decode()
        upstream = await pool.stream(
            request.method, url, body=request.body, headers=((b"content-type", b"application/json"),)
        )
        if upstream.headers.get(b"content-type") != b"text/event-stream":
            responder.send(upstream.status, await upstream.read(limit_bytes=1 << 20))
            return
        responder.start(upstream.status)
        await relay(upstream, responder, observe=lambda data, _at: data)
        responder.end()

    server = HttpServer(handle)
    await server.start("127.0.0.1", 0)
    print(json.dumps({"port": server.port}), flush=True)
    await stop.wait()
    await server.close(grace_s=0.5)
    await pool.close()


async def _serve_aiohttp_relay(stop: asyncio.Event, source: str) -> None:
    """Do what the relay on penstock.core.http does, with aiohttp's server and client, on the same event loop."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"content-type": "application/json"}
        async with session.request(
            request.method, source + request.path_qs, data=body, headers=headers
        ) as upstream:
            if upstream.content_type != "text/event-stream":
                return web.Response(status=upstream.status, body=await upstream.read())
            response = web.StreamResponse(
                status=upstream.status, headers={"content-type": "text/event-stream"}
            )
            await response.prepare(request)
            async for data in upstream.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await stop.wait()
    await runner.cleanup()
    await session.close()


class _Half(asyncio.Protocol):
    """One side of a byte relay."""

    def __init__(self, source: tuple[str, int] | None) -> None:
        self._source = source
        self._early: list[bytes] = []
        self.transport: asyncio.Transport | None = None
        self.other: _Half | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """On the client's side, connect onward."""
        self.transport = cast("asyncio.Transport", transport)
        if self._source is not None:
            self._task = asyncio.get_running_loop().create_task(self._connect(*self._source))

    async def _connect(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        _, half = await loop.create_connection(lambda: _Half(None), host, port)
        half.other, self.other = self, half
        for data in self._early:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        other = self.other
        if other is None or other.transport is None:
            self._early.append(data)
        else:
            other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Close the other side."""
        self.transport = None
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def _serve_byte_relay(stop: asyncio.Event, source: str) -> None:
    host, port = source.removeprefix("http://").split(":")
    server = await asyncio.get_running_loop().create_server(lambda: _Half((host, int(port))), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await stop.wait()
    server.close()


_RELAYS = {"wire": _serve_wire_relay, "aiohttp": _serve_aiohttp_relay, "bytes": _serve_byte_relay}


# ---------------------------------------------------------------------- measuring


@contextmanager
def python_relay(kind: str, source: str) -> Iterator[tuple[str, int]]:
    """Run a relay of this file, by its name in ``_RELAYS``; gives its URL and PID."""
    process, port = sse_load.spawn(__file__, "--serve", kind, "--source", source)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        sse_load.stop(process)


@contextmanager
def nginx_relay(path: str, source: str) -> Iterator[tuple[str, int]]:
    """Run nginx, one worker process, unbuffered; gives its URL and the master's PID."""
    with tempfile.TemporaryDirectory() as folder:
        port = ephemeral_port()
        conf = Path(folder) / "nginx.conf"
        address = source.removeprefix("http://")
        conf.write_text(_NGINX_CONF.format(dir=folder, source=address, port=port))
        process = subprocess.Popen([path, "-c", str(conf), "-p", folder])
        try:
            sse_load.wait_for_port(port)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            sse_load.stop(process)


async def _measure(url: str, pid: int, seconds: float) -> dict[str, float]:
    await sse_load.shorts(url, pid, requests=200, concurrency=8)
    tokens = int(seconds * 1000 / _ITL_MS)
    many = await sse_load.streams(url, pid, count=_STREAMS, tokens=tokens)
    short = await sse_load.shorts(url, pid, requests=int(700 * seconds), concurrency=16)
    if many.failed or short.failed:
        raise SystemExit(f"load failed: streams {many.failed}, short requests {short.failed}")
    return {
        # Events that reached the client in one read count once, which never flatters.
        "events_per_cpu_s": many.reads / many.cpu_s,
        "us_per_event": many.cpu_s / many.reads * 1e6,
        "events_per_read": many.events / many.reads,
        "events_per_s": many.events / many.wall_s,
        "short_requests_per_cpu_s": short.done / short.cpu_s,
        "rss_mb": sse_load.sample(pid).rss_mb,
    }


def _measure_all(seconds: float) -> dict[str, dict[str, float]]:
    source_process, source = sse_load.spawn_source(_ITL_MS)
    figures: dict[str, dict[str, float]] = {}
    try:
        for name, kind in (
            ("penstock.core.http", "wire"),
            ("aiohttp", "aiohttp"),
            ("bare uvloop bytes", "bytes"),
        ):
            with python_relay(kind, source) as (url, pid):
                figures[name] = run(lambda _, url=url, pid=pid: _measure(url, pid, seconds))  # type: ignore[misc]
        nginx = sse_load.which_nginx()
        if nginx is None:
            print("nginx: skipped, not on PATH", file=sys.stderr)
        else:
            with nginx_relay(nginx, source) as (url, pid):
                figures["nginx"] = run(lambda _: _measure(url, pid, seconds))
    finally:
        sse_load.stop(source_process)
    return figures


def _print(figures: dict[str, dict[str, float]]) -> None:
    base = figures["bare uvloop bytes"]["events_per_cpu_s"]
    print(
        f"{'relay':<20}{'events/CPU-s':>14}{'µs/event':>10}{'ratio':>8}{'events/read':>13}{'short req/CPU-s':>17}{'RSS MB':>8}"
    )
    for name, f in figures.items():
        print(
            f"{name:<20}{f['events_per_cpu_s']:>14,.0f}{f['us_per_event']:>10.1f}{f['events_per_cpu_s'] / base:>8.2f}"
            f"{f['events_per_read']:>13.2f}{f['short_requests_per_cpu_s']:>17,.0f}{f['rss_mb']:>8.0f}"
        )


def main() -> None:
    """Measure, or serve one of the relays."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each stream load in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--serve", choices=tuple(_RELAYS), help="be a relay (used by the benchmark itself)")
    parser.add_argument("--source", default="", help="URL behind the relay")
    args = parser.parse_args()
    if args.serve:
        run(lambda stop: _RELAYS[args.serve](stop, args.source))
        return
    figures = _measure_all(args.seconds)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        _print(figures)


if __name__ == "__main__":
    main()
