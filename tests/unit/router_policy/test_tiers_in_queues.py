"""Tiers in the queues that live and simulated routers share: order, room, deadlines, shedding."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement import EVENTS, Script, Stage, placement

from penstock.api import QueueOrder, RouterConfig, Tier, TiersConfig
from penstock.api.router_tiers import BackgroundSlo, PremiumSlo, StandardSlo, TierSlos
from penstock.core.durations import duration_text
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.retries import RefusalReason
from penstock.router.core.tiers import QueueOccupancy
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.registry import make_policy, policy_names

SLO_S = 2.0
TARGETS = {"ttft": duration_text(SLO_S), "endToEnd": None}
ALIKE = TiersConfig(
    slo=TierSlos(
        premium=PremiumSlo(**TARGETS), standard=StandardSlo(**TARGETS), background=BackgroundSlo(**TARGETS)
    )
)


@given(st.sampled_from(policy_names()), st.sampled_from([QueueOrder.ARRIVAL, QueueOrder.HIT_FIRST]), EVENTS)
def test_requests_of_one_tier_are_ordered_as_without_tiers(policy, order, events):
    """Under every policy, whatever joins, leaves, fails or expires; by deadline, late requests are pending with tiers alone."""
    plain, tiered = Script(policy, order, None), Script(policy, order, ALIKE)
    for event in events:
        plain.step(event, has_tiers=False)
        tiered.step(event, has_tiers=False)
        assert tiered.log == plain.log
        assert tiered.waiting == plain.waiting


@given(
    st.sampled_from(policy_names()),
    st.sampled_from(QueueOrder),
    EVENTS,
    st.sampled_from([None, TiersConfig()]),
    st.floats(-1.0, 3.0),
)
def test_every_request_leaves_exactly_once(policy, order, events, tiers, step_s):
    """Whatever joins, leaves, flaps, fails, expires, or steps an hour in time: all counts agree, and none is dispatched twice."""
    script = Script(policy, order, tiers, step_s=step_s)
    premium, background = (Arrival((), 1, tier=tier) for tier in (Tier.PREMIUM, Tier.BACKGROUND))
    for event in events:
        script.step(event, has_tiers=tiers is not None)
        queue, counts, pending = script.queue, script.queue.prompt_tokens, script.queue.prompt_tokens.pending
        assert {each.item for each in queue.waiting_requests()} == script.waiting
        assert queue.waiting == len(script.waiting)
        assert queue.occupancy.tiers.total() == (0 if tiers is None else queue.waiting)
        assert counts.waiting >= len(script.waiting)
        assert sum(pending.values()) >= len(script.running)
        assert bool(pending) is bool(script.running)
        assert counts.admitted >= counts.computed + counts.waiting + sum(pending.values())
        for worker in queue.workers.eligible.values():
            assert worker.pending_tokens >= worker.pending_for(premium) >= worker.running_tokens
            assert worker.pending_tokens == worker.pending_for(background)
            assert 0.0 < worker.relative_slowdown < inf
    script.assert_ends_empty()


@pytest.mark.parametrize(("tier", "worker"), [(Tier.PREMIUM, "a"), (Tier.BACKGROUND, "b")])
@pytest.mark.parametrize("policy", ["prefix-cost", "least-pending", "kv-cost", "min-ttft"])
def test_a_request_goes_where_less_is_ahead_of_it(policy, tier, worker):
    """Ten background requests wait for a and two premium ones for b: to premium the queue of a is empty."""
    policy = make_policy(RouterConfig(policy=policy))
    queue = placement(policy, "ab", tokens_per_s=None, slot_requests=0, tiers=TiersConfig())
    for at in range(10):
        queue.submit(at, Arrival((), 500, frozenset("b"), tier=Tier.BACKGROUND), 0.0)
    for at in range(2):
        queue.submit(("p", at), Arrival((), 500, frozenset("a"), tier=Tier.PREMIUM), 0.0)
    queue.submit("new", Arrival((), 500, tier=tier), 0.0)
    assert queue.worker_of("new") == worker


def test_a_worker_whose_requests_are_late_is_no_empty_one():
    """Three premium requests wait for a beyond their target and one for b within it: the next goes to b."""
    policy = make_policy(RouterConfig(policy="prefix-cost"))
    order = QueueOrder.IN_TIME_FIRST
    queue = placement(policy, "ab", tokens_per_s=10_000.0, slot_requests=1, tiers=TiersConfig(), order=order)
    for at in range(5):
        queue.submit(at, Arrival((), 500, frozenset("b"), tier=Tier.PREMIUM), 0.0)
    list(queue.dispatch(0.0))
    for item in ("b1", "b2"):
        queue.submit(item, Arrival((), 500, frozenset("a"), tier=Tier.PREMIUM), 1.0)
    queue.prefilled(0, 0.05)
    assert len(list(queue.dispatch(1.0))) == 2
    queue.submit("new", Arrival((), 500, tier=Tier.PREMIUM), 1.0)
    assert queue.worker_of("new") == "b"


@pytest.mark.parametrize("policy", ["round-robin", "prefix-cost"])
def test_no_background_request_waits_longer_than_its_bound(policy):
    """A server of 1,000 tokens/s under an endless flood of premium and standard serves background all the same.

    The bound follows from shares alone: two rounds, a request of each other tier, and the one in service.
    """
    tokens, tokens_per_s = 400, 1000.0
    tiers = TiersConfig(round_tokens=2000)
    queue = placement(make_policy(RouterConfig(policy=policy)), ("a",), slot_requests=1, tiers=tiers)
    bound_s = ((tokens // 300 + 2) * 2000 + 2 * tokens + tokens) / tokens_per_s
    now_s, count, waits, served = 0.0, 0, [], Counter()
    background_since_s = None
    for _ in range(600):
        for tier in (Tier.PREMIUM, Tier.STANDARD):
            while queue.occupancy.tiers[tier] < 4:
                queue.submit(count, Arrival((), tokens, tier=tier), now_s)
                count += 1
        if background_since_s is None:
            queue.submit("background", Arrival((), tokens, tier=Tier.BACKGROUND), now_s)
            background_since_s = now_s
        (started,) = queue.dispatch(now_s)
        served[started.arrival.tier] += 1
        if started.item == "background":
            waits.append(now_s - background_since_s)
            background_since_s = None
        now_s += tokens / tokens_per_s
        queue.prefilled(started.item, now_s)
        queue.release(started.item, now_s)
    assert max(waits) <= bound_s
    assert served[Tier.BACKGROUND] / 600 == pytest.approx(0.15, abs=0.01)
    assert served[Tier.STANDARD] / 600 == pytest.approx(0.35, abs=0.01)


@pytest.mark.parametrize(
    ("tier", "max_wait_s", "bound_s"),
    [
        (Tier.PREMIUM, 60.0, 5.0),
        (Tier.STANDARD, 60.0, 15.0),
        (Tier.BACKGROUND, 30.0, 30.0),
        (Tier.BACKGROUND, None, 60.0),
        (Tier.SYSTEM, None, inf),
    ],
)
def test_a_request_waits_no_longer_than_its_tier_promises(tier, max_wait_s, bound_s):
    """After the end-to-end target an answer is of no use to the SLO; `maxWaitSeconds` bounds all tiers."""
    settings = QueueSettings(max_wait_s=max_wait_s, tiers=TiersConfig())
    assert settings.longest_wait_s(tier) == bound_s
    queue = DispatchQueue(make_policy(RouterConfig(policy="round-robin")), settings)
    queue.submit("one", Arrival((), 10, tier=tier), 0.0)
    at_s = min(bound_s, 1e6)
    assert not queue.take_expired(at_s - 0.001)
    assert len(queue.take_expired(at_s)) == (bound_s < inf)


@pytest.mark.parametrize(
    ("waiting", "tier", "has_room"),
    [
        ({}, Tier.BACKGROUND, True),
        ({Tier.BACKGROUND: 15}, Tier.BACKGROUND, False),
        ({Tier.BACKGROUND: 15}, Tier.STANDARD, True),
        ({Tier.BACKGROUND: 15, Tier.STANDARD: 35}, Tier.STANDARD, False),
        ({Tier.BACKGROUND: 15, Tier.STANDARD: 35}, Tier.PREMIUM, True),
        ({Tier.STANDARD: 50}, Tier.STANDARD, False),
        ({Tier.STANDARD: 49}, Tier.STANDARD, True),
        ({Tier.PREMIUM: 50, Tier.STANDARD: 35}, Tier.BACKGROUND, True),
        ({Tier.PREMIUM: 99}, Tier.PREMIUM, True),
        ({Tier.PREMIUM: 100}, Tier.PREMIUM, False),
        ({Tier.PREMIUM: 100}, Tier.SYSTEM, True),
    ],
)
def test_each_tier_keeps_its_share_of_the_queue(waiting, tier, has_room):
    """Of 100 places 50 are kept for premium and 35 for standard while they do not fill them themselves."""
    occupancy = QueueOccupancy()
    for each, count in waiting.items():
        for _ in range(count):
            occupancy.enter(Arrival((), 1, tier=each))
    assert occupancy.admits(Arrival((), 1, tier=tier), TiersConfig(), 100) is has_room


@pytest.mark.parametrize("tier", [Tier.PREMIUM, Tier.STANDARD, Tier.BACKGROUND])
@pytest.mark.parametrize("flooding", [1, 2, 3])
def test_tenants_that_flood_leave_room_for_the_next(tier, flooding):
    """With a part of a half each of N holds 1/(N + 1) of what its tier may fill, while all other tiers are idle.

    Requests of no tenant are bounded by their tier alone.
    """
    occupancy, settings = QueueOccupancy(), TiersConfig(max_tenant_share=0.5)
    held = [0] * flooding
    for _ in range(120):
        for number in range(flooding):
            arrival = Arrival((), 1, tier=tier, tenant=f"flood-{number}")
            if occupancy.admits(arrival, settings, 120):
                occupancy.enter(arrival)
                held[number] += 1
    of_tier = {Tier.PREMIUM: 120, Tier.STANDARD: 60, Tier.BACKGROUND: 18}[tier]
    assert held == pytest.approx([of_tier / (flooding + 1)] * flooding, abs=1)
    for tenant in ("next", ""):
        assert occupancy.admits(Arrival((), 1, tier=tier, tenant=tenant), settings, 120)
    flood = Arrival((), 1, tier=tier, tenant="flood-0")
    assert not occupancy.admits(flood, settings, 120)
    occupancy.leave(flood)
    assert occupancy.admits(flood, settings, 120)


def prompt_by_prompt(**tiers):
    """Return a core with tiers before one worker that takes one prompt at a time."""
    return Stage("a", policy="prefix-cost", slot_tokens=1, tiers=tiers, mode="none")


def test_the_core_sheds_new_requests_and_none_that_it_has_admitted():
    """Retries continue; a shed request is an arrival, and is told when to come back."""
    stage = prompt_by_prompt(shedding={"recoverSeconds": 40})
    for at in range(2):
        stage.core.tiers.monitor.evaluate(10.0 * at, {Tier.PREMIUM: [9.0] * 30})
    stage.now_s = 11.0
    refused = stage.ask(tier=Tier.BACKGROUND)
    assert (refused.reason, refused.retry_after_s) == (RefusalReason.SHED, 40)
    assert [stage.ask(), stage.ask(tier=Tier.BACKGROUND, is_retry=True)] == ["a", "waits"]
    counts = stage.core.tiers.counts[Tier.BACKGROUND]
    assert (counts.arrivals, counts.shed, counts.rejected) == (1, 1, 0)


def test_requests_that_wait_are_seen_by_the_monitor_each_second():
    """A worker that has stopped yields no first token; the waiting requests tell."""
    stage = prompt_by_prompt(slo={"premium": {"ttft": "200ms"}})
    for _ in range(31):
        stage.ask(tier=Tier.PREMIUM)
    for now_s, step in ((0.1, 0), (1.2, 1)):
        stage.core.tick(now_s)
        assert stage.core.tiers.monitor.step == step


def test_a_request_that_waited_in_vain_has_missed_its_target():
    """It counts as rejected, and against its tier's compliance."""
    stage = prompt_by_prompt()
    assert [stage.ask() for _ in range(2)] == ["a", "waits"]
    (refused,) = stage.core.expire(15.0)
    assert (refused.item, refused.reason) == (2, RefusalReason.QUEUE_TIMEOUT)
    tiers = stage.core.tiers
    assert (tiers.counts[Tier.STANDARD].rejected, tiers.monitor.compliance(Tier.STANDARD, 15.0)) == (1, 0)


@pytest.mark.parametrize("policy", ["prefix-cost", "round-robin"])
def test_premium_does_not_wait_in_the_router_while_it_is_within_its_share(policy):
    """A worker that has its 1,000 tokens is given premium's 2,000 of eight rounds as well.

    Beyond that premium waits in its turn as standard does, and system never.
    """
    tiers = TiersConfig(round_tokens=500)
    queue = placement(make_policy(RouterConfig(policy=policy)), "a", slot_tokens=1000, tiers=tiers)
    for item, tier in enumerate([Tier.STANDARD] * 2 + [Tier.PREMIUM] * 4 + [Tier.SYSTEM] * 2):
        queue.submit(item, Arrival((), 1000, tier=tier), 0.0)
        list(queue.dispatch(0.0))
    assert sorted(each.item for each in queue.waiting_requests()) == [1, 4, 5]


def test_of_a_request_limit_an_eighth_is_for_premium():
    """Of 16 slots standard gets 14: a premium request finds one of the others, and no engine is asked beyond its limit."""
    settings = {"worker_requests": 16, "tiers": TiersConfig()}
    queue = placement(make_policy(RouterConfig(policy="round-robin")), "a", **settings)
    load = queue.workers.eligible["a"].load
    for item, tier in enumerate([Tier.STANDARD] * 15 + [Tier.PREMIUM] * 3):
        queue.submit(item, Arrival((), 10, tier=tier), 0.0)
        for _ in queue.dispatch(0.0):
            load.inflight_requests += 1
    assert sorted(each.item for each in queue.waiting_requests()) == [14, 17]


def test_the_deviation_from_the_fair_share_is_of_the_last_minute():
    """300 of 400 tokens are premium's, whose share is a half; system has none; what is older than a minute counts no more."""
    stage = Stage("a", tiers={}, mode="none")
    control = stage.core.tiers
    assert control.share_deviation(Tier.PREMIUM, 0.0) is None
    for tokens, tier in ((300, Tier.PREMIUM), (100, Tier.BACKGROUND), (900, Tier.SYSTEM)):
        assert stage.ask(tokens, tier=tier) == "a"
        stage.computed(stage.count, 1.0)
    found = [control.share_deviation(tier, 60.0) for tier in Tier]
    assert found == [None, pytest.approx(0.25), pytest.approx(-0.35), pytest.approx(0.1)]
    assert control.share_deviation(Tier.PREMIUM, 61.0) is None
