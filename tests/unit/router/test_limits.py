"""The table of the router's limits: the docs have it, the code asks it, and begun streams are bound by few of them."""

import re
from pathlib import Path

import pytest

from penstock.api import Role, RouterConfig, Tier
from penstock.api.router_workers import RetriesConfig
from penstock.router.core import limits
from penstock.router.core.build import SPLIT, build_router
from penstock.router.core.retries import Assignment, Refuse
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.routing_policy import Arrival

ROOT = Path(__file__).parents[3]
NOT = "-"


def test_the_docs_have_the_table():
    """Row by row, in its order."""
    text = (ROOT / "docs/router.md").read_text(encoding="utf-8")
    shown = re.search(r"\| Limit \|.*\n\|---\|---\|---\|---\|\n((?:\|.*\n)+)", text)
    assert shown is not None
    assert shown[1].splitlines() == [
        f"| `{each.name}` | {each.key} | {each.effect if each.for_new else NOT} | {each.effect if each.for_interrupted else NOT} |"
        for each in limits.LIMITS
    ]


@pytest.mark.parametrize(
    "limit", [each for each in limits.LIMITS if each.for_new and not each.for_interrupted]
)
def test_what_binds_new_requests_alone_is_asked_where_it_is_enforced(limit):
    """A limit that nothing asks is a line of documentation."""
    name = next(key for key, value in vars(limits).items() if value is limit)
    sources = (ROOT / "src/penstock/router").rglob("*.py")
    users = [
        path.name
        for path in sources
        if path.name != "limits.py" and re.search(rf"\b{name}\b", path.read_text())
    ]
    assert users


def test_a_begun_stream_is_bound_by_its_continuations_its_wait_and_its_time():
    """Everything else that ends or refuses a request is for new ones."""
    ending = {each.name for each in limits.LIMITS if each.for_interrupted and each.effect == "ends"}
    assert ending == {"continuations", "worker_wait", "request_time"}
    harmless = {each.effect for each in limits.LIMITS if each.for_interrupted and each.effect != "ends"}
    assert harmless == {"the prompt is computed again", "waits in the queue", "refused for ten minutes"}


@pytest.mark.parametrize(
    ("given", "startup_s", "expected"),
    [(None, (), 600), (None, (30, 90), 90), (None, (1800,), 600), (1200, (30,), 1200)],
)
def test_the_wait_for_a_worker_is_as_long_as_the_slowest_may_take_to_start(given, startup_s, expected):
    """At most ten minutes, where nothing is configured."""
    assert limits.worker_wait_s(RetriesConfig(continuation_wait_seconds=given), startup_s) == expected


def _core(section):
    return build_router(RouterConfig.model_validate(section), SPLIT, worker_wait_s=300.0)


def _serve(core, now_s=0.0):
    specs = [WorkerSpec(role.value, role, "", supervised=True) for role in (Role.PREFILL, Role.DECODE)]
    return core.set_workers(specs, now_s)


TIERS = {"tiers": {"enabled": True}}


@pytest.mark.parametrize(
    ("section", "new"),
    [
        ({}, "no_worker"),
        (TIERS, "no_worker"),
        ({"prefillQueue": {"maxWakeSeconds": 100}}, "waits"),
        ({"prefillQueue": {"maxWakeSeconds": 100}} | TIERS, "waits"),
    ],
)
@pytest.mark.parametrize("tier", [Tier.PREMIUM, Tier.BACKGROUND])
def test_a_begun_stream_waits_without_a_worker_for_its_own_time(section, new, tier):
    """Without one that is known, expected or started; its tier's target and the queue's wait bind new requests alone."""
    core = _core(section)
    refused = core.acquire("new", Role.PREFILL, Arrival((), 10, tier=tier), 0.0)
    assert [each.reason.name.lower() for each in refused] == ["no_worker"] * (new == "no_worker")
    assert (
        core.acquire(
            "begun", Role.PREFILL, Arrival((), 10, tier=tier, is_continuation=True), 0.0, is_retry=True
        )
        == []
    )
    assert not [each for each in core.expire(299.0) if each.item == "begun"]
    effects = [*_serve(core, 299.0), *core.tick(299.0)]
    assert next(each.item for each in effects if isinstance(each, Assignment)) == "begun"


def test_a_begun_stream_that_gets_no_worker_in_its_time_ends():
    """The wait that is configured bounds it."""
    core = _core({})
    core.acquire("begun", Role.PREFILL, Arrival((), 10, is_continuation=True), 0.0, is_retry=True)
    (refused,) = core.expire(300.0)
    assert isinstance(refused, Refuse)


@pytest.mark.parametrize("section", [{}, TIERS])
def test_begun_streams_and_new_requests_take_turns_the_oldest_of_each_first(section):
    """A worker's death brings many at once: neither waits for all of the other."""
    core = _core({"prefillQueue": {"workerTokens": 1}, "policy": "prefix-cost"} | section)
    _serve(core)
    core.acquire("first", Role.PREFILL, Arrival((), 100), 0.0)
    for number in range(3):
        core.acquire(f"new {number}", Role.PREFILL, Arrival((), 100), 1.0)
        begun = Arrival((), 100, is_continuation=True)
        core.acquire(f"begun {number}", Role.PREFILL, begun, 1.0, is_retry=True)
    given, effects = [], core.tick(1.0)
    (running,) = [each for each in core.pool if each.inflight_requests]
    assignment = next(iter(core.entry_queue._requests.values()))
    assert (running.name, assignment.item) == ("prefill", "first")
    held = Assignment("first", running, 0, now_s=1.0)
    for _ in range(6):
        effects = core.release(held, 2.0)
        (held,) = effects
        given.append(held.item)
    assert given == ["begun 0", "new 0", "begun 1", "new 1", "begun 2", "new 2"]


def test_a_full_queue_takes_begun_streams():
    """Its bound, and the shares of tiers and tenants in it, are for new requests, at both stages."""
    for section in ({}, TIERS):
        core = _core({"prefillQueue": {"workerTokens": 1, "maxRequests": 4}} | section)
        _serve(core)
        core.paused = (Role.PREFILL, Role.DECODE)
        for role in (Role.PREFILL, Role.DECODE):
            waiting = [core.acquire(number, role, Arrival((), 10), 0.0) for number in range(10)]
            assert waiting[0] == []
            assert isinstance(waiting[-1][0], Refuse)
            assert core.acquire(f"{role} begun", role, Arrival((), 10, is_continuation=True), 0.0) == []
