"""Rejection over HTTP, its thresholds at run time and at all routers of a graph, workers at capacity, and what is counted."""

import asyncio

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api import Role, RouterConfig
from penstock.router.admission import Admission
from penstock.router.core.build import SPLIT, build_router
from penstock.router.core.worker import WorkerSize
from penstock.router.policy.busy import NO_THRESHOLDS, BusyThresholds
from penstock.router.proxy.completion import RequestRefused
from penstock.router.proxy.failures import retry_after
from penstock.router.thresholds import BusyThresholdApi, GraphThresholds, ThresholdState

BUSY = {"admission": {"mode": "token-capacity", "retryAfterSeconds": 3}}
AT_CAPACITY = b'{"error":{"message":"Server overloaded: worker at capacity","type":"ServiceUnavailableError","code":503}}'
JSON = ((b"content-type", b"application/json"),)


async def set_thresholds(router, headers=JSON, **body):
    """Change thresholds; returns status and JSON."""
    answer = await router.post(
        "/busy_threshold", headers=headers, raw=orjson.dumps({"model": "llama", **body})
    )
    return answer.status, orjson.loads(answer.body)


async def test_a_client_is_told_what_the_document_says(harness):
    """Status, body and Retry-After; counted by model and endpoint, as refused at the frontend, and never sent on."""
    worker = await harness.worker("aggregated")
    worker.kv_usage = "0.95"
    router = await harness.router(worker, config=BUSY)
    await router.until(lambda: router.server.core.busy[router.server.core.entry].is_any)
    answer = await router.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert answer.status == 503
    assert orjson.loads(answer.body) == {
        "message": "Service temporarily unavailable: All workers are busy, please retry later",
        "type": "service_unavailable",
        "code": 503,
    }
    assert (answer.headers[b"content-type"], answer.headers[b"retry-after"]) == (b"application/json", b"3")
    assert worker.seen == []
    labels = {"endpoint": "chat_completions", "model": "llama", "reason": "all_workers_busy"}
    assert await router.metric("penstock_router_model_rejection_total", **labels) == 1
    assert await router.metric("penstock_router_refused_requests_total", model_name="llama") == 1
    role = {"model_name": "llama", "role": "aggregated"}
    assert await router.metric("penstock_router_turned_away_requests_total", **role) == 1
    assert await router.metric("penstock_router_unserved_requests", **role) == 1
    worker.kv_usage = "0.2"
    await router.until(lambda: not router.server.core.busy[router.server.core.entry].is_any)
    assert (await router.post(max_tokens=1)).status == 200


async def test_thresholds_are_read_set_and_unset(harness):
    """As the document does, and unset by null; a key that is not named stays as it is."""
    worker = await harness.worker("aggregated")
    worker.kv_usage = "0.9"
    router = await harness.router(worker)
    page = await router.get("/busy_threshold")
    none = {
        "model": "llama",
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": None,
        "active_prefill_tokens_threshold_frac": None,
    }
    assert (page.status, orjson.loads(page.body)) == (200, {"thresholds": [none]})
    await router.until(lambda: all(each.kv_usage_fraction == 0.9 for each in router.server.core.pool))
    assert (await router.post(max_tokens=1)).status == 200
    both = {"active_decode_blocks_threshold": 0.85, "active_prefill_tokens_threshold": 10000}
    assert await set_thresholds(router, **both) == (200, none | both)
    assert orjson.loads((await router.get("/busy_threshold")).body) == {"thresholds": [none | both]}
    assert (await router.post(max_tokens=1)).status == 503
    left = none | both | {"active_decode_blocks_threshold": None}
    assert await set_thresholds(router, active_decode_blocks_threshold=None) == (200, left)
    assert (await router.post(max_tokens=1)).status == 200
    assert await set_thresholds(router) == (200, left)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (400, {"active_decode_blocks_threshold": 1.85}, "must be between 0.0 and 1.0, got 1.85"),
        (400, {"active_decode_blocks_threshold": -0.1}, "must be between 0.0 and 1.0, got -0.1"),
        (400, {"active_prefill_tokens_threshold": -1}, "must be between 0 and"),
        (400, {"active_prefill_tokens_threshold_frac": -1}, "must be at least 0, got -1"),
        (400, {"active_prefill_tokens_threshold_frac": 1.5}, "engine.maxBatchTokens"),
        (400, {"threshold": 1}, "no such threshold"),
        (422, {"active_decode_blocks_threshold": "0.5"}, "must be a number or null"),
        (422, {"active_decode_blocks_threshold": True}, "must be a number or null"),
        (422, {"active_prefill_tokens_threshold": 10.5}, "must be a whole number"),
        (404, {"model": "other"}, "not served here"),
        (422, {"model": None}, "model: missing"),
    ],
)
async def test_a_wrong_change_changes_nothing(harness, status, body, says):
    """Each is refused with the documented status and the bound, also alongside a right value."""
    router = await harness.router(await harness.worker("aggregated"), config=BUSY)
    before = (await router.get("/busy_threshold")).body
    wrong = {"active_prefill_tokens_threshold": 7} | body
    got, answer = await set_thresholds(router, **wrong)
    assert got == status
    assert says in answer["error"]
    assert (await router.get("/busy_threshold")).body == before


@pytest.mark.parametrize(
    ("status", "headers", "raw"),
    [(415, ((b"content-type", b"text/plain"),), b"{}"), (400, JSON, b"{"), (422, JSON, b"[]")],
)
async def test_what_is_no_json_object_is_refused(harness, status, headers, raw):
    """Another content type, broken JSON, and JSON that is not an object."""
    router = await harness.router(await harness.worker("aggregated"))
    assert (await router.post("/busy_threshold", headers=headers, raw=raw)).status == status


ADMIN, CLIENT = {"admin_keys": frozenset({b"root"})}, {"api_keys": frozenset({b"client"})}


@pytest.mark.parametrize(
    ("settings", "headers", "read", "change"),
    [
        (ADMIN | CLIENT, (), 401, 401),
        (ADMIN | CLIENT, ((b"authorization", b"Bearer client"),), 401, 401),
        (ADMIN | CLIENT, ((b"authorization", b"Bearer root"),), 200, 200),
        (ADMIN | CLIENT, ((b"origin", b"https://evil.example"),), 403, 403),
        # As for drains: a router that asks clients for keys is reached by others.
        (CLIENT, (), 200, 403),
    ],
)
async def test_thresholds_are_the_administrators(harness, settings, headers, read, change):
    """With an admin key, reading and changing need it; without one only this machine may change them."""
    _, router = await harness.served("aggregated", **settings)
    assert (await router.get("/busy_threshold", headers=headers)).status == read
    changed = await set_thresholds(router, (*JSON, *headers), active_decode_blocks_threshold=0.5)
    assert changed[0] == change


SGLANG_FULL = (
    b'{"object":"error","message":"The request queue is full.","type":"503","param":null,"code":503}'
)
SGLANG_DISPLACED = SGLANG_FULL.replace(
    b"The request queue is full.", b"The request is aborted by a higher priority request."
)


@pytest.mark.parametrize("answer", [AT_CAPACITY, SGLANG_FULL, SGLANG_DISPLACED])
@pytest.mark.parametrize("roles", [("aggregated", "aggregated"), ("prefill", "decode", "decode")])
async def test_a_worker_at_capacity_is_skipped_for_another(harness, roles, answer):
    """The next one answers, whichever engine says it; neither the retry budget nor the worker's circuit pays for it."""
    retries = {"retries": {"maxPerRequest": 0, "budgetFraction": 0, "minPerSecond": 0}}
    *workers, router = await harness.served(*roles, config=retries)
    assert (await router.post(max_tokens=1)).status == 200
    preferred = next(each for each in reversed(workers) if each.seen)
    preferred.seen.clear()
    preferred.otherwise = harness.answers.status(503, answer)
    for _ in range(6):
        assert (await router.post(max_tokens=1)).status == 200
    assert preferred.seen
    states = await router.workers()
    assert {each["state"] for each in states.values()} == {"ready"}
    assert not any(each.failures for each in router.server.core.pool)


async def test_all_workers_at_capacity_reject(harness):
    """Each is asked once; the client gets the document's answer, and the request counts as refused."""
    *workers, router = await harness.served(*["aggregated"] * 3)
    for worker in workers:
        worker.otherwise = harness.answers.status(503, AT_CAPACITY)
    answer = await router.post(max_tokens=1)
    assert (answer.status, orjson.loads(answer.body)["type"]) == (503, "service_unavailable")
    assert answer.headers[b"retry-after"] == b"1"
    assert [len(worker.seen) for worker in workers] == [1, 1, 1]
    assert await router.metric("penstock_router_refused_requests_total", model_name="llama") == 1
    role = {"model_name": "llama", "role": "aggregated"}
    assert await router.metric("penstock_router_turned_away_requests_total", **role) == 1
    assert (await router.post(max_tokens=1)).status == 503
    assert [len(worker.seen) for worker in workers] == [1, 1, 1]
    for worker in workers:
        worker.otherwise = worker.complete
    entry = router.server.core.entry
    await router.until(lambda: not router.server.core.busy[entry].is_any)
    assert (await router.post(max_tokens=1)).status == 200


async def test_the_load_that_makes_workers_busy_is_exported(harness):
    """By the document's names: blocks in use and in total, and prompt tokens to be computed."""
    worker, router = await harness.served("aggregated")
    name = {"role": "aggregated", "worker": worker.name}
    await router.until(lambda: router.server.core.pool.get(worker.name).kv_total_blocks == 1000)
    assert await router.metric("penstock_router_worker_kv_total_blocks", **name) == 1000
    assert await router.metric("penstock_router_worker_active_decode_blocks", **name) == 250
    gate = worker.hold()
    task = asyncio.ensure_future(router.post(prompt=[1] * 700, stream=True))
    await router.until(lambda: worker.seen)
    assert await router.metric("penstock_router_worker_active_prefill_tokens", **name) == 700
    gate.set()
    await task
    assert await router.metric("penstock_router_worker_active_prefill_tokens", **name) == 0


@pytest.mark.parametrize(
    ("expected_s", "floor_s", "value"),
    [
        (None, 2, b"2"),
        (0.2, 1, b"1"),
        (7.1, 1, b"8"),
        (500.0, 1, b"60"),
        (7.1, 90, b"90"),
        (float("inf"), 1, b"1"),
    ],
)
def test_retry_after_is_bounded(expected_s, floor_s, value):
    """Whole seconds from the drain rate, at least the setting, at most 60."""
    assert retry_after(expected_s, floor_s=floor_s, is_rate=True) == value


def test_a_start_up_is_told_in_full():
    """Workers that need five minutes are not there after one."""
    assert retry_after(299.2, floor_s=1, is_rate=False) == b"300"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        "active_decode_blocks_threshold",
        "active_prefill_tokens_threshold",
        "active_prefill_tokens_threshold_frac",
        "x",
    ]
)


@settings(max_examples=200, deadline=None)
@given(fields=st.dictionaries(KEYS, JSON_VALUES, max_size=4), model=st.just("llama") | JSON_VALUES)
def test_whatever_is_asked_of_the_thresholds_they_stay_within_bounds(fields, model):
    """Either everything that a body names holds and is in range, or nothing has changed and a status says why."""
    core = build_router(RouterConfig(), {Role.AGGREGATED: WorkerSize(batch_tokens=8192)})
    api = BusyThresholdApi(GraphThresholds(Admission(core, lambda: 0.0)), "llama")
    before = api.listed()
    body = orjson.dumps({"model": model, **fields})
    try:
        shown = orjson.loads(api.change(b"application/json", body))
    except RequestRefused as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.status in {400, 404, 422}
        assert len(refused.message) < 500
        assert api.listed() == before
        return
    assert {key: shown[key] for key in fields} == fields
    blocks, tokens, frac = (shown[key] for key in list(shown)[1:])
    assert blocks is None or 0 <= blocks <= 1
    assert tokens is None or tokens >= 0
    assert frac is None or frac >= 0


def routers(count):
    """Routers of one graph that have just started."""
    cores = [build_router(RouterConfig(), SPLIT) for _ in range(count)]
    return [GraphThresholds(Admission(core, lambda: 0.0)) for core in cores]


def exchange(all_routers):
    """Tell every router what every other one has."""
    for each in all_routers:
        for other in all_routers:
            each.received(other.state, other.versions)


VALUES = st.sampled_from([None, 0.5, 0.9]).map(BusyThresholds)
CHANGES = st.dictionaries(st.sampled_from(BusyThresholds._fields), st.sampled_from([None, 0, 1]), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 2), CHANGES),
        st.tuples(st.just("file"), st.integers(0, 2), VALUES),
        st.tuples(st.just("received"), st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=12,
)


@given(STEPS)
def test_routers_agree_after_any_changes(steps):
    """Made at several of them at once, heard in part, in any order: one round later all hold the same, and apply it."""
    all_routers = routers(3)
    for what, at, value in steps:
        router = all_routers[at]
        if what == "set":
            router.set(value)
            assert value.items() <= router.now._asdict().items()
        elif what == "file":
            router.file_changed(value)
        else:
            router.received(all_routers[value].state, all_routers[value].versions)
    exchange(all_routers)

    assert len({each.state for each in all_routers}) == 1
    for each in all_routers:
        assert {busy.thresholds for busy in each._admission.core.busy.values()} == {each.now}


def test_two_keys_that_are_set_at_once_at_two_routers_both_stay():
    """Each answered 200: neither is lost; of one key set twice all take the same value."""
    one, two, three = routers(3)
    one.set({"active_decode_blocks_threshold": 0.5})
    two.set({"active_prefill_tokens_threshold": 700})
    three.set({"active_prefill_tokens_threshold": 900})
    exchange([one, two, three])
    assert {each.now for each in (one, two, three)} == {BusyThresholds(0.5, 900)}


def test_a_router_of_an_older_build_has_one_version_for_all_keys():
    """Alongside one in an upgrade the newer state holds as a whole, as there."""
    (router,) = routers(1)
    router.set({"active_decode_blocks_threshold": 0.5})
    older = ThresholdState(2, NO_THRESHOLDS, BusyThresholds(None, 700))
    assert not router.are_known_to(ThresholdState(0, NO_THRESHOLDS, NO_THRESHOLDS), ())
    assert router.received(older)
    assert (router.now, router.are_known_to(older, ())) == (older.now, True)


def test_a_file_that_another_router_has_read_before_takes_nothing_back():
    """A kubelet brings it to the second router a minute later; what was set meanwhile stays until the next change."""
    one, two = routers(2)
    file, own = BusyThresholds(0.85, 100_000), BusyThresholds(0.5)
    one.file_changed(file)
    exchange([one, two])
    one.set(own._asdict())
    exchange([one, two])

    two.file_changed(file)
    assert (one.now, two.now) == (own, own)

    two.file_changed(NO_THRESHOLDS)
    exchange([one, two])
    assert (one.now, two.now) == (NO_THRESHOLDS, NO_THRESHOLDS)
