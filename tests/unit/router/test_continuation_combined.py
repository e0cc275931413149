"""Streams that outlive their worker alongside what else holds requests back: tiers, busy thresholds, drains and further routers.

The workers answer by the simulated engine's own parser and formats; what a client gets is held against an undisturbed stream.
"""

import asyncio
from collections import Counter

import orjson
import pytest
import test_response_continuation as responses
from picker_group import cut, start
from router_harness import error_of
from test_stream_continuation import ASKED, STREAMED, answer_to, read

from penstock.api import Role, Tier
from penstock.core.errors import StreamBroken
from penstock.core.http.messages import Responder
from penstock.core.http.sse import EventSplitter, payload
from penstock.router.admission import AdmissionError
from penstock.router.core.retries import RefusalReason
from penstock.router.proxy import wait_comments
from penstock.router.proxy.auth import TierIdentity, TierKeys
from penstock.router.proxy.failures import error_event_of, refusal
from penstock.router.proxy.prompt_cost import PromptCosts

PATH = "/v1/completions"
TYPE = (b"content-type", b"application/json")
KEYS = TierKeys(
    {b"gold": TierIdentity(Tier.PREMIUM, "acme"), b"batch": TierIdentity(Tier.BACKGROUND, "bolt")}
)
GOLD, BATCH = ((TYPE, (b"authorization", b"Bearer " + key)) for key in (b"gold", b"batch"))
DISPLACED = orjson.dumps({"message": "The request is aborted by a higher priority request.", "code": 503})
PATIENT = {"breaker": {"consecutiveFailures": 100}, "retries": {"minPerSecond": 1000}}
BUSY = {"admission": {"mode": "token-capacity"}}
TIERS = {"tiers": {"enabled": True}}


class Speaker:
    """A worker whose streams stop behind some tokens until it is let go (``go``), or dies."""

    def __init__(self, worker, serial, answer=answer_to):
        self.worker, self.serial, self.answer = worker, serial, answer
        self.name = worker.name
        self.go = asyncio.Event()
        self.began = []
        self.refusals = []
        """Bodies of 503s to the next requests."""
        worker.otherwise = self.speak

    async def speak(self, request, responder):
        """Answer one request."""
        if self.refusals:
            responder.send(503, self.refusals.pop(0))
            return
        body = orjson.loads(request.body)
        plain = orjson.dumps({key: value for key, value in body.items() if key != "priority"})
        whole = self.answer(request.path, plain, self.serial)
        responder.start(200)
        responder.write(whole[:1800])
        self.began.append(body)
        left = asyncio.Event()
        responder.on_disconnect(left.set)
        waits = [asyncio.ensure_future(each.wait()) for each in (self.go, left)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if not left.is_set():
            responder.write(whole[1800:])
            responder.end()

    async def die(self):
        """Break all streams off, and listen no more."""
        await self.worker.server.close(grace_s=0)


def speakers(workers, answer=answer_to):
    """Return one speaker for each worker."""
    return [Speaker(each, serial, answer) for serial, each in enumerate(workers)]


async def ask(router, headers=(TYPE,), path=PATH, **fields):
    """Return a stream's bytes."""
    asked = (
        responses.ASKED | {"input": "Tell me of the sea."}
        if path == "/v1/responses"
        else STREAMED | ASKED[path]
    )
    body = orjson.dumps(asked | fields)
    response = await router.client.stream("POST", router.url + path, body=body, headers=headers)
    return b"".join([piece async for piece in response])


async def begun(router, all_speakers, *args, **fields):
    """Return the task of a stream once one of some workers speaks, and that one."""
    counts = [len(each.began) for each in all_speakers]
    task = asyncio.ensure_future(ask(router, *args, **fields))
    await router.until(lambda: task.done() or [len(each.began) for each in all_speakers] != counts)
    (speaker,) = (each for each, count in zip(all_speakers, counts, strict=True) if len(each.began) > count)
    return task, speaker


def is_undisturbed(stream, **fields):
    """Return whether a client got what an undisturbed stream says, its identity aside."""
    expected = read(answer_to(PATH, orjson.dumps(STREAMED | ASKED[PATH] | fields), 0))
    return read(stream) | {"identity": None} == expected | {"identity": None}


async def continued(router, reason="upstream_broken"):
    """Return how many streams continued elsewhere."""
    return await router.metric("penstock_router_stream_continuations_total", reason=reason)


async def lost(router):
    """Return how many streams were lost."""
    return sum(router.server.metrics.lost_streams.values())


def other_of(both, speaker):
    """Return the other one of two."""
    (other,) = (each for each in both if each is not speaker)
    return other


async def test_busy_thresholds_reject_new_requests_and_not_the_rest_of_a_stream(harness):
    """All that is left is above its threshold of KV blocks: a new request gets 503, the stream of the dead worker continues."""
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT | BUSY)
    both = speakers(workers)
    task, speaker = await begun(router, both)
    for each in workers:
        each.kv_usage = "0.95"
    await router.until(lambda: len(router.server.core.busy[Role.AGGREGATED]._busy) == 2)
    assert (await router.post(prompt="new")).status == 503
    other_of(both, speaker).go.set()
    await speaker.die()
    assert is_undisturbed(await task)
    assert (await continued(router), await lost(router)) == (1, 0)
    metrics = router.server.metrics
    assert (metrics.arrivals, metrics.completed, metrics.refused) == (2, 1, 1)


@pytest.mark.parametrize("tiers", [{}, TIERS])
@pytest.mark.parametrize("refusals", [1, 3])
async def test_the_rest_of_a_stream_waits_where_a_worker_has_no_room_for_it(harness, tiers, refusals):
    """Premium displaces the batch stream's rest from the other engine's queue, repeatedly; it is not lost for that."""
    options = {"tier_keys": KEYS} if tiers else {}
    *workers, router = await harness.served(
        "aggregated", "aggregated", config=PATIENT | tiers, speed=10, **options
    )
    both = speakers(workers)
    task, speaker = await begun(router, both, BATCH)
    other = other_of(both, speaker)
    other.refusals = [DISPLACED] * refusals
    other.go.set()
    await speaker.die()
    assert is_undisturbed(await task)
    assert other.began[0].get("priority") == (2 if tiers else None)
    # It may have been tried at the dead one once more.
    assert await continued(router) >= 1
    assert await lost(router) == 0
    assert await router.metric("penstock_router_retries_total", reason="worker_at_capacity") == refusals
    assert router.server.metrics.refused == 0
    if tiers:
        count = router.server.core.tiers.counts[Tier.BACKGROUND]
        assert (count.arrivals, count.rejected, count.shed, count.e2e.total > 0) == (1, 0, 0, True)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_a_stream_whose_rest_no_worker_takes_ends_in_an_error_and_counts_as_lost_alone(
    harness, path, caplog
):
    """The last worker dies and nothing comes in the stream's time: no arrival was turned away, and the tier has one failure."""
    config = PATIENT | TIERS | {"retries": {"continuationWaitSeconds": 1}}
    *workers, router = await harness.served("aggregated", config=config, tier_keys=KEYS, speed=10)
    (speaker,) = speakers(workers)
    task, _ = await begun(router, [speaker], GOLD, path)
    core = router.server.core
    failed = []
    ended, timed_out = core.tiers.monitor.ended, core.tiers.timed_out
    core.tiers.monitor.ended = lambda *args: (failed.append(args), ended(*args))
    core.tiers.timed_out = lambda *args: (failed.append(args), timed_out(*args))
    core.paused = (Role.AGGREGATED,)
    await speaker.die()
    with pytest.raises(StreamBroken):
        await task
    assert router.server.metrics.lost_streams == {"worker_wait": 1}
    (line,) = (record for record in caplog.records if record.message == "stream broken off")
    assert line.keys["why"] == "worker_wait: router.retries.continuationWaitSeconds"
    count, metrics = core.tiers.counts[Tier.PREMIUM], router.server.metrics
    assert (count.arrivals, count.rejected, count.shed, len(failed)) == (1, 0, 0, 1)
    assert (metrics.arrivals, metrics.refused, metrics.queue_timeouts) == (1, 0, 0)
    assert metrics.errors == {"queue_timeout": 1}


async def test_a_client_gets_comments_while_its_stream_waits_for_a_worker(harness, monkeypatch):
    """No balancer cuts a silent connection then; the next worker's first token ends them."""
    monkeypatch.setattr(wait_comments, "COMMENT_REAL_S", 0.05)
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT)
    both, written = speakers(workers), Counter()
    write = Responder.write

    def count(responder, data):
        written[data] += 1
        write(responder, data)

    monkeypatch.setattr(Responder, "write", count)
    task, speaker = await begun(router, both)
    router.server.core.paused = (Role.AGGREGATED,)
    await speaker.die()
    await router.until(lambda: written[wait_comments.COMMENT] >= 3)
    router.server.core.paused = ()
    await router.until(lambda: other_of(both, speaker).began)
    await asyncio.sleep(0.1)
    count_at_first_token = written[wait_comments.COMMENT]
    await asyncio.sleep(0.2)
    assert written[wait_comments.COMMENT] == count_at_first_token
    other_of(both, speaker).go.set()
    said = await task
    assert said.count(wait_comments.COMMENT) == count_at_first_token
    assert is_undisturbed(said.replace(wait_comments.COMMENT, b""))


async def test_within_a_stream_a_rejection_is_an_error_that_clients_look_for(harness):
    """OpenAI's clients read ``error``; the flat body of a rejection would pass for a chunk."""
    config = PATIENT | {"limits": {"requestTimeoutSeconds": 3}}
    *workers, router = await harness.served("aggregated", "aggregated", config=config, speed=10)
    both = speakers(workers)
    stream = await router.stream(**STREAMED | ASKED[PATH])
    await router.until(lambda: any(each.began for each in both))
    (speaker,) = (each for each in both if each.began)
    other_of(both, speaker).refusals = [DISPLACED] * 1000
    await speaker.die()
    events = [payload(event) for event in EventSplitter().feed(await router.broken(stream))]
    assert orjson.loads(events[-1])["error"]["message"]
    assert router.server.metrics.lost_streams == {"request_time": 1}
    assert router.server.metrics.rejections == {}


def test_a_rejection_s_event_has_the_form_of_other_errors():
    """And of Anthropic's for its own path; the answer to a request without a beginning stays flat, as documented."""
    rejected = refusal(AdmissionError(RefusalReason.ALL_BUSY, "All workers are busy"))
    assert orjson.loads(rejected.body)["message"] == "All workers are busy"
    error = orjson.loads(payload(error_event_of(PATH, rejected)))["error"]
    assert (error["message"], error["code"]) == ("All workers are busy", "all_workers_busy")
    error = orjson.loads(payload(error_event_of("/v1/messages", rejected)))["error"]
    assert error["message"] == "All workers are busy"


@pytest.mark.parametrize("is_drained", [False, True])
async def test_a_response_that_decode_alone_answers_is_one_arrival_wherever_it_goes_on(harness, is_drained):
    """Its rest is neither counted for its tier again nor shed nor rejected: both would end what the client has begun to read."""
    config = PATIENT | TIERS | BUSY | {"drain": {"migrateAfterSeconds": 1}}
    *workers, router = await harness.served(
        "prefill", "decode", "decode", config=config, tier_keys=KEYS, speed=10
    )
    both = speakers(workers[1:], responses.answer_to)
    task, speaker = await begun(router, both, BATCH, "/v1/responses")
    core = router.server.core
    core.tiers.monitor.sheds = lambda tier: tier is Tier.BACKGROUND
    other_of(both, speaker).go.set()
    if is_drained:
        router.server.admission.set_drained(speaker.name, drained=True)
    else:
        for each in workers[1:]:
            each.kv_usage = "0.95"
        await router.until(lambda: len(core.busy[Role.DECODE]._busy) == 2)
        await speaker.die()
    last = responses.read(await task)[-1]
    assert last["response"]["usage"]["output_tokens"] == 24
    assert await continued(router, "drain" if is_drained else "upstream_broken") == 1
    count, metrics = core.tiers.counts[Tier.BACKGROUND], router.server.metrics
    assert (count.arrivals, count.shed, count.rejected) == (1, 0, 0)
    assert (metrics.arrivals, metrics.completed, metrics.refused, metrics.lost_streams) == (1, 1, 0, {})


async def test_the_rest_of_a_stream_weighs_what_its_worker_computes(harness):
    """The prompt and what was said; the estimate of a token's bytes is learnt from the client's prompt alone."""
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT)
    both = speakers(workers)
    task, speaker = await begun(router, both)
    other = other_of(both, speaker)
    pool, estimate = router.server.core.pool, router.server.context.prompt_costs
    first, ratio = pool.get(speaker.name), estimate.bytes_per_token
    await router.until(lambda: first.inflight_tokens > first.inflight_requests)
    await speaker.die()
    await router.until(lambda: other.began)
    rest = pool.get(other.name)
    said = ASKED[PATH]["max_tokens"] - other.began[0]["max_tokens"]
    prompt = len(ASKED[PATH]["prompt"])
    await router.until(lambda: rest.inflight_tokens > said)
    assert said > 4
    assert rest.inflight_tokens >= estimate.estimate(prompt) + said
    other.go.set()
    assert is_undisturbed(await task)
    learnt = PromptCosts()
    learnt.learn(
        prompt, (), read(answer_to(PATH, orjson.dumps(STREAMED | ASKED[PATH]), 0))["counts"]["prompt_tokens"]
    )
    assert (ratio, estimate.bytes_per_token) == (PromptCosts().bytes_per_token, learnt.bytes_per_token)


def total(routers, name):
    """Return the sum of a counter over routers."""
    return sum(getattr(each.server.metrics, name) for each in routers)


def went_on(routers):
    """Return the reasons for which streams continued, over routers."""
    return sum((each.server.metrics.continuations for each in routers), Counter())


async def streams_of(routers, three, per_router):
    """Return this many streams of each router, premium and background in turn, all begun."""
    tasks = []
    for number in range(per_router):
        for router in routers:
            task, _ = await begun(
                router, three, (GOLD, BATCH)[number % 2], prompt=f"Tell me of sea {number}. "
            )
            tasks.append((task, f"Tell me of sea {number}. "))
    return tasks


async def group(harness, tmp_path, count):
    """Return routers that know each other, tiers and thresholds on, before three workers."""
    workers = [await harness.worker("aggregated") for _ in range(3)]
    config = PATIENT | TIERS | BUSY | {"drain": {"migrateAfterSeconds": 1}, "policy": "round-robin"}
    routers = await start(harness, *workers, count=count, config=config, tier_keys=KEYS, speed=10)
    return workers, speakers(workers), routers


@pytest.mark.parametrize("picker_dies", [False, True])
async def test_two_routers_carry_their_streams_over_a_death_and_a_drain_at_once(
    harness, tmp_path, picker_dies
):
    """Above the third one's thresholds the dead worker's streams continue, the draining one's wait; each client gets its text.

    What is in flight, rejected, continued and completed adds up over the routers, the picker's death included.
    """
    workers, three, routers = await group(harness, tmp_path, 3 if picker_dies else 2)
    picker, *relays = routers
    tasks = await streams_of(relays if picker_dies else routers, three, 6)
    spoke = {each.name: len(each.began) for each in three}
    dead, drained, left = three
    for each in workers:
        each.kv_usage = "0.95"
    entry = Role.AGGREGATED
    await picker.until(lambda: all(len(each.server.core.busy[entry]._busy) == 3 for each in routers))
    # A new request of a lower tier waits for KV blocks, in vain; premium would pass the threshold.
    refused = await relays[0].post(prompt="new", headers=BATCH)
    assert (refused.status, error_of(refused)["code"]) == (503, "queue_timeout")
    left.go.set()
    if picker_dies:
        await cut(picker)
    harness.write_state(workers, routers, **{drained.name: "draining"})
    lively = relays if picker_dies else routers
    await relays[0].until(
        lambda: all(each.server.core.pool.get(drained.name).spec.draining for each in lively)
    )
    await dead.die()
    await relays[0].until(lambda: went_on(lively)["upstream_broken"] >= spoke[dead.name])
    assert went_on(lively)["drain"] == 0
    left.worker.kv_usage = "0.2"
    for task, prompt in tasks:
        assert is_undisturbed(await task, prompt=prompt)
    for router in lively:
        await router.assert_idle()
    assert total(lively, "arrivals") == len(tasks) + 1
    assert total(lively, "completed") == len(tasks)
    assert (total(lively, "refused"), total(lively, "queue_timeouts")) == (0, 1)
    assert not any(each.server.metrics.lost_streams for each in lively)
    assert went_on(lively) == {"drain": spoke[drained.name], "upstream_broken": spoke[dead.name]}
    assert len(left.began) == len(tasks)
    if not picker_dies:
        counts = picker.server.core.tiers.counts
        ended = {tier: counts[tier].e2e for tier in (Tier.PREMIUM, Tier.BACKGROUND)}
        await picker.until(lambda: sum(each.cumulative()[-1] for each in ended.values()) == len(tasks))
        of_tiers = {tier: (counts[tier].arrivals, counts[tier].rejected) for tier in ended}
        assert of_tiers == {Tier.PREMIUM: (6, 0), Tier.BACKGROUND: (7, 1)}
