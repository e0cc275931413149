"""Routers pass requests on to the one that decides: once, whole, counted once, and never at the cost of an answer."""

import asyncio
import time

import orjson

from penstock.core.http.client import Timeouts
from penstock.router.proxy.auth import GRAPH_SECRET
from penstock.router.proxy.forwarding import FORWARDED

JSON = (b"content-type", b"application/json")


class Routers:
    """Two routers of one statefile; the first is the older one, so it decides."""

    def __init__(self, first, second):
        self.first = first
        self.second = second


async def start(harness, write_graph, *workers, **settings):
    """Start two routers that know each other."""
    config = settings.pop("config", {})
    routers = []
    for number in range(2):
        file = write_graph(workers, routers)
        router = await harness.router(
            config=config, disaggregated=False, ready=False, statefile=file, **settings
        )
        routers.append(router)
        write_graph(workers, routers)
        await router.until(lambda router=router: not router.server.admission.problems())
        assert number < 2
    first, second = routers
    await second.until(lambda: second.server._peers.owner_url() == first.url)
    await first.until(lambda: len(first.server._peers._heard) == 1)
    assert first.server._peers.owner_url() is None
    return Routers(first, second)


async def test_the_older_router_decides_and_counts(harness, write_graph):
    """A request that came to the younger one is an arrival at the older one alone; its id is the same in both."""
    worker = await harness.worker("aggregated")
    routers = await start(harness, write_graph, worker)
    answer = await routers.second.post(max_tokens=2, headers=(JSON, (b"x-request-id", b"mine")))
    assert answer.status == 200
    assert orjson.loads(answer.body)["choices"][0]["text"] == "xx"
    assert answer.headers[b"x-request-id"] == worker.seen[0].headers[b"x-request-id"] == b"mine"
    assert routers.first.server.metrics.arrivals == 1
    assert routers.second.server.metrics.arrivals == 0
    forwarded = "penstock_router_forwarded_requests_total"
    assert await routers.second.metric(forwarded, outcome="answered") == 1
    assert not routers.second.server.metrics.requests
    await routers.first.assert_idle()


async def test_a_stream_is_relayed_as_it_comes(harness, write_graph):
    """The first token arrives before the last is made."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.events_then(harness.token_event(0), event=gate)]
    routers = await start(harness, write_graph, worker)
    response = await routers.second.stream()
    async with response:
        assert response.headers[b"content-type"].startswith(b"text/event-stream")
        assert b"tok0" in await anext(aiter(response))
        gate.set()
        rest = b"".join([chunk async for chunk in response])
    assert rest.endswith(harness.done)


async def test_what_was_passed_on_is_not_passed_on_again(harness, write_graph):
    """Two routers that take each other for the owner answer all the same."""
    worker = await harness.worker("aggregated")
    routers = await start(harness, write_graph, worker)
    peers = routers.first.server._peers
    other = next(iter(peers._heard.values())).instance
    peers._owners.set_owners([other])
    peers._choose_owners = lambda: None
    assert peers.owner_url() == routers.second.url
    assert (await routers.second.post()).status == 200
    assert (await routers.first.post(headers=(JSON, (FORWARDED, b"1"), harness.as_router))).status == 200
    assert len(worker.seen) == 2


async def test_a_client_cannot_pass_for_a_router(harness, write_graph):
    """Its header is ignored: the request waits in the owner's queue as any other, and workers see no secret."""
    worker = await harness.worker("aggregated")
    routers = await start(harness, write_graph, worker)
    for secret in ((), ((GRAPH_SECRET, b"guessed"),)):
        headers = (JSON, (FORWARDED, b"1"), *secret)
        assert (await routers.second.post(headers=headers)).status == 200
    assert routers.first.server.metrics.arrivals == 2
    assert routers.second.server.metrics.arrivals == 0
    assert all(GRAPH_SECRET not in seen.headers for seen in worker.seen)


async def test_routers_without_a_secret_trust_no_request(harness, write_graph):
    """Each decides by itself, because a client could be taken for the other one."""
    worker = await harness.worker("aggregated")
    file = write_graph([worker], [])
    options = {"disaggregated": False, "ready": False, "statefile": file, "graph_secret": b""}
    routers = [await harness.router(**options) for _ in range(2)]
    write_graph([worker], routers)
    for router in routers:
        await router.until(lambda router=router: len(router.server._discovery.routers()) == 2)
        await router.until(lambda router=router: not router.server.admission.problems())
        await router.server._peers.ask()
        assert router.server._peers.owner_url() is None
        assert (await router.get("/peer_load", headers=((GRAPH_SECRET, b""),))).status == 403
        assert (await router.post(headers=(JSON, (FORWARDED, b"1")))).status == 200


async def test_a_dead_owner_costs_no_answer(harness, write_graph):
    """Its requests are decided where they come; a request under way there is decided again."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.events_then(event=gate)]
    routers = await start(harness, write_graph, worker)
    task = asyncio.ensure_future(routers.second.post(max_tokens=1))
    await routers.second.until(lambda: worker.seen)
    # As when the process is killed: its connections break, and nothing listens any more.
    await routers.first.server._http.close(grace_s=0)
    gate.set()
    assert (await task).status == 200
    assert (await routers.second.post(max_tokens=1)).status == 200
    assert routers.second.server._peers.owner_url() is None
    assert await routers.second.metric("penstock_router_forwarded_requests_total", outcome="fell_back") >= 1


async def test_a_stream_that_breaks_at_the_owner_does_not_look_complete(harness, write_graph):
    """It ends by an error event, without [DONE]."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.events_then(harness.token_event(0), event=gate)]
    routers = await start(harness, write_graph, worker)
    response = await routers.second.stream()
    async with response:
        text = await anext(aiter(response))
        closing = asyncio.ensure_future(routers.first.server._http.close(grace_s=0))
        text += await routers.second.broken(response)
        await closing
        gate.set()
    assert b"upstream_broken" in text
    assert harness.done not in text


async def test_a_stream_that_breaks_at_the_worker_is_broken_once(harness, write_graph):
    """The client sees the owner's error event, no second one, and no end."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.events_then(harness.token_event(0), event=gate, broken=True)]
    routers = await start(harness, write_graph, worker)
    response = await routers.second.stream()
    async with response:
        text = await anext(aiter(response))
        gate.set()
        text += await routers.second.broken(response)
    assert text.count(b'data: {"error"') == 1
    assert harness.done not in text


async def test_a_client_that_leaves_frees_the_worker(harness, write_graph):
    """Across both routers."""
    worker, started = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.hang(started)]
    routers = await start(harness, write_graph, worker)
    task = asyncio.ensure_future(routers.second.post())
    await started.wait()
    task.cancel()
    await routers.first.until(lambda: worker.disconnects == 1)
    await routers.first.assert_idle()


async def test_refusals_come_through_as_they_are(harness, write_graph):
    """Status, body and Retry-After of the owner; a wrong key is refused at the frontend."""
    worker = await harness.worker("aggregated")
    worker.otherwise = harness.answers.status(429, headers=((b"retry-after", b"7"),))
    routers = await start(harness, write_graph, worker, api_keys=frozenset({b"key"}))
    key = (b"authorization", b"Bearer key")
    refused = await routers.second.post(headers=(JSON, key))
    assert (refused.status, refused.headers[b"retry-after"]) == (429, b"7")
    assert orjson.loads(refused.body)["error"]["message"] == "worker says no"
    assert (await routers.second.post(headers=(JSON,))).status == 401
    assert len(worker.seen) == 1


async def test_a_router_that_stops_decides_about_nothing(harness, write_graph):
    """It says so while its own requests go on."""
    worker = await harness.worker("aggregated")
    routers = await start(harness, write_graph, worker)
    routers.first.server._peers.forwards = False
    await routers.second.until(lambda: routers.second.server._peers.owner_url() is None)
    assert "decides" not in orjson.loads((await routers.first.get("/peer_load")).body)


async def test_forwarding_can_be_off(harness, write_graph):
    """Each decides about what came to it."""
    worker = await harness.worker("aggregated")
    file = write_graph((worker,), ())
    options = {"config": {"peers": {"forward": False}}, "disaggregated": False, "statefile": file}
    first = await harness.router(**options)
    write_graph((worker,), (first,))
    second = await harness.router(**options)
    write_graph((worker,), (first, second))
    await second.until(lambda: second.server._peers._heard)
    assert (await second.post()).status == 200
    assert second.server.metrics.arrivals == 1


async def test_a_router_that_hangs_is_asked_no_longer_than_allowed(harness, write_graph):
    """An owner whose answer does not begin is cut off by the request's own limits."""
    worker, started = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.hang(started)]
    routers = await start(
        harness,
        write_graph,
        worker,
        config={"limits": {"firstByteTimeoutSeconds": 0.2}, "retries": {"maxPerRequest": 0}},
    )
    began = time.monotonic()
    answer = await routers.second.client.request(
        "POST",
        routers.second.url + "/v1/completions",
        body=orjson.dumps({"model": "llama", "prompt": "x"}),
        headers=(JSON,),
        timeouts=Timeouts.each(20),
    )
    assert answer.status == 504
    assert time.monotonic() - began < 20


async def test_routers_that_do_not_forward_keep_to_pairs(harness, write_graph):
    """The default policy is told that prefixes are scattered, and told again when the other router is gone."""
    worker = await harness.worker("aggregated")
    file = write_graph((worker,), ())
    options = {"config": {"peers": {"forward": False}}, "disaggregated": False, "statefile": file}
    router, other = [await harness.router(**options) for _ in range(2)]
    write_graph((worker,), (router, other))
    estimates = router.server.core.entry_queue._estimates
    await router.until(lambda: estimates.is_scattered)


async def test_routers_that_take_each_other_for_the_owner_do_not_loop(harness, write_graph):
    """Each request makes one hop, comes to the worker once, and is decided by the router it was passed on to."""
    worker = await harness.worker("aggregated")
    routers = await start(harness, write_graph, worker)
    first, second = routers.first.server, routers.second.server
    for server, other, url in ((first, second, routers.second.url), (second, first, routers.first.url)):
        server._peers._choose_owners = lambda: None
        server._peers._owners.set_owners([other._peers.instance])
        server._peers._url_of = {other._peers.instance: url}
    answers = await asyncio.gather(*(router.post() for router in (routers.first, routers.second) * 5))
    assert {answer.status for answer in answers} == {200}
    assert len(worker.seen) == 10
    assert [each.metrics.arrivals for each in (first, second)] == [5, 5]
    assert [each.metrics.forwarded["answered"] for each in (first, second)] == [5, 5]
    assert all(FORWARDED not in seen.headers for seen in worker.seen)


async def test_a_full_queue_of_the_owner_is_full_for_all(harness, write_graph):
    """The router that was asked does not take what the owner refused: together they admit what one would."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()

    async def complete_late(request, responder):
        await gate.wait()
        await worker.complete(request, responder)

    worker.otherwise = complete_late
    config = {"prefillQueue": {"maxRequests": 1, "workerTokens": 1}}
    routers = await start(harness, write_graph, worker, config=config)
    first, second = routers.first, routers.second
    # Streams: of whole answers it is guessed when a prompt is computed.
    running = asyncio.ensure_future(second.post(stream=True))
    await first.until(lambda: len(worker.seen) == 1)
    queued = asyncio.ensure_future(second.post(stream=True))
    await first.until(lambda: len(first.server.core.entry_queue) == 1)
    refused = await asyncio.gather(*(second.post() for _ in range(3)))
    assert [(each.status, b"retry-after" in each.headers) for each in refused] == [(429, True)] * 3
    assert {orjson.loads(each.body)["error"]["code"] for each in refused} == {"queue_full"}
    assert second.server.metrics.arrivals == second.server.metrics.forwarded["fell_back"] == 0
    assert len(worker.seen) == 1
    gate.set()
    assert [(await each).status for each in (running, queued)] == [200, 200]


async def test_a_body_above_the_bound_is_refused_at_the_frontend(harness, write_graph):
    """The owner does not hear of it; one just below the bound comes through whole."""
    worker = await harness.worker("aggregated")
    routers = await start(harness, write_graph, worker, config={"limits": {"maxBodyBytes": 4096}})
    refused = await routers.second.post(prompt="x" * 4096)
    assert refused.status == 413
    assert not routers.second.server.metrics.forwarded
    assert (await routers.second.post(prompt="x" * 3900)).status == 200
    assert worker.seen[0].body["prompt"] == "x" * 3900
    assert routers.first.server.metrics.arrivals == 1


async def test_a_key_that_workers_ask_for_comes_to_them_unchanged(harness, write_graph):
    """Routers without keys of their own are transparent, however many there are; a proxy's credentials stay outside."""
    worker = await harness.worker("aggregated")
    routers = await start(harness, write_graph, worker)
    key = (b"authorization", b"Bearer sk-Some_Key==")
    answer = await routers.second.post(headers=(JSON, key, (b"proxy-authorization", b"Basic eDp5")))
    assert answer.status == 200
    assert routers.second.server.metrics.forwarded["answered"] == 1
    assert worker.seen[0].headers[b"authorization"] == key[1]
    assert b"proxy-authorization" not in worker.seen[0].headers


async def test_a_client_that_leaves_a_stream_frees_the_worker(harness, write_graph):
    """Across both routers, behind the first token."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.events_then(harness.token_event(0), event=gate)]
    routers = await start(harness, write_graph, worker)
    response = await routers.second.stream()
    await anext(aiter(response))
    response.abort()
    await routers.first.until(lambda: worker.disconnects == 1)
    await routers.first.assert_idle()
    await routers.second.until(lambda: not routers.second.server._peers.silence.urls)
    gate.set()
