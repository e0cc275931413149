"""Several routers before the same workers: each knows the others' tokens, and together they keep a threshold."""

import asyncio

import orjson
import pytest

from penstock.router.discovery.endpoint_slices import router_urls
from penstock.router.discovery.statefile import router_urls as local_router_urls
from penstock.router.peer_load import read_load
from penstock.router.policy.busy import BusyThresholds


class Graph:
    """A statefile of workers and routers that tests write."""

    def __init__(self, file):
        self.file = file
        self.entries = {}
        self.write()

    def add(self, name, role, url):
        """Add an entry."""
        self.entries[name] = {
            "role": role,
            "url": url,
            "state": "ready",
            "pid": 1,
            "started": 1,
            "restarts": 0,
        }
        self.write()

    def write(self):
        """Replace the file."""
        fresh = self.file.with_suffix(".new")
        fresh.write_bytes(orjson.dumps(self.entries))
        fresh.replace(self.file)


async def two_routers(harness, tmp_path, *workers, **config):
    """Start two routers of one graph, which find each other."""
    graph = Graph(tmp_path / "state.json")
    for worker in workers:
        graph.add(worker.name, worker.role, worker.url)
    options = {"config": config, "disaggregated": False, "ready": False, "statefile": graph.file}
    routers = [await harness.router(**options) for _ in range(2)]
    for number, router in enumerate(routers):
        graph.add(f"router-{number}", "router", router.url)
    for router in routers:
        await router.until(lambda router=router: not router.server.admission.problems())
        await router.until(lambda router=router: len(router.server._discovery.routers()) == 2)
    return routers


def tokens_at(router, worker):
    """What a router believes that a worker has to compute."""
    return router.server.core.active_prefill_tokens(router.server.core.pool.get(worker.name))


@pytest.mark.parametrize("policy", ["prefix-cost", "dualmap"])
async def test_a_router_rejects_for_what_another_has_sent(harness, tmp_path, policy):
    """1,200 tokens by the first router are above 1,000: the second rejects, until they are computed."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.events_then(event=gate)]
    admission = {"mode": "token-capacity", "activePrefillTokensThreshold": 1000}
    one, two = await two_routers(harness, tmp_path, worker, policy=policy, admission=admission)
    task = asyncio.ensure_future(one.post(prompt=[1] * 1200, stream=True))
    await one.until(lambda: worker.seen)
    await two.until(lambda: tokens_at(two, worker) == 1200)
    assert (await two.post(max_tokens=1)).status == 503
    assert tokens_at(one, worker) == 1200
    gate.set()
    await task
    await two.until(lambda: tokens_at(two, worker) == 0)
    assert (await two.post(max_tokens=1)).status == 200


async def test_a_router_that_is_gone_is_forgotten(harness, tmp_path):
    """After as long as a worker's metrics count; until then it counts as last heard."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.events_then(event=gate)]
    one, two = await two_routers(harness, tmp_path, worker)
    task = asyncio.ensure_future(one.post(prompt=[1] * 500, stream=True))
    await two.until(lambda: tokens_at(two, worker) == 500)
    peers = two.server._peers
    gate.set()
    await task
    await one.server.close()
    peers._heard = {
        url: load.__class__(load.instance, {worker.name: 500}, load.heard_s)
        for url, load in peers._heard.items()
    }
    await peers.ask()
    assert tokens_at(two, worker) == 500
    peers._clock = type(
        "Later", (), {"now_s": staticmethod(lambda now=two.server._clock.now_s: now() + 11)}
    )()
    await peers.ask()
    assert tokens_at(two, worker) == 0


async def test_a_router_does_not_count_itself(harness, tmp_path):
    """Its own address is among the graph's routers'."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.events_then(event=gate)]
    one, _ = await two_routers(harness, tmp_path, worker)
    task = asyncio.ensure_future(one.post(prompt=[1] * 700, stream=True))
    await one.until(lambda: worker.seen)
    await one.server._peers.ask()
    assert tokens_at(one, worker) == 700
    page = orjson.loads((await one.get("/peer_load", headers=(harness.as_router,))).body)
    assert page["instance"] == one.server._peers.instance
    assert page["tokens"] == {worker.name: 700}
    gate.set()
    await task


async def thresholds_of(router):
    """What a router says that the thresholds are."""
    (shown,) = orjson.loads((await router.get("/busy_threshold")).body)["thresholds"]
    return shown["active_decode_blocks_threshold"], shown["active_prefill_tokens_threshold"]


async def until_thresholds(router, *expected):
    """Wait until a router has heard of them, and shows them."""
    await router.until(lambda: router.server.thresholds.now == BusyThresholds(*expected))
    assert await thresholds_of(router) == expected


async def set_threshold(router, **body):
    """Change thresholds at one router."""
    raw = orjson.dumps({"model": "llama", **body})
    assert (await router.post("/busy_threshold", raw=raw)).status == 200


@pytest.mark.parametrize("asked", [0, 1])
async def test_thresholds_set_at_any_router_hold_for_the_graph(harness, tmp_path, asked):
    """Whichever is asked, both show them and both reject by them, the one that keeps the queue included."""
    worker = await harness.worker("aggregated")
    worker.kv_usage = "0.9"
    routers = await two_routers(harness, tmp_path, worker)
    await set_threshold(routers[asked], active_decode_blocks_threshold=0.5)
    for router in routers:
        await until_thresholds(router, 0.5, None)
        await router.until(lambda router=router: router.server.core.busy[router.server.core.entry].is_any)
        assert (await router.post(max_tokens=1)).status == 503

    await set_threshold(routers[1 - asked], active_decode_blocks_threshold=None)
    for router in routers:
        await until_thresholds(router, None, None)
        assert (await router.post(max_tokens=1)).status == 200


async def test_thresholds_outlive_the_router_that_was_asked(harness, tmp_path):
    """The survivor has them, and a router that joins has them before its first request."""
    worker = await harness.worker("aggregated")
    one, two = await two_routers(harness, tmp_path, worker)
    await set_threshold(one, active_prefill_tokens_threshold=700)
    await until_thresholds(two, None, 700)
    await one.server.close()

    options = {"disaggregated": False, "ready": False, "statefile": tmp_path / "state.json"}
    joined = await harness.router(**options)

    assert await thresholds_of(two) == (None, 700)
    assert await thresholds_of(joined) == (None, 700)


@pytest.mark.parametrize(
    "told",
    [
        b'{"version":1}',
        b'{"version":-1,"file":[null,null,null],"now":[null,null,null]}',
        b'{"version":1,"file":[null,null,null],"now":[2,null,null]}',
        b'{"version":1,"file":[null,null],"now":[null,null,null]}',
        b'{"version":1,"file":7,"now":[null,null,null]}',
        b"[]",
    ],
)
def test_thresholds_that_cannot_be_are_passed_over(told):
    """The rest of the share counts all the same."""
    load = read_load(b'{"instance":"x","tokens":{"a":1},"thresholds":' + told + b"}", 0.0)
    assert (load.tokens, load.thresholds) == ({"a": 1}, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"tokens":{}}',
        b'{"instance":"x"}',
        b'{"instance":"x","tokens":{"a":-1}}',
        b'{"instance":"x","tokens":{"a":"1"}}',
        b'{"instance":"x","tokens":{"a":true}}',
        b'{"instance":"x","tokens":{"a":1e300}}',
    ],
)
def test_what_is_no_share_is_passed_over(body):
    """A router of an older version, or something else at its address."""
    assert read_load(body, 0.0) is None


def test_routers_are_found_in_slices_and_statefiles():
    """By their role; ready or leaving, as their requests go on."""
    part = {
        "metadata": {"labels": {"penstock.dev/role": "router"}},
        "addressType": "IPv6",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": [
            {"addresses": ["fd00::2"]},
            {"addresses": ["fd00::1"], "conditions": {"terminating": True}},
            {},
        ],
    }
    decode = {**part, "metadata": {"labels": {"penstock.dev/role": "decode"}}}
    fqdn = {**part, "addressType": "FQDN"}
    assert router_urls([decode, part, fqdn]) == ("http://[fd00::1]:8000", "http://[fd00::2]:8000")
    entries = {
        "f_router_0": {"role": "router", "url": "http://127.0.0.1:8000/"},
        "f_decode_0": {"role": "decode", "url": "http://127.0.0.1:8001"},
        "f_router_1": {"role": "router", "url": None},
        "odd": 3,
    }
    assert local_router_urls(orjson.dumps(entries)) == ("http://127.0.0.1:8000",)
