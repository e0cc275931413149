"""Scale to zero with real processes: idle graphs hold no worker, and the request that wakes one is answered."""

import json
import urllib.request

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ZERO = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: world}
spec:
  model: {name: m, servedName: m, contextTokens: 131072}
  runtime: simulated
  services:
    frontend: {role: router}
    prefill: {role: prefill, startupSeconds: 5, scaling: {minReplicas: 0, maxReplicas: 6}}
    decode: {role: decode, startupSeconds: 5, scaling: {minReplicas: 0, maxReplicas: 6}}
  engine: {profile: h200-llama-3.1-8b-tp1}
  router: {prefillQueue: {maxWakeSeconds: 1200}}
  planner: {minGpuBudget: 0, scaleToZeroAfterSeconds: 60}
"""
LIVE = ("requested", "starting", "ready", "draining")


def test_an_idle_graph_holds_no_worker_and_the_next_request_is_served(world, eventually):
    """Up with one of each, then none, then one of each again for the request that waited for them."""
    path = world.folder / "graph.yaml"
    path.write_text(ZERO)
    world.up(path, speed=20)
    roles = ("prefill", "decode")
    assert all(world.entries(role, "ready") for role in roles), "up returns when workers serve"
    eventually(lambda: not any(world.entries(role, *LIVE) for role in roles), 60, "no worker is left")
    body = {"model": "m", "prompt": "hello", "max_tokens": 4}
    request = urllib.request.Request(
        f"{world.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    assert found["usage"]["completion_tokens"] == 4
    assert all(world.entries(role, "ready") for role in roles)
    world.down()
    replayed = world.run("planner", "replay", world.ledger_dir)
    assert replayed.returncode == 0, replayed.stderr
