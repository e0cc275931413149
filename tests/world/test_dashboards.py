"""Every query of the chart's dashboards, asked of a Prometheus that scrapes a local graph as the documentation says."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from patience import LIMIT_S

from penstock_operator.metrics import OperatorMetrics

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "charts/penstock/dashboards").glob("*.json"))
MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: world}
spec:
  model: {name: m, servedName: m, contextTokens: 131072}
  runtime: simulated
  services:
    frontend: {role: router}
    prefill: {role: prefill, replicas: 1, scaling: {minReplicas: 1, maxReplicas: 2}}
    decode: {role: decode, replicas: 1, scaling: {minReplicas: 1, maxReplicas: 2}}
  engine: {profile: h200-llama-3.1-8b-tp1}
  router: {tiers: {enabled: true}, prefillQueue: {maxWakeSeconds: 60}}
  slo: {ttft: 2s, itl: 50ms}
  planner: {mode: sla, maxGpuBudget: 4}
"""
SILENT = {
    "Errors and retries by reason": "nothing failed",
    "Decisions by action": "nothing changed",
    "How long requests wait for a start": "the graph does not scale to zero",
}
"""Panels that may show nothing here, and why."""
OF_A_LOAD = "penstock_planner_in_time_fraction"
"""Series that a planner writes once it knows the share in time of enough requests, which this test does not send."""


@pytest.fixture
def operator():
    """Serve the metrics of an operator that has acted, and return its address."""
    metrics = OperatorMetrics()
    graph = {
        "metadata": {"namespace": "local", "name": "world"},
        "spec": {"services": {}},
        "status": {"phase": "Ready"},
    }
    pool = {
        "metadata": {"namespace": "local", "name": "shared"},
        "status": {"gpus": {"total": 6, "held": 2}, "graphs": [{"name": "world", "held": 2, "granted": 4}]},
    }
    metrics.watch(depth=lambda: 0, graphs=lambda: [graph], pools=lambda: [pool])
    metrics.leader.set(1)
    metrics.reconciles.labels("unchanged").inc()
    metrics.durations.observe(0.01)
    metrics.writes.labels("Deployment", "patch").inc()
    metrics.write_errors.labels("Deployment", "conflict").inc()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(metrics.page())

        def log_message(self, *_): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask(world, operator, tmp_path, eventually, free_port):
    """Start the graph and Prometheus; return what asks a query."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus on PATH; Debian's package prometheus has it")
    spec = importlib.util.spec_from_file_location("targets", ROOT / "docs/examples/prometheus_targets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    manifest = tmp_path / "graph.yaml"
    manifest.write_text(MANIFEST)
    world.up(manifest, speed=10)
    listed = module.targets(json.loads(world.run("status", "--json").stdout))
    roles = {each["labels"]["pod_role"] for each in listed}
    assert roles == {"router", "prefill", "decode", "planner"}
    listed.append({"targets": [operator], "labels": {"namespace": "local", "pod": "operator"}})
    (tmp_path / "targets.json").write_text(json.dumps(listed))
    shutil.copy(ROOT / "docs/examples/prometheus.yml", tmp_path)
    port = free_port()
    arguments = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *arguments, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )

    def asked(query):
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            return json.load(answer)["data"]["result"]

    def scraped():
        try:
            return len([each for each in asked("up") if each["value"][1] == "1"]) == len(listed)
        except OSError:
            return False

    try:
        eventually(scraped, "every target scraped")
        yield asked
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def complete(world, tier):
    """Send one short stream in a tier; where the machine is slow, it may be shed."""
    body = {"model": "m", "prompt": "hello " * 50, "max_tokens": 8, "stream": True}
    headers = {"content-type": "application/json", "x-penstock-tier": tier}
    request = urllib.request.Request(f"{world.url}/v1/completions", json.dumps(body).encode(), headers)
    with (
        contextlib.suppress(urllib.error.HTTPError),
        urllib.request.urlopen(request, timeout=LIMIT_S) as answer,
    ):
        assert b"[DONE]" in answer.read()


def test_every_panel_of_the_dashboards_shows_a_running_graph(world, ask, eventually):
    """Each query is answered, and with series, except for what this graph has no reason to show."""
    queries = {
        (panel["title"], target["expr"])
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    }

    missing = set(SILENT)

    def is_shown():
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda tier: complete(world, tier), ["premium", "standard", "background"] * 2))
        missing.clear()
        for title, query in queries:
            filled = (
                query.replace("$__rate_interval", "30s").replace("$namespace", ".*").replace("$graph", ".*")
            )
            if OF_A_LOAD not in query and not ask(filled):
                missing.add(title)
        return missing <= set(SILENT)

    try:
        eventually(is_shown, "series of every panel")
    finally:
        assert missing - set(SILENT) == set()
