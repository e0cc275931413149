"""Placing policies before real workers' stand-ins: pairs, queues of single workers, and counters back at zero."""

import asyncio

import orjson
import pytest

from penstock.api import Role, RouterConfig
from penstock.router.admission import Admission, AdmissionError
from penstock.router.core.build import SPLIT, build_router
from penstock.router.core.retries import RefusalReason
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.prefixes import Prefix
from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.prefix import read_prompt

PLACING = ("prefix-cost", "dualmap", "cache-affinity", "min-ttft", "preble", "kv-cost")


class World:
    """An admission over workers that tests change by hand, and a clock that they move."""

    def __init__(self, *, policy="dualmap", then=None, workers=("a", "b"), **queue):
        self.now_s = 0.0
        config = RouterConfig.model_validate(
            {"policy": policy, "prefillQueue": {"workerTokens": 100, **queue}}
        )
        core = build_router(config, SPLIT)
        self.fleet = core.pool
        if then is None:
            del core.queues[Role.DECODE]
        self.admission = Admission(core, lambda: self.now_s)
        self.queue = core.entry_queue
        self.set(*workers)

    def set(self, *names, decode=True, **changes):
        """Say which prefill workers there are; ``changes`` are incarnations by name."""
        specs = [
            WorkerSpec(name, Role.PREFILL, "http://x", supervised=True, incarnation=changes.get(name, "1"))
            for name in names
        ]
        decodes = [WorkerSpec("d", Role.DECODE, "http://d", supervised=True, ready=decode)]
        self.admission.set_workers([*specs, *decodes])

    def sleep(self, for_s=0.0):
        """Stop all workers, for some time."""
        self.admission.set_workers([])
        self.now_s += for_s

    def enter(self, *chain):
        """Begin to wait for a worker."""
        return asyncio.ensure_future(self.admission.wait(Role.PREFILL, Arrival(chain, 100)))

    async def entered(self, *chain):
        """Return a request that waits for a worker."""
        waiting = self.enter(*chain)
        await asyncio.sleep(0)
        return waiting

    async def at(self, now_s):
        """Let time pass."""
        self.now_s = now_s
        self.admission.tick()
        await asyncio.sleep(0)

    def finish(self, assignment):
        """Let a worker answer right."""
        assignment.succeeded()
        self.admission.release(assignment)

    def assert_idle(self):
        """Nothing waits and nothing is under way."""
        assert (len(self.queue), self.queue.tokens, self.queue.oldest_s(99.0)) == (0, 0, 0.0)
        assert {(each.inflight_requests, each.inflight_tokens) for each in self.fleet} == {(0, 0)}


def asleep(**queue):
    """Return a world without workers, whose requests wait for some to be started."""
    world = World(then=True, workers=(), maxWaitSeconds=10, **queue)
    world.sleep()
    return world


async def served(task):
    """Return the stay of a request that must have a worker by now."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert task.done()
    return task.result()


@pytest.mark.parametrize("too_late", [False, True])
async def test_who_leaves_takes_nothing_with_it(too_late):
    """Whether it still waits, or has been given a worker in the same round."""
    world = World(workers=("a",))
    running, waiting = world.enter(1), world.enter(2)
    stay = await served(running)
    await asyncio.sleep(0)
    if too_late:
        world.finish(stay)
    waiting.cancel()
    if not too_late:
        # Its future is cancelled and it has had no time to leave the queue.
        world.finish(stay)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    world.assert_idle()


async def test_a_worker_that_was_away_keeps_its_prefixes_but_not_over_a_restart():
    """The same process is found again by its prefixes; a new one has an empty cache."""
    world = World(policy="preble")
    warm = await served(world.enter(1, 2, 3))
    home = warm.worker.name
    world.admission.prefilled(warm)
    world.finish(warm)

    def held():
        return world.queue.workers.index_of(home).held(Prefix((1, 2, 3)))

    world.admission.set_drained(home, drained=True)
    world.admission.set_drained(home, drained=False)
    assert held() == 3
    world.set("a", "b", **{home: "2"})
    assert held() == 0


# ---------------------------------------------------------------------- prefix keys


def keys(path="/v1/completions", **body):
    """Return the prefix keys of a request."""
    raw = orjson.dumps({"model": "m", **body})
    return read_prompt(parse_completion(path, b"application/json", raw, model="m")).chain


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("", 0),
        ("x", 1),
        ("x" * 256, 1),
        ("x" * 257, 2),
        ("x" * 2048, 8),
        ("é" * 2048, 9),
        (["x" * 1024, "y" * 1025], 9),
        (list(range(513)), 2),
        ([list(range(512)), [1]], 1),
        ([-1], 0),
        ([1 << 40], 0),
        ([["a"]], 0),
    ],
)
def test_prompts_of_all_kinds_have_a_key_per_block(prompt, count):
    """512 tokens or 2,048 bytes each, the first 2,048 bytes in eight parts; ids that are none have no keys."""
    assert len(keys(prompt=prompt)) == count


def test_a_cache_salt_sets_prompts_apart():
    """Workers do not share blocks between salts, so neither do keys."""
    assert keys(prompt="x" * 100, cache_salt="one") != keys(prompt="x" * 100)


# ---------------------------------------------------------------------- the whole router


def config(policy, **queue):
    """Return a router section."""
    return {"policy": policy, "prefillQueue": queue}


@pytest.mark.parametrize("policy", PLACING)
async def test_prefills_of_one_prefix_meet(harness, policy):
    """Disaggregated: one prefill worker sees all prompts of a prefix, and both stages are counted out."""
    *prefills, decode, router = await harness.served(*["prefill"] * 4, "decode", config=config(policy))
    prompt = "shared " * 1000
    for number in range(6):
        assert (await router.post(prompt=f"{prompt}{number}")).status == 200

    assert sorted(len(each.seen) for each in prefills) == [0, 0, 0, 6]
    assert len(decode.seen) == 6


async def test_a_session_stays_where_it_began(harness):
    """Equal values of the header named in the graph keep to one worker, whatever their prompts."""
    sessions = {"policy": "min-ttft", "sessionHeader": "X-Session"}
    *workers, router = await harness.served(*["aggregated"] * 4, config=sessions)
    for number in range(12):
        session = b"one" if number % 2 else b"other"
        headers = ((b"content-type", b"application/json"), (b"x-session", session))
        assert (await router.post(prompt=f"{number}" * 3000, headers=headers)).status == 200

    assert sorted(len(each.seen) for each in workers) == [0, 0, 6, 6]


async def test_a_streams_first_token_makes_room(harness):
    """Aggregated: the next prompt is sent while the first answer is still being streamed."""
    worker, router = await harness.served("aggregated", config=config("dualmap", workerTokens=1))
    end = worker.hold_stream()
    stream = await router.stream(prompt="x" * 400)
    assert (await router.post(prompt="y" * 400)).status == 200

    end.set()
    assert await stream.read(limit_bytes=1000)


async def test_a_prompt_without_its_first_token_keeps_the_worker(harness):
    """Aggregated: until then the next one waits, and shows in the queue."""
    worker, router = await harness.served("aggregated", config=config("dualmap", workerTokens=1))
    first = await router.hanging(worker, prompt="x" * 400)
    second = asyncio.ensure_future(router.post(prompt="y" * 400))
    await router.until(lambda: len(router.server.core.entry_queue) == 1)
    shown = orjson.loads((await router.get("/workers")).body)["prefill_queue"]
    assert (shown["requests"], shown["tokens"]) == (1, 100)

    first.cancel()
    assert (await second).status == 200


async def test_decode_workers_are_chosen_by_free_kv(harness):
    """The second stage of a placing policy looks at free KV, not at prefixes."""
    prefill = await harness.worker("prefill")
    decodes = [await harness.worker("decode") for _ in range(2)]
    decodes[0].kv_usage = "0.9"
    router = await harness.router(prefill, *decodes, config=config("dualmap"))
    fleet = router.server.core.pool
    await router.until(lambda: all(fleet.get(each.name).kv_usage_fraction is not None for each in decodes))
    for _ in range(4):
        assert (await router.post()).status == 200

    assert [len(each.seen) for each in decodes] == [0, 4]


async def test_a_worker_that_leaves_the_statefile_loses_its_queue(harness):
    """Real requests that wait for it are served by the other one."""
    first, second = [await harness.worker("aggregated") for _ in range(2)]
    harness.write_state([first])
    router = await harness.router(
        statefile=harness.statefile, disaggregated=False, config=config("dualmap", workerTokens=1)
    )
    held = await router.hanging(first, prompt="x" * 400)
    waiting = [asyncio.ensure_future(router.post(prompt="y" * 400)) for _ in range(3)]
    await router.until(lambda: len(router.server.core.entry_queue) == 3)
    harness.write_state([second])

    assert {(await each).status for each in waiting} == {200}
    assert len(second.seen) == 3
    held.cancel()


async def test_with_max_wake_seconds_requests_wait_for_workers_that_are_started_for_them():
    """Ready and not refused without any worker; up to the wake time while none serves, then the usual wait counts."""
    world = asleep(maxWakeSeconds=100)
    assert world.admission.problems() == []
    first, late = world.enter(1), world.enter(2)
    await asyncio.sleep(0)
    assert not first.done()
    await world.at(99.0)
    assert not first.done()
    world.set("a")
    held = await served(first)
    await world.at(108.9)
    assert not late.done(), "ten seconds from when workers came, not from when it did"
    await world.at(109.0)
    with refused(RefusalReason.QUEUE_TIMEOUT):
        await late
    world.finish(held)
    world.assert_idle()


async def test_nobody_waits_longer_than_max_wake_seconds_for_workers():
    """Workers that never come: refused at the bound, as it is without the option at once."""
    world = asleep(maxWakeSeconds=100)
    waiting = await world.entered(1)
    await world.at(100.0)
    with refused(RefusalReason.QUEUE_TIMEOUT):
        await waiting
    world = World(then=True, workers=())
    world.sleep()
    with refused(RefusalReason.NO_WORKER):
        await world.enter(1)
    assert world.admission.problems()


def refused(reason):
    """Expect that a request gets no worker for a reason."""
    return pytest.raises(AdmissionError, check=lambda error: error.reason is reason)


async def wakes(world, took_s, times, *, leaves=False):
    """Let a graph sleep and come back for a request, this often and so slowly; its client may leave meanwhile."""
    for _ in range(times):
        world.set("a")
        world.admission.tick()
        world.sleep(1000.0)
        first = await world.entered(1)
        world.now_s += took_s
        if leaves:
            first.cancel()
            await asyncio.wait([first])
        world.set("a")
        if not leaves:
            world.finish(await served(first))
    world.sleep(1000.0)


async def test_the_wait_for_workers_is_learnt_from_the_last_times_they_came():
    """Three wake-ups of 40 s: a request waits twice that and no more, and is told what another start may take."""
    world = asleep(maxWakeSeconds=600)
    await wakes(world, 40.0, 2)
    assert world.admission.core.max_startup_wait_s == 600.0
    await wakes(world, 40.0, 1)
    assert world.admission.core.max_startup_wait_s == 80.0
    waiting = await world.entered(1)
    await world.at(world.now_s + 79.9)
    assert not waiting.done()
    await world.at(world.now_s + 0.1)
    with refused(RefusalReason.QUEUE_TIMEOUT) as told:
        await waiting
    assert told.value.retry_after_s == pytest.approx(80.0), "as long again as it has taken"
    world.set("a")
    assert world.admission.core.max_startup_wait_s == 160.0, "the slow one counts"


async def test_the_first_start_of_a_graph_teaches_nothing():
    """Its workers were starting before any request came, for who knows how long."""
    world = asleep(maxWakeSeconds=600)
    first = await world.entered(1)
    world.now_s = 2.0
    world.set("a")
    world.finish(await served(first))
    await wakes(world, 40.0, 2)
    assert world.admission.core.wake.slowest_s is None


async def test_a_request_that_no_start_can_serve_in_time_is_told_at_once_when_to_come():
    """Workers that need 120 s at least, requests that may wait 100: no client is kept waiting for nothing."""
    world = asleep(maxWakeSeconds=100)
    await wakes(world, 120.0, 3, leaves=True)
    with refused(RefusalReason.NO_WORKER) as told:
        await world.enter(1)
    assert told.value.retry_after_s == pytest.approx(120.0)
    world.now_s += 30.0
    late = await world.entered(1)
    assert not late.done(), "90 s are left of the start that the first one has caused"
    world.set("a")
    world.finish(await served(late))
    world.assert_idle()


async def test_a_full_queue_says_when_workers_are_expected():
    """One may wait, the second comes ten seconds into a start of forty: thirty are left."""
    world = asleep(maxWakeSeconds=600, maxRequests=1)
    await wakes(world, 40.0, 3)
    first = await world.entered(1)
    world.now_s += 10.0
    with refused(RefusalReason.QUEUE_FULL) as told:
        await world.enter(2)
    assert told.value.retry_after_s == pytest.approx(30.0)
    world.set("a")
    world.finish(await served(first))


async def test_the_loss_of_single_workers_teaches_nothing_of_starts():
    """Prefill is lost and comes back within two seconds, alongside a decode worker: no start from nothing."""
    world = World(then=True, maxWaitSeconds=10, maxWakeSeconds=600)
    for _ in range(4):
        world.admission.tick()
        world.set()
        waiting = await world.entered(1)
        world.now_s += 2.0
        world.set("a")
        world.finish(await served(waiting))
    assert world.admission.core.max_startup_wait_s == 600.0
