"""The planner as a process against metrics that mean nothing, and on a disk that is full."""

import dataclasses
import json
import os
import resource
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from patience import LIMIT_S

from penstock.local.liveness import identify
from penstock.local.statefile import ArbiterInfo, EntryState, ProcessEntry, StateFile
from penstock.local.store import StateStore

REPLICAS = 3


def page(kv, queue, age):
    """Return the /metrics of a router and of a worker in one; None leaves a series out."""
    lines = []
    for number in range(REPLICAS):
        worker = f'worker="world_decode{f"_{number}" if number else ""}",role="decode"'
        if kv is not None:
            lines.append(f"penstock_router_worker_kv_usage_fraction{{{worker}}} {kv}")
        lines.append(f"penstock_router_worker_metrics_age_seconds{{{worker}}} {age}")
    if queue is not None:
        lines.append(f'penstock_router_prefill_queue_requests{{model_name="m"}} {queue}')
        lines.append(f'vllm:num_requests_waiting{{model_name="m"}} {queue}')
    if kv is not None and age < 60:
        lines.append(f'vllm:kv_cache_usage_perc{{model_name="m"}} {kv}')
    return "\n".join(lines) + "\n"


BAD = {
    "NaN": page("NaN", "NaN", 0.5),
    "infinite": page("+Inf", "+Inf", 0.5),
    "negative": page("-0.5", "-3", 0.5),
    "above one": page("17", "NaN", 0.5),
    "absent": page(None, None, 0.5),
    "ten minutes old": page("0.01", None, 600.0),
    "not a metrics page": "<html>502 Bad Gateway</html>\n",
}
GOOD = page("0.01", "0", 0.5)


@pytest.fixture
def metrics():
    """Yield a server whose ``text`` is the answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.server.text.encode()
            self.send_response(200)
            self.send_header("content-type", "text/plain")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.text = GOOD
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def fake_graph(world, metrics):
    """Write the statefile of a graph with three workers of each role, all of them the metrics server."""
    me = identify(os.getpid())
    arbiter = ArbiterInfo(
        pid=me.pid, started=me.started, endpoint="", pubsub_endpoint="", namespace="world", graph="",
        model="m", speed=20.0, log_dir=str(world.log_dir), gpus=8, budget=8, router_url=metrics.url,
    )  # fmt: skip
    state = StateFile(arbiter, {})
    base = ProcessEntry(
        service="", role="", cmd=("true",), state=EntryState.READY, url=metrics.url, gpus_per_replica=1
    )
    for offset, role in ((0, "prefill"), (REPLICAS, "decode")):
        for number in range(REPLICAS):
            entry = dataclasses.replace(base, service=role, role=role, served=True, gpus=(offset + number,))
            state = state.with_entry(f"world_{role}{f'_{number}' if number else ''}", entry)
    store = StateStore(world.statefile)
    store.write(state)
    yield store
    store.remove()


def test_metrics_that_mean_nothing_hold_and_are_named_and_good_ones_scale_again(
    world, metrics, fake_graph, eventually
):
    """NaN, infinite, negative, absent, old or no metrics at all: every decision holds as metric_unknown."""
    metrics.text = BAD["NaN"]
    flags = (
        "--namespace",
        "world",
        "--log-dir",
        world.ledger_dir,
        "--speed",
        "20",
        "--adjustment-interval",
        "10",
        "--mode",
        "load",
    )
    process = world.start("planner", "run", *flags, name="planner")
    for kind, text in BAD.items():
        metrics.text = text
        before = len(world.decisions())
        # One interval may have begun under the page before this one.
        made = eventually(lambda n=before: (found := world.decisions()[n + 1 :]) and found[-1], kind)
        assert {role["reason"] for role in made["decision"]["roles"]} == {"metric_unknown"}, (kind, made)
    assert process.poll() is None
    assert world.entries("decode", "draining") == {}
    assert world.entries("prefill", "draining") == {}
    metrics.text = GOOD
    eventually(
        lambda: world.entries("decode", "draining") and world.entries("prefill", "draining"), "shrinks"
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    assert "Traceback" not in (world.folder / "planner.out").read_text()
    assert "0 differences" in world.replay_ledger()


def limit_files():
    """Let this process write no file beyond 5,000 bytes, as a full disk would; the limit can be lifted."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))


def test_a_full_disk_stops_decisions_but_neither_the_planner_nor_serving(world, stream, eventually):
    """What cannot be recorded is not done and is said; when there is room again the next interval does it."""
    import asyncio

    manifest = world.manifest(prefill=2, decode=2, interval=10)
    world.up(manifest, speed=10, flags=("--no-planner",))
    flags = ("--graph", manifest, "--namespace", "world", "--log-dir", world.ledger_dir, "--speed", "10")
    process = world.start("planner", "run", *flags, name="planner", preexec_fn=limit_files)
    output = world.folder / "planner.out"
    words = eventually(
        lambda: "cannot be written" in (text := output.read_text()) and text, "the error is said"
    )
    time.sleep(2.5)  # two more intervals: the refusals continue, nothing else changes
    assert process.poll() is None
    assert {len(world.entries(role, "ready")) for role in ("prefill", "decode")} == {2}
    one = stream("word" * 16, 8)
    asyncio.run(one.read())
    assert one.is_complete, one.problem
    assert "ledger.jsonl" in words
    assert "free or repair the disk" in words
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    eventually(lambda: len(world.entries("prefill", "ready", "draining")) == 1, "the decision is taken")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    assert "Traceback" not in output.read_text()
    assert "0 differences" in world.replay_ledger()
    assert json.loads(world.run("down", "--json").stdout)["forced"] is False
