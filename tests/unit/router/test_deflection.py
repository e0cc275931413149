"""Prompts that decode workers compute while all prefill workers are behind, in the router's core and its request machine."""

import pytest

from penstock.api import Role, RouterConfig
from penstock.router.core.build import build_router
from penstock.router.core.request import RequestMachine, RequestPlan
from penstock.router.core.request_steps import (
    AcquireWorker,
    End,
    EndKind,
    ReleaseWorker,
    ResponseStarted,
    SendRequest,
    SendResponse,
)
from penstock.router.core.retries import Assignment, RequestTries, RetryRules, RunningAt
from penstock.router.core.worker import WorkerSize, WorkerSpec
from penstock.router.policy.arrival import Arrival

RATE = 10_000
"""Prompt tokens/s of a prefill worker, measured over its last ten seconds."""
NOW_S = 100.0


def core_of(*, policy="least-loaded", batch_tokens=200, decode=2, **deflection):
    """Return a core with two prefill workers of a known speed and idle decode workers whose KV is known."""
    config = RouterConfig.model_validate(
        {"policy": policy, "prefillDeflection": {"enabled": True, **deflection}}
    )
    sizes = {Role.PREFILL: WorkerSize(), Role.DECODE: WorkerSize(batch_tokens=batch_tokens)}
    core = build_router(config, sizes, is_supervised=True)
    counts = {Role.PREFILL: 2, Role.DECODE: decode}
    specs = [
        WorkerSpec(f"{role}-{n}", role, "", supervised=True) for role in sizes for n in range(counts[role])
    ]
    core.set_workers(specs, 0.0)
    core.deflection.computed(0, {"prefill-0": 1}, 0.0)
    core.deflection.computed(RATE * 10, {}, NOW_S)
    for worker in core.pool:
        worker.kv_usage_fraction, worker.kv_capacity_tokens, worker.metrics_at_s = 0.0, 100_000, NOW_S
    return core


def ask(core, name, tokens=1000, **options):
    """Return the assignment that a request for prefill gets at once; None: it waits."""
    found = core.acquire(name, Role.PREFILL, Arrival((), tokens, **options), NOW_S)
    return next((each for each in found if isinstance(each, Assignment)), None)


def fill(core, count=2, tokens=20_000):
    """Give each prefill worker a prompt of two seconds; return the roles that got one."""
    return [ask(core, f"long-{n}", tokens).role for n in range(count)]


@pytest.mark.parametrize("policy", ["least-loaded", "prefix-cost"])
def test_a_prompt_is_deflected_only_once_every_prefill_worker_is_behind(policy):
    """One that has less than queueSeconds to compute takes it."""
    core = core_of(policy=policy)
    assert fill(core, 1) == [Role.PREFILL]
    assert ask(core, "second", 20_000).role is Role.PREFILL
    assert core.deflection.total == 0

    deflected = ask(core, "third")

    assert deflected.role is Role.DECODE
    assert core.deflection.total == 1


def test_without_the_option_nothing_is_deflected():
    """It is off by default."""
    core = build_router(RouterConfig(), {Role.PREFILL: WorkerSize(), Role.DECODE: WorkerSize()})
    assert core.deflection is None


def test_a_worker_computes_one_deflected_prompt_at_a_time():
    """Until its first token, or until the request has left; then the next."""
    core = core_of(decode=1)
    fill(core)
    first = ask(core, "a")
    assert first.role is Role.DECODE
    speed = core.pool.get("decode-0").speed
    speed.output_tokens, speed.decode_s = 100, 2.0
    assert ask(core, "b") is None
    core.prefilled(first, NOW_S)
    second = ask(core, "c")
    assert second.role is Role.DECODE
    core.release(second, NOW_S)
    assert ask(core, "d").role is Role.DECODE


@pytest.mark.parametrize(
    ("itl_s", "batch_tokens", "is_deflected"),
    [
        (0.024, 200, True),  # and 1.25 times 200 tokens at 10,000/s: 49 ms
        (0.026, 200, False),  # 51 ms
        (0.024, None, False),  # a step of 1,000 tokens: 149 ms
        (None, 200, False),  # not known
    ],
)
def test_no_gap_gets_longer_than_the_itl_target(itl_s, batch_tokens, is_deflected):
    """What the worker's gaps are lately, and one step of the prompt at the speed of prefill."""
    core = core_of(batch_tokens=batch_tokens, decode=1)
    fill(core)
    worker = core.pool.get("decode-0")
    worker.inflight_requests, worker.inflight_tokens, worker.scraped_tokens = 1, 500, 500
    if itl_s is not None:
        worker.speed.output_tokens, worker.speed.decode_s = 100, 100 * itl_s

    assert (ask(core, "a") is not None) is is_deflected


def test_the_itl_of_a_worker_is_that_since_the_last_estimate():
    """A slow hour of yesterday does not count for ever, nor is a restarted worker's count taken for negative."""
    core = core_of(decode=1)
    worker = core.pool.get("decode-0")
    worker.inflight_requests = 1
    read = core.deflection._itl_s
    worker.speed.output_tokens, worker.speed.decode_s = 1000, 100.0
    assert read(worker) == pytest.approx(0.1)
    worker.speed.output_tokens, worker.speed.decode_s = 1100, 102.0
    assert read(worker) == pytest.approx(0.02)
    worker.speed.output_tokens, worker.speed.decode_s = 60, 3.0
    assert read(worker) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("usage", "capacity", "is_deflected"),
    [(0.78, 100_000, True), (0.8, 100_000, False), (None, 100_000, False), (0.1, None, False)],
)
def test_a_prompt_needs_room_for_its_kv(usage, capacity, is_deflected):
    """At most maxKvUsageFraction with it; a worker whose KV is not known takes none."""
    core = core_of(decode=1)
    fill(core)
    worker = core.pool.get("decode-0")
    worker.kv_usage_fraction, worker.kv_capacity_tokens = usage, capacity

    assert (ask(core, "a") is not None) is is_deflected


def test_a_request_that_failed_on_a_decode_worker_waits_for_prefill():
    """It is tried again as any other."""
    core = core_of(decode=1)
    fill(core)
    core.release(ask(core, "a"), NOW_S)
    assert core.acquire("a", Role.PREFILL, Arrival((), 1000), NOW_S, is_retry=True) == []


def test_another_router_takes_a_deflected_request_over():
    """It runs at the decode worker, though a prefill worker was asked for."""
    core = core_of()
    adopted = core.adopt("a", Role.PREFILL, Arrival((), 1000), RunningAt("decode-0", 1000), NOW_S)
    assert adopted.role is Role.DECODE
    core.release(adopted, NOW_S)
    assert core.pool.get("decode-0").inflight_requests == 0


def test_the_request_machine_has_the_decode_worker_answer_at_once():
    """No transfer, no second stage, and its share is given back."""
    core = core_of(decode=1)
    fill(core)
    rules = RetryRules(core.pool, RouterConfig().retries, 0.0)
    machine = RequestMachine(RequestPlan(Role.PREFILL, is_split=True), rules, RequestTries(), lambda: 0.0)

    assert machine.advance(None) == AcquireWorker(Role.PREFILL)
    assignment = ask(core, "a")
    assert machine.advance(assignment) == SendRequest(Role.DECODE, assignment)
    end = machine.advance(ResponseStarted(is_stream=False))

    assert isinstance(end, End)
    assert end.kind is EndKind.SERVED
    assert [type(each) for each in machine.steps] == [SendResponse, ReleaseWorker]
