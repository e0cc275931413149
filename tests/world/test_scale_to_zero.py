"""Scale to zero with real processes: idle graphs hold no worker, and the request that wakes one is answered."""

import json
import os
import signal
import urllib.error

import pytest

SPEED = 20
HOLD = "penstock_router_wake_hold_seconds"
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
ROLES = ("prefill", "decode")


def refused(world):
    """Return status, headers and body of a completion that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        world.complete()
    return caught.value.code, caught.value.headers, json.load(caught.value)


def metric(world, name):
    """Return a number of the router's page without labels."""
    return world.samples(name)[""]


@pytest.mark.nightly
def test_an_idle_graph_holds_no_worker_and_requests_are_held_as_long_as_its_starts_take(world, eventually):
    """Served after each of three sleeps; then, while nothing starts workers, refused after the time that was learnt."""

    def sleeps():
        return not any(world.entries(role, *LIVE) for role in ROLES)

    path = world.folder / "graph.yaml"
    path.write_text(ZERO)
    world.up(path, speed=SPEED)
    assert all(world.entries(role, "ready") for role in ROLES), "up returns when workers serve"
    for _ in range(3):
        assert metric(world, HOLD) == 1200
        eventually(sleeps, "no worker is left")
        assert world.complete()["usage"]["completion_tokens"] == 4
        assert all(world.entries(role, "ready") for role in ROLES)
    hold_s = metric(world, HOLD)
    assert hold_s == pytest.approx(2 * metric(world, "penstock_router_wake_slowest_seconds"))
    assert 10 < hold_s < 1200, "twice the slowest start, not what is configured"
    eventually(sleeps, "no worker is left")
    planner = world.state()["world_planner"]["pid"]
    os.kill(planner, signal.SIGSTOP)
    try:
        status, headers, found = refused(world)
    finally:
        os.kill(planner, signal.SIGCONT)
    assert (status, found["error"]["code"]) == (503, "queue_timeout")
    held_s = max(60, hold_s)
    assert int(headers["retry-after"]) >= held_s / SPEED - 1, "as long again as it has waited"
    world.down()
    world.replay_ledger()
