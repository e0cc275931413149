"""Which settings of `router serve` hold for the requests of a gateway: every key is classed, and the limits are tried."""

import asyncio

import orjson
import pytest

pytest.importorskip("grpc", reason="needs penstock[gateway]")
pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2", reason="needs penstock[gateway]")

from click.testing import CliRunner
from gateway_harness import CHAT, JSON, needs_envoy
from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from penstock.api import Role, RouterConfig, Tier
from penstock.cli.main import cli
from penstock.core.errors import StreamBroken
from penstock.router.gateway.ignored_keys import IGNORED, ignored_keys
from penstock.router.proxy.auth import TierIdentity, TierKeys

GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: llama}}
spec:
  model: {{name: llama}}
  runtime: simulated
  services: {{frontend: {{role: router}}, worker: {{role: aggregated}}}}
  router: {router}
  planner: {{enabled: false}}
"""
CORE = {
    "policy", "policyParameters", "sessionHeader", "tokenizer", "kvEventsPort", "dualmap", "admission",
    "tiers", "auth", "corsAllowedOrigins", "prefillQueue", "decodeQueue", "prefillDeflection", "health",
}  # fmt: skip
"""Read by what both commands share, and nowhere replaced: the core, the application, the watch of the workers."""
OWN = {
    "gateway",
    "breaker",  # test_gateway: a worker that fails repeatedly
    "limits.maxBodyBytes",  # test_entrances, as the next two
    "limits.maxHeaderBytes",
    "limits.headerTimeoutRealSeconds",
    "limits.maxConnections",
    "limits.firstByteTimeoutSeconds",  # test_gateway: a silent worker
    "limits.idleTimeoutSeconds",
    "limits.requestTimeoutSeconds",  # test_gateway: a silent worker
}
"""Kept by code of the gateway's own, with a test of it; without a name: below."""


def keys(config, above=""):
    """Yield the path of every setting of a section."""
    for name in type(config).model_fields:
        value, path = getattr(config, name), f"{above}{to_camel(name)}"
        if isinstance(value, BaseModel):
            yield from keys(value, f"{path}.")
        else:
            yield path


def test_every_key_is_heeded_or_named():
    """A new key must be put into one class: heeded by shared code, by the gateway's own, or named as not heeded."""
    classes = CORE, OWN, set(IGNORED)
    for path in keys(RouterConfig()):
        found = [each for each in classes if any(f"{path}.".startswith(f"{key}.") for key in each)]
        assert len(found) == 1, path
    paths = set(keys(RouterConfig()))
    assert all(any(f"{path}.".startswith(f"{key}.") for path in paths) for each in classes for key in each)


def test_what_is_set_and_not_heeded_is_named():
    """With what holds instead; a default is not."""
    section = {
        "retries": {"maxContinuations": 1},
        "limits": {"idleTimeoutSeconds": 3},
        "drain": {"migrateAfterSeconds": 3},
    }
    found = dict(ignored_keys(RouterConfig.model_validate(section)))
    assert found.keys() == {"router.retries.maxContinuations", "router.drain.migrateAfterSeconds"}
    assert "ends with its worker" in found["router.retries.maxContinuations"]
    assert not dict(ignored_keys(RouterConfig()))


def test_a_graph_is_warned_of_them(tmp_path):
    """`penstock validate` says it of a graph with a gateway, and of no other."""
    file = tmp_path / "graph.yaml"
    retries = "retries: {maxContinuations: 1}"
    for router, told in ((f"{{gateway: {{enabled: true}}, {retries}}}", True), (f"{{{retries}}}", False)):
        file.write_text(GRAPH.format(router=router))
        answer = CliRunner().invoke(cli, ["validate", str(file)])
        assert answer.exit_code == 0, answer.output
        assert ("spec.router.retries.maxContinuations: behind a gateway" in answer.stderr) is told


async def ask(found, url, *, headers=(), **body):
    """Send a chat by one of the two entrances; returns status, code, and whether it is to come back."""
    answer = await found.client.request(
        "POST", f"{url}/v1/chat/completions", body=orjson.dumps({**CHAT, **body}), headers=(*JSON, *headers)
    )
    content = orjson.loads(answer.body)
    error = content.get("error") or content
    return answer.status, error.get("code"), b"retry-after" in answer.headers


@needs_envoy
async def test_queue_bounds_refuse_alike(harness, served):
    """429 where the queue is full, 503 for one that waited for too long; both say when to come back."""
    queue = {"maxRequests": 1, "maxWaitSeconds": 0.5, "workerTokens": 1}
    worker, found = await served(config={"policy": "prefix-cost", "prefillQueue": queue})
    running = await found.hanging(worker, stream=True)
    waiting = asyncio.create_task(ask(found, found.url))
    await found.until(lambda: len(found.server.core.entry_queue) == 1)
    by_gateway, by_http = [await ask(found, url) for url in (found.url, found.own_url)]
    assert by_gateway == by_http
    assert by_gateway[0] == 429
    assert by_gateway[2]
    status, _, comes_back = await waiting
    assert (status, comes_back) == (503, True)
    running.cancel()


@needs_envoy
async def test_tiers_go_by_keys_and_reach_the_worker(harness, served):
    """A key's tier bounds what its requests may ask for; the worker gets the priority, and no key."""
    tier_keys = TierKeys({b"high": TierIdentity(Tier.PREMIUM), b"low": TierIdentity(Tier.BACKGROUND)})
    worker, found = await served(config={"tiers": {"enabled": True}}, settings={"tier_keys": tier_keys})
    for key in (b"high", b"low"):
        for url in (found.url, found.own_url):
            headers = ((b"x-api-key", key), (b"x-penstock-tier", b"premium"))
            assert (await ask(found, url, headers=headers))[0] == 200
    priorities = [each.body.get("priority", 0) for each in worker.seen]
    assert priorities[0] == priorities[1] < priorities[2] == priorities[3]
    assert all(each.headers.keys().isdisjoint({b"x-api-key", b"authorization"}) for each in worker.seen)


@needs_envoy
async def test_web_pages_of_listed_origins_may_call(harness, served):
    """A preflight is answered by the picker, and the worker's answer carries the origin."""
    origin = b"https://app.example.com"
    _, found = await served(config={"corsAllowedOrigins": [origin.decode()]})
    headers = ((b"origin", origin), (b"access-control-request-method", b"POST"))
    url = found.url + "/v1/chat/completions"
    preflight = await harness.client.request("OPTIONS", url, headers=headers)
    assert (preflight.status, preflight.headers[b"access-control-allow-origin"]) == (204, origin)
    answer = await harness.client.request(
        "POST", url, body=orjson.dumps(CHAT), headers=(*JSON, (b"origin", origin))
    )
    assert (answer.status, answer.headers[b"access-control-allow-origin"]) == (200, origin)


@needs_envoy
async def test_sessions_stay_on_one_worker(harness, gateway):
    """By the request header, which the gateway passes on."""
    workers = [await harness.worker("aggregated") for _ in range(3)]
    found = await gateway(*workers, config={"sessionHeader": "x-session"})
    for number in range(6):
        text = [{"role": "user", "content": f"{number} " * 300}]
        assert (await ask(found, found.url, headers=((b"x-session", b"a"),), messages=text))[0] == 200
    assert sorted(len(each.seen) for each in workers) == [0, 0, 6]


@needs_envoy
@pytest.mark.parametrize("fails_open", [False, True])
async def test_requests_beyond_the_most_at_a_time_reach_no_worker(harness, served, fails_open):
    """503 in words, also where the gateway sends requests to any worker while it has no picker."""
    worker, found = await served(config={"limits": {"maxConnections": 1}}, fails_open=fails_open)
    running = await found.hanging(worker)
    assert await ask(found, found.url) == (503, "too_many_connections", True)
    assert len(worker.seen) == 1
    running.cancel()
    await found.assert_idle()
    while (await ask(found, found.url))[0] != 200:  # noqa: ASYNC110 - Envoy ends the stream of the one that left
        await asyncio.sleep(0.01)


@needs_envoy
async def test_a_stream_that_falls_silent_is_cut_off(harness, served):
    """After the idle limit, though much is left of the total one; one that speaks now and then is not."""
    worker, found = await served(config={"limits": {"idleTimeoutSeconds": 6}}, settings={"speed": 10.0})
    more = worker.hold_stream()
    silent = await found.begun_stream()
    with pytest.raises(StreamBroken):
        await silent.read(limit_bytes=10_000)
    more.set()
    metrics = found.server.metrics
    assert (metrics.errors["upstream_timeout_idle"], metrics.lost_streams["request"]) == (1, 1)
    await found.assert_idle()


@needs_envoy
async def test_streams_of_a_draining_worker_stay(harness, gateway):
    """They cannot continue elsewhere, so nothing of them is cut off or kept."""
    workers = [await harness.worker("aggregated") for _ in range(2)]
    found = await gateway(*workers, config={"drain": {"migrateAfterSeconds": 1}}, settings={"speed": 100.0})
    ends = [each.hold_stream() for each in workers]
    stream = await found.begun_stream()
    busy = next(each for each in found.server.core.pool if each.inflight_requests)
    found.server.admission.set_drained(busy.name, drained=True)
    found.server._handler.moves.tick()
    found.server._handler.moves.tick()
    for each in ends:
        each.set()
    assert (await stream.read(limit_bytes=10_000)).endswith(harness.done)
    assert sum(len(each.seen) for each in workers) == 1


@needs_envoy
async def test_busy_thresholds_of_run_time_hold(harness, served):
    """What is posted to the router's own port refuses requests of the gateway, too."""
    worker, found = await served(config={"admission": {"mode": "token-capacity"}})
    worker.kv_usage = "0.5"
    await found.until(lambda: found.server.core.pool.routable(Role.AGGREGATED, 0)[0].kv_usage_fraction == 0.5)
    body = orjson.dumps({"model": "llama", "active_decode_blocks_threshold": 0.4})
    changed = await harness.client.request("POST", found.own_url + "/busy_threshold", body=body, headers=JSON)
    assert changed.status == 200
    by_gateway, by_http = [await ask(found, url) for url in (found.url, found.own_url)]
    assert by_gateway == by_http
    assert by_gateway[0] == 503
