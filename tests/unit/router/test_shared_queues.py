"""Several routers share the workers' queues out: one queue and one order per worker, and caches known to all."""

import asyncio

import orjson
import pytest

from penstock.router.core.queue_sharing import PROMPTS
from penstock.router.peer_load import read_load
from penstock.router.proxy.auth import GRAPH_SECRET
from penstock.router.proxy.forwarding import FORWARDED, WORKER

JSON = (b"content-type", b"application/json")
PROMPT = "a beginning that many share " * 400


class BusyProcess:
    """A processor so busy that a second router must keep queues."""

    cores = 0.5

    def measure(self, cpu_s, wall_s):
        """Measure nothing."""


async def start(harness, write_graph, *workers, **config):
    """Start two routers that share the workers' queues."""
    file = write_graph(workers, ())
    options = {"config": config, "disaggregated": False, "ready": False, "statefile": file}
    routers = [await harness.router(**options) for _ in range(2)]
    for number, router in enumerate(routers):
        router.server._peers._busy = BusyProcess()
        router.server._peers.instance = f"{number:032}"  # which of four queues each keeps must not be chance
    write_graph(workers, routers)
    for router in routers:
        await router.until(lambda router=router: not router.server.admission.problems())
        await router.until(lambda router=router: router.server._peers.share_queues)
    return routers


def keeper(routers, worker):
    """Return the router that keeps a worker's queue, by what both say."""
    kept = [router for router in routers if router.server._peers.owner_url(worker.name) is None]
    assert len(kept) == 1
    return kept[0]


def known_blocks(router, worker):
    """Return how many blocks a router believes that a worker holds."""
    return router.server.core.entry_queue.index_of(worker.name).count


async def test_a_worker_hears_from_the_router_that_keeps_its_queue_alone(harness, write_graph):
    """Wherever requests come in, and both routers keep some of eight queues."""
    workers = [await harness.worker("aggregated") for _ in range(8)]
    routers = await start(harness, write_graph, *workers)
    answers = await asyncio.gather(
        *(router.post(prompt=f"{number} {PROMPT}") for number in range(16) for router in routers)
    )
    assert {answer.status for answer in answers} == {200}
    expected = [sum(len(each.seen) for each in workers if keeper(routers, each) is r) for r in routers]
    assert [router.server.metrics.arrivals for router in routers] == expected
    assert all(expected)
    for router in routers:
        await router.assert_idle()


async def test_one_worker_has_one_queue(harness, write_graph):
    """It is given as much at a time as by one router: the second prompt waits, wherever it comes in."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()

    async def complete_late(request, responder):
        await gate.wait()
        await worker.complete(request, responder)

    worker.otherwise = complete_late
    routers = await start(harness, write_graph, worker, prefillQueue={"workerTokens": 1})
    running = asyncio.ensure_future(routers[0].post(stream=True))
    await routers[0].until(lambda: worker.seen)
    waiting = [asyncio.ensure_future(router.post(stream=True)) for router in routers]
    queue = keeper(routers, worker).server.core.entry_queue
    await routers[0].until(lambda: len(queue) == 2)
    assert len(worker.seen) == 1
    gate.set()
    assert [(await each).status for each in (running, *waiting)] == [200] * 3


async def test_a_prompt_is_known_where_it_did_not_come_in(harness, write_graph):
    """What one router has sent somewhere leads the other's request there, though all else is equal."""
    workers = [await harness.worker("aggregated") for _ in range(6)]
    one, two = await start(harness, write_graph, *workers)
    for number in range(5):
        prompt = f"{number} {PROMPT}"
        assert (await one.post(prompt=prompt)).status == 200
        holder = next(each for each in workers if any(seen.body["prompt"] == prompt for seen in each.seen))
        await two.until(lambda holder=holder: known_blocks(two, holder) == known_blocks(one, holder) > 0)
        before = len(holder.seen)
        assert (await two.post(prompt=prompt + " and more")).status == 200
        assert len(holder.seen) == before + 1


async def test_a_session_is_known_where_it_did_not_come_in(harness, write_graph):
    """Its second request follows the first, whatever it says."""
    workers = [await harness.worker("aggregated") for _ in range(6)]
    one, two = await start(harness, write_graph, *workers, sessionHeader="x-session-id")
    headers = (JSON, (b"x-session-id", b"s"))
    assert (await one.post(prompt="first", headers=headers)).status == 200
    holder = next(each for each in workers if each.seen)
    await two.until(lambda: known_blocks(two, holder) > 0)
    assert (await two.post(prompt="something else", headers=headers)).status == 200
    assert len(holder.seen) == 2


async def test_what_was_passed_on_counts_at_once(harness, write_graph):
    """Before the keeper has told of it; and no longer than until it has."""
    worker, gate = await harness.worker("aggregated"), asyncio.Event()
    worker.script = [harness.answers.events_then(event=gate)]
    routers = await start(harness, write_graph, worker)
    kept = keeper(routers, worker)
    other = routers[kept is routers[0]]
    task = asyncio.ensure_future(other.post(prompt=[1] * 900, stream=True))
    await kept.until(lambda: worker.seen)
    core = other.server.core
    await other.until(lambda: core.entry_queue.peer_tokens(worker.name) == 900)
    await other.until(lambda: not core.sharing._passed_on)
    assert core.entry_queue.peer_tokens(worker.name) == 900
    gate.set()
    await task
    await other.until(lambda: core.entry_queue.peer_tokens(worker.name) == 0)


async def test_a_keeper_that_dies_costs_no_answer(harness, write_graph):
    """Its requests wait at the other router, which keeps all queues from then on."""
    workers = [await harness.worker("aggregated") for _ in range(4)]
    routers = await start(harness, write_graph, *workers)
    one, two = routers
    assert {keeper(routers, each) for each in workers} == {one, two}
    await two.server._http.close(grace_s=0)
    answers = await asyncio.gather(*(one.post(prompt=f"{number} {PROMPT}") for number in range(8)))
    assert {answer.status for answer in answers} == {200}
    await one.until(lambda: not one.server._peers.share_queues)
    assert sum(len(each.seen) for each in workers) == 8


async def test_a_client_chooses_no_worker(harness, write_graph):
    """The header that names one is read from the graph's routers alone, and a client's goes no further."""
    workers = [await harness.worker("aggregated") for _ in range(4)]
    one, _ = await start(harness, write_graph, *workers)
    target = workers[-1]
    named = (JSON, (FORWARDED, b"1"), (WORKER, target.name.encode()))
    for _ in range(3):
        assert (await one.post(prompt=PROMPT, headers=(*named, harness.as_router))).status == 200
    assert len(target.seen) == 3
    for number in range(4):
        prompt = f"{number} {PROMPT}"
        for headers in (named, (JSON, (WORKER, target.name.encode()))):
            assert (await one.post(prompt=prompt, headers=headers)).status == 200
    assert len(target.seen) < 3 + 8
    assert all(WORKER not in seen.headers for each in workers for seen in each.seen)


async def test_prompts_are_told_to_routers_alone(harness, write_graph):
    """Whoever else asks learns nothing of what others have sent."""
    worker = await harness.worker("aggregated")
    one, _ = await start(harness, write_graph, worker)
    assert (await one.post(prompt=PROMPT)).status == 200
    known = (harness.as_router,)
    assert "prompts" not in orjson.loads((await one.get("/peer_load", headers=known)).body)
    told = orjson.loads((await one.get("/peer_load?prompts=0", headers=known)).body)
    assert told["prompts"]["next"] in (0, 1)
    far = await one.get("/peer_load?prompts=" + "9" * 5000, headers=known)
    assert (far.status, "prompts" in orjson.loads(far.body)) == (200, False)
    assert (await one.get("/peer_load?prompts=0")).status == 403
    assert (await one.get("/peer_load", headers=((GRAPH_SECRET, b"guessed"),))).status == 403


async def test_routers_without_queues_of_workers_share_slots(harness, write_graph):
    """A policy that assigns when a worker is free has nothing to keep: each dispatches, to its part of the slots."""
    worker = await harness.worker("aggregated")
    routers = await start_least_loaded(harness, write_graph, worker)
    for router in routers:
        await router.until(lambda router=router: router.server.core.entry_queue._deciders == 2)
        assert (await router.post()).status == 200
    assert [router.server.metrics.arrivals for router in routers] == [1, 1]


async def start_least_loaded(harness, write_graph, worker):
    """Start two busy routers whose policy compares loads."""
    file = write_graph((worker,), ())
    config = {"policy": "least-loaded"}
    options = {"config": config, "disaggregated": False, "ready": False, "statefile": file}
    routers = [await harness.router(**options) for _ in range(2)]
    for router in routers:
        router.server._peers._busy = BusyProcess()
    write_graph((worker,), routers)
    return routers


@pytest.mark.parametrize(
    "prompts",
    [
        b"1",
        b"{}",
        b'{"next":-1,"queued":[]}',
        b'{"next":true,"queued":[]}',
        b'{"next":1,"queued":{}}',
        b'{"next":1,"queued":[["w","AAAAAAAAAAA="]]}',
        b'{"next":1,"queued":[["w","AAAAAAAAAAA=",1]]}',
        b'{"next":1,"queued":[["w","AAAA",""]]}',
        b'{"next":1,"queued":[["w","not base64",""]]}',
        b'{"next":1,"queued":[["w","","' + b"s" * 129 + b'"]]}',
        b'{"next":1,"queued":[["w","' + b"A" * 5824 + b'",""]]}',
        b'{"next":1,"queued":[' + b'["w","",""],' * PROMPTS + b'["w","",""]]}',
    ],
)
def test_prompts_that_are_none_are_passed_over(prompts):
    """Wrong, or more than a router tells."""
    assert read_load(b'{"instance":"x","tokens":{},"prompts":' + prompts + b"}", 0.0) is None


def test_prompts_are_read_as_they_were_told():
    """Keys, session and the number to ask from next."""
    body = (
        b'{"instance":"x","tokens":{},"prompts":{"next":7,"queued":[["w","AQAAAAAAAAACAAAAAAAAAA==","s"]]}}'
    )
    load = read_load(body, 0.0)
    assert load.next_prompt == 7
    assert [(each.worker, each.arrival.chain, each.arrival.session) for each in load.prompts] == [
        ("w", (1, 2), "s")
    ]
