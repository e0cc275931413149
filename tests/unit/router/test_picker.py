"""Several routers of one graph: one picks the workers for all, and its end costs only the streams that it relays itself."""

import asyncio

import orjson
import pytest
from picker_group import cut, group_of, picker_among, start, stopwatch

from penstock.api import Tier
from penstock.router.picker import group
from penstock.router.policy.busy import BusyThresholds
from penstock.router.thresholds import GraphThresholds


async def test_the_oldest_picks_for_all_and_each_relays_its_own(harness):
    """A request is an arrival where it came in; what is in flight is counted once, by the picker."""
    worker = await harness.worker("aggregated")
    gate = worker.hold_stream()
    one, two = await start(harness, worker)
    response = await two.begun_stream()
    labels = {"worker": worker.name, "role": "aggregated"}
    inflight = "penstock_router_worker_inflight_requests"
    assert [await each.metric(inflight, **labels) for each in (one, two)] == [1, 0]
    assert [await each.metric("penstock_router_is_picker") for each in (one, two)] == [1, 0]
    gate.set()
    assert await response.read(limit_bytes=1000) == harness.done
    for router in (one, two):
        await router.assert_idle()
    assert [each.server.metrics.arrivals for each in (one, two)] == [0, 1]
    assert await two.metric("penstock_router_picks_total", by="other") == 1


async def test_both_stages_and_the_tiers_are_the_pickers(harness):
    """Prefill and decode are picked by it, and what became of a request counts for its tier there."""
    pair = await harness.pair()
    config = {"tiers": {"enabled": True}}
    one, two = await start(harness, *pair, disaggregated=True, config=config)
    assert (await two.post(stream=True, max_tokens=3)).body.endswith(harness.done)
    for router in (one, two):
        await router.assert_idle()
    assert [len(each.seen) for each in pair] == [1, 1]
    assert await two.metric("penstock_router_picks_total", by="other") == 2
    counts = [router.server.core.tiers.counts[Tier.STANDARD] for router in (one, two)]
    await one.until(lambda: counts[0].e2e.total > 0)
    numbers = [(each.arrivals, each.ttft.cumulative()[-1], each.e2e.cumulative()[-1]) for each in counts]
    assert numbers == [(1, 1, 1), (0, 0, 0)]


async def test_a_failure_at_a_relay_is_known_to_the_picker(harness):
    """Its circuit opens by what another router's requests have met, and the retry goes elsewhere."""
    bad, good = await harness.worker("aggregated"), await harness.worker("aggregated")
    bad.otherwise = harness.answers.drop()
    breaker = {"consecutiveFailures": 2, "maxEjectedFraction": 1}
    one, two = await start(harness, bad, good, config={"breaker": breaker})
    for number in range(8):
        assert (await two.post(prompt=f"{number} " * 50)).status == 200
    assert one.server.core.pool.get(bad.name).breaker.openings >= 1
    assert not one.server.core.pool.get(good.name).is_failing


async def test_a_client_that_leaves_frees_its_place(harness):
    """While it waits at the picker, and while it runs."""
    worker = await harness.worker("aggregated")
    config = {"prefillQueue": {"workerTokens": 1}}
    one, two = await start(harness, worker, config=config)
    running = await two.hanging(worker)
    waiting = asyncio.create_task(two.post())
    await one.until(lambda: one.server.core.entry_queue.waiting == 1)
    for task in (waiting, running):
        task.cancel()


@pytest.mark.parametrize("policy", ["prefix-cost", "least-loaded"])
async def test_a_picker_s_death_costs_other_routers_nothing(harness, policy):
    """What runs continues, what waits is dispatched by the successor, which knows what is in flight."""
    worker = await harness.worker("aggregated")
    gate = worker.hold_stream()
    config = {"policy": policy, "prefillQueue": {"workerTokens": 1}}
    one, two, three = await start(harness, worker, count=3, config=config)
    response = await three.begun_stream()
    blocked = worker.hold()
    tasks = [asyncio.create_task(three.post(stream=True)), asyncio.create_task(three.post(max_tokens=2))]
    count = 2 if policy == "prefix-cost" else 3
    await two.until(lambda: len(worker.seen) == count)

    await cut(one)
    await two.until(lambda: picker_among([two, three]) is two)
    inflight = two.server.core.pool.get(worker.name)
    await two.until(lambda: inflight.inflight_requests == 2)
    blocked.set()
    gate.set()

    assert [answer.status for answer in await asyncio.gather(*tasks)] == [200, 200]
    assert await response.read(limit_bytes=1000) == harness.done


@pytest.mark.parametrize("came_to", [0, 2])
async def test_a_successor_knows_where_prompts_were(harness, came_to):
    """One that came to a third router, or to the dead picker itself, is found at its worker again."""
    workers = [await harness.worker("aggregated") for _ in range(4)]
    one, two, three = await start(harness, *workers, count=3)
    prompt = list(range(3000))
    assert (await [one, two, three][came_to].post(prompt=prompt, max_tokens=1)).status == 200
    (first,) = [each for each in workers if each.seen]

    queue = two.server.core.entry_queue
    await two.until(lambda: queue.workers.index_of(first.name).count > 0)
    await cut(one)
    await two.until(lambda: picker_among([two, three]) is two)
    assert (await two.post(prompt=prompt, max_tokens=1)).status == 200
    assert len(first.seen) == 2


async def test_a_router_that_stops_hands_on_at_once(harness):
    """Its own stream continues; the next request is picked by the other."""
    worker = await harness.worker("aggregated")
    gate = worker.hold_stream()
    one, two = await start(harness, worker)
    response = await one.begun_stream()
    closing = asyncio.create_task(one.server.close())
    await two.until(lambda: group_of(two).is_picker)
    inflight = two.server.core.pool.get(worker.name)
    await two.until(lambda: inflight.inflight_requests == 1)
    assert (await two.post()).status == 200
    gate.set()
    assert await response.read(limit_bytes=1000) == harness.done
    one.client.close_idle(one.url)
    await closing


class Wire:
    """The way from one router to another; while it is cut nothing arrives, the end of a connection neither."""

    name, role = "wire", "router"

    def __init__(self, target):
        self.target = target
        self.whole = asyncio.Event()
        self.whole.set()
        self.tasks = []

    async def start(self, harness):
        """Listen."""
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        harness._closers.append(self.close)
        return self

    async def close(self):
        """End all; what waits for a wire that is still cut continues, and ends."""
        self.whole.set()
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def serve(self, reader, writer):
        """Connect both."""
        await self.whole.wait()
        there = await asyncio.open_connection("127.0.0.1", self.target.server.port)
        self.tasks += [
            asyncio.create_task(self.pass_on(*pair)) for pair in ((reader, there[1]), (there[0], writer))
        ]

    async def pass_on(self, reader, writer):
        """Pass on what comes."""
        try:
            while data := await reader.read(65536):
                await self.whole.wait()
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            await self.whole.wait()
            writer.transport.abort()


async def wired(harness, tmp_path, worker):
    """Start three routers that hear each other by wires of their own; return the picker, the others, and the wires of each pair."""
    routers, wires = [], {}
    for number in range(3):
        file = harness.write_state([worker], path=tmp_path / f"{number}.json")
        routers.append(await harness.router(disaggregated=False, ready=False, statefile=file))
    for number, one in enumerate(routers):
        others = [other for other in routers if other is not one]
        wires |= {(one, other): await Wire(other).start(harness) for other in others}
        heard = [wires[one, other] for other in others]
        harness.write_state([worker], [one, *heard], path=tmp_path / f"{number}.json")
    await routers[0].until(lambda: picker_among(routers))
    for router in routers:
        await router.until(lambda router=router: not router.server.admission.problems())
    picker = picker_among(routers)
    return picker, [router for router in routers if router is not picker], wires


@pytest.mark.parametrize("count", [1, 2], ids=["from one", "from all"])
async def test_a_picker_that_is_cut_off_costs_no_stream_and_less_than_two_seconds(harness, tmp_path, count):
    """Streams continue, requests are served meanwhile, each once; then all follow one again, and it knows what runs."""
    worker = await harness.worker("aggregated")
    gates = [worker.hold_stream() for _ in range(2)]
    first, others, wires = await wired(harness, tmp_path, worker)
    routers = [first, *others]
    streams = [await router.begun_stream() for router in routers[:2]]
    term = group_of(first)._leader.term
    cut = [each for pair, each in wires.items() if first in pair and set(pair) & set(others[:count])]
    for each in cut:
        each.whole.clear()

    elapsed = stopwatch(first)
    answers = await asyncio.gather(*(router.post(prompt=f"{at}") for at, router in enumerate(routers)))
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert elapsed() < 2.0
    apart = others[0] if count == 1 else first
    rest = [router for router in routers if router is not apart]
    await first.until(lambda: group_of(apart)._leader is None and picker_among(rest))
    picker = picker_among(rest)
    assert (picker is first, group_of(picker)._leader.term) == (count == 1, term + count - 1)
    assert (await apart.post(prompt="alone")).status == 200

    for each in cut:
        each.whole.set()
    await picker.until(lambda: picker_among(routers) is picker)
    await picker.until(lambda: picker.server.core.pool.get(worker.name).inflight_requests == 2)
    for gate, stream in zip(gates, streams, strict=True):
        gate.set()
        assert await stream.read(limit_bytes=1000) == harness.done
    assert len(worker.seen) == 6


async def test_routers_without_a_secret_pick_each_for_itself(harness):
    """A client could be taken for the other one."""
    worker = await harness.worker("aggregated")
    file = harness.write_state([worker], [])
    options = {"disaggregated": False, "ready": False, "statefile": file, "graph_secret": b""}
    routers = [await harness.router(**options) for _ in range(2)]
    harness.write_state([worker], routers)
    for router in routers:
        await router.until(lambda router=router: not router.server.admission.problems())
        await router.until(lambda router=router: len(router.server.context.discovery.routers) == 2)
        assert (await router.post()).status == 200
        assert router.server._group is None


@pytest.mark.parametrize("policy", ["prefix-cost", "dualmap"])
async def test_a_router_rejects_for_what_another_has_sent(harness, policy):
    """1,200 tokens by one router are above 1,000: all reject, until they are computed."""
    worker = await harness.worker("aggregated")
    gate = worker.hold()
    admission = {"mode": "token-capacity", "activePrefillTokensThreshold": 1000}
    one, two = await start(harness, worker, config={"policy": policy, "admission": admission})
    task = asyncio.ensure_future(two.post(prompt=[1] * 1200, stream=True))
    await one.until(lambda: worker.seen)
    assert [(await each.post(max_tokens=1)).status for each in (one, two)] == [503, 503]
    gate.set()
    await task
    assert [(await each.post(max_tokens=1)).status for each in (one, two)] == [200, 200]


# ---------------------------------------------------------------------- thresholds


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
async def test_thresholds_set_at_any_router_hold_for_the_graph(harness, asked):
    """Whichever is asked, both show them and both reject by them, the picker included."""
    worker = await harness.worker("aggregated")
    worker.kv_usage = "0.9"
    routers = await start(harness, worker)
    await set_threshold(routers[asked], active_decode_blocks_threshold=0.5)
    for router in routers:
        await until_thresholds(router, 0.5, None)
        await router.until(lambda router=router: router.server.core.busy[router.server.core.entry].is_any)
        assert (await router.post(max_tokens=1)).status == 503

    await set_threshold(routers[1 - asked], active_decode_blocks_threshold=None)
    for router in routers:
        await until_thresholds(router, None, None)
        assert (await router.post(max_tokens=1)).status == 200


async def test_thresholds_that_are_set_at_once_at_two_routers_both_hold(harness):
    """Once both are answered, each router has both: neither is lost with the router that answered it."""
    worker = await harness.worker("aggregated")
    one, two = await start(harness, worker)
    await asyncio.gather(
        set_threshold(one, active_decode_blocks_threshold=0.5),
        set_threshold(two, active_prefill_tokens_threshold=700),
    )
    assert [await thresholds_of(router) for router in (one, two)] == [(0.5, 700)] * 2


async def test_a_change_that_no_other_router_confirms_is_answered_503(harness, monkeypatch):
    """It holds here alone, and would be lost with this router."""
    monkeypatch.setattr(group, "CONFIRM_REAL_S", 0.3)
    worker = await harness.worker("aggregated")
    one, two = await start(harness, worker)
    await one.until(lambda: group_of(one)._alive())
    monkeypatch.setattr(GraphThresholds, "received", lambda *_: False)
    raw = orjson.dumps({"model": "llama", "active_prefill_tokens_threshold": 700})
    answer = await one.post("/busy_threshold", raw=raw)
    assert (answer.status, b"no other one has confirmed" in answer.body) == (503, True)
    monkeypatch.undo()
    await set_threshold(one, active_prefill_tokens_threshold=700)
    assert await thresholds_of(two) == (None, 700)


async def test_thresholds_outlive_the_router_that_was_asked(harness):
    """The survivor has them, and a router that joins has them before its first request."""
    worker = await harness.worker("aggregated")
    one, two = await start(harness, worker)
    await set_threshold(one, active_prefill_tokens_threshold=700)
    await until_thresholds(two, None, 700)
    await one.end()

    options = {"disaggregated": False, "ready": False, "statefile": harness.statefile}
    joined = await harness.router(**options)

    assert await thresholds_of(two) == (None, 700)
    assert await thresholds_of(joined) == (None, 700)
