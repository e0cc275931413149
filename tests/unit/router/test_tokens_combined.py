"""Streams that continue by tokens together with priority tiers, several routers, a drain's move and a role switch.

The workers answer by the simulated engine's own parser and formats; what a client gets is compared with an undisturbed stream.
"""

import asyncio

import orjson
import pytest
from picker_group import start
from test_continuation_by_tokens import CHATS, COMPLETIONS, TOKENS, ids_of
from test_continuation_combined import (
    BATCH,
    DISPLACED,
    GOLD,
    KEYS,
    PATIENT,
    TIERS,
    TYPE,
    ask,
    begun,
    continued,
    is_undisturbed,
    lost,
    other_of,
    speakers,
    total,
    went_on,
)
from test_stream_continuation import ASKED, STREAMED, answer_to, read

from penstock.api import Role

BY_TOKENS = PATIENT | {"retries": {"minPerSecond": 1000, "continueBy": "tokens"}}
MOVES = {"drain": {"migrateAfterSeconds": 1}}
PATHS = [COMPLETIONS, CHATS]


def check_continues_by_tokens(first, rest):
    """The next worker gets ids: those of the prompt and as many of the response as the token limit lacks."""
    assert first["return_token_ids"] is True
    assert rest["return_token_ids"] is True
    assert isinstance(rest["prompt"], list)
    assert "messages" not in rest
    assert 0 < rest["max_tokens"] < TOKENS


def expected_of(path, **fields):
    """Return what a client reads of an undisturbed stream, without its identity."""
    return read(answer_to(path, orjson.dumps(STREAMED | ASKED[path] | fields), 0)) | {"identity": None}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("headers", "priority"), [(GOLD, None), (BATCH, 2)])
async def test_a_stream_keeps_its_tier_when_it_continues_by_tokens(harness, path, headers, priority):
    """Its rest, a completion of ids whatever the API, has the tier's priority, and a refusal by a full worker does not end it."""
    *workers, router = await harness.served(
        "aggregated", "aggregated", config=BY_TOKENS | TIERS, tier_keys=KEYS, speed=10
    )
    both = speakers(workers)
    task, speaker = await begun(router, both, headers, path)
    other = other_of(both, speaker)
    other.refusals = [DISPLACED]
    other.go.set()
    await speaker.die()

    got = await task
    assert read(got) | {"identity": None} == expected_of(path)
    assert ids_of(got) == []
    check_continues_by_tokens(speaker.began[0], other.began[0])
    assert [each.get("priority") for each in (speaker.began[0], other.began[0])] == [priority, priority]
    assert await lost(router) == 0


async def _receive(router, path, received):
    """Add the parts of a stream, with the client's own ids, to ``received`` as they arrive."""
    body = orjson.dumps(STREAMED | ASKED[path] | {"return_token_ids": True})
    response = await router.client.stream("POST", router.url + path, body=body, headers=(TYPE,))
    async for piece in response:
        received += piece


@pytest.mark.parametrize("path", PATHS)
async def test_a_drain_moves_a_stream_by_tokens_and_a_death_continues_it(harness, path):
    """Moved from a draining worker, then continued after the next one's death: the ids of both parts make the last prompt."""
    *workers, router = await harness.served(*["aggregated"] * 3, config=BY_TOKENS | MOVES, speed=10)
    three = speakers(workers)
    received = bytearray()
    task = asyncio.create_task(_receive(router, path, received))
    await router.until(lambda: received)
    (first,) = (each for each in three if each.began)
    router.server.admission.set_drained(first.name, drained=True)
    others = [each for each in three if each is not first]
    await router.until(lambda: any(each.began for each in others))
    (second,) = (each for each in others if each.began)
    third = other_of(others, second)
    third.go.set()
    await router.until(lambda: router.server.core.pool.get(second.name).has_ever_answered)
    await second.die()

    await task
    got = bytes(received)
    assert read(got) | {"identity": None} == expected_of(path, return_token_ids=True)
    assert got.count(b'"prompt_token_ids":[') == 1
    check_continues_by_tokens(first.began[0], second.began[0])
    check_continues_by_tokens(second.began[0], third.began[0])
    assert len(second.began[0]["prompt"]) < len(third.began[0]["prompt"])
    assert (await continued(router, "drain"), await lost(router)) == (1, 0)
    assert await continued(router) >= 1


async def test_streams_of_two_routers_continue_by_tokens_over_a_death_and_a_drain(harness, tmp_path):
    """The picker assigns the rests of both routers, with tiers; each client gets its text, and no stream is lost."""
    workers = [await harness.worker("aggregated") for _ in range(3)]
    routers = await start(harness, *workers, config=BY_TOKENS | TIERS | MOVES, tier_keys=KEYS, speed=10)
    three = speakers(workers)
    tasks = []
    for number in range(6):
        prompt = f"Tell me of sea {number}. "
        task, _ = await begun(routers[number % 2], three, (GOLD, BATCH)[number // 2 % 2], prompt=prompt)
        tasks.append((task, prompt))
    dead, drained, left = three
    spoke = {each.name: len(each.began) for each in three}
    assert all(spoke.values())
    left.go.set()
    harness.write_state(workers, routers, **{drained.name: "draining"})
    await routers[0].until(
        lambda: all(each.server.core.pool.get(drained.name).spec.draining for each in routers)
    )
    await dead.die()

    for task, prompt in tasks:
        assert is_undisturbed(await task, prompt=prompt)
    rests = left.began[spoke[left.name] :]
    assert len(rests) == spoke[dead.name] + spoke[drained.name]
    assert all(isinstance(each["prompt"], list) and each["return_token_ids"] for each in rests)
    assert total(routers, "completed") == len(tasks)
    assert not any(each.server.metrics.lost_streams for each in routers)
    assert went_on(routers)["drain"] == spoke[drained.name]
    for router in routers:
        await router.assert_idle()


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_by_tokens_outlives_the_role_switch_of_its_decode_worker(harness, path):
    """Its worker drains and becomes a prefill worker; the stream moves, its ids are prefilled, and a later death is survived too."""
    workers = [await harness.worker(role) for role in ("prefill", "decode", "decode", "decode")]
    harness.write_state(workers)
    router = await harness.router(
        statefile=harness.statefile, disaggregated=True, config=BY_TOKENS | MOVES, speed=10
    )
    await router.until(lambda: not router.server.admission.problems())
    prefill, *decodes = workers
    three = speakers(decodes)
    task, switched = await begun(router, three, path=path)
    harness.write_state(workers, **{switched.name: "draining"})
    others = [each for each in three if each is not switched]
    await router.until(lambda: any(each.began for each in others))
    (second,) = (each for each in others if each.began)
    switched.worker.role, switched.worker.otherwise = "prefill", switched.worker.complete
    harness.write_state(workers)
    pool = router.server.core.pool
    await router.until(lambda: len(pool.routable(Role.PREFILL, 0.0)) == 2)
    third = other_of(others, second)
    third.go.set()
    await second.die()

    got = await task
    assert read(got) | {"identity": None} == expected_of(path)
    check_continues_by_tokens(switched.began[0], second.began[0])
    check_continues_by_tokens(switched.began[0], third.began[0])
    prefilled = [each.body.get("prompt") for each in (*prefill.seen, *switched.worker.seen[1:])]
    assert second.began[0]["prompt"] in prefilled
    assert third.began[0]["prompt"] in prefilled
    assert await lost(router) == 0
    after = asyncio.create_task(ask(router, path=path))
    assert read(await after) | {"identity": None} == expected_of(path)
