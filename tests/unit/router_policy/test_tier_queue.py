"""Who is next among tiers and tenants, and what each of them is sure to get."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.api import Tier, TiersConfig
from penstock.api.router_tiers import TierShares
from penstock.router.policy.arrival import Arrival, QueuedRequest
from penstock.router.policy.tiers import PRIORITIES, SHARED, TierQueue, effective_priority, quantum

LARGEST = 3000


def request(
    item: object, tier: Tier = Tier.STANDARD, tokens: int = 100, *, tenant: str = "", since_s: float = 0.0
):
    """Return a request that waits since ``since_s``."""
    arrival = Arrival((), tokens, tier=tier, tenant=tenant)
    return QueuedRequest(item, arrival, since_s, uncached=tokens)


def serve(queue, now_s: float = 0.0):
    """Take the next request out, as a worker's queue does."""
    queued = queue.next_up(now_s)
    queue.pull(queued)
    queue.charge(queued)
    return queued


def backlog(queue, tiers, *, count: int, tokens: int = 100, tenants=("",)) -> None:
    """Queue equal requests of some tiers, tenants in turn."""
    for tier in tiers:
        for at in range(count):
            queue.put(request((tier, at), tier, tokens, tenant=tenants[at % len(tenants)]))


def test_system_goes_before_all_others_whatever_its_cost() -> None:
    """A cluster's own requests wait for none but each other."""
    queue = TierQueue(TiersConfig())
    backlog(queue, (Tier.PREMIUM, Tier.SYSTEM), count=30, tokens=LARGEST)
    assert [serve(queue).arrival.tier for _ in range(31)] == [Tier.SYSTEM] * 30 + [Tier.PREMIUM]


def test_a_premium_request_that_comes_to_a_long_background_queue_is_next() -> None:
    """An idle tier has saved a round's share, so that it need not wait for the others' credits to be spent."""
    queue = TierQueue(TiersConfig())
    backlog(queue, (Tier.STANDARD, Tier.BACKGROUND), count=500)
    for _ in range(300):
        serve(queue)
    queue.put(request("new", Tier.PREMIUM))
    assert serve(queue).item == "new"


@pytest.mark.parametrize(
    ("tokens", "changed", "expected"),
    [
        ((100, 300, 1000), None, (0.5, 0.35, 0.15)),
        ((0, 100, 100), None, (0.0, 0.7, 0.3)),
        ((0, 100, 100), (0.1, 0.45, 0.45), (0.0, 0.5, 0.5)),
    ],
    ids=["all want more", "an absent tier's goes to the others", "changed while requests wait"],
)
def test_tokens_are_shared_as_configured(tokens, changed, expected) -> None:
    """By tokens, not by requests: background's are ten times as long as premium's."""
    queue = TierQueue(TiersConfig())
    for tier, each in zip(SHARED, tokens, strict=True):
        backlog(queue, (tier,), count=4000 if each else 0, tokens=each)
    if changed is not None:
        queue.configure(TiersConfig(shares=TierShares(**dict(zip(SHARED, changed, strict=True)))))
    served: Counter[Tier] = Counter()
    while served.total() < 350_000:
        queued = serve(queue)
        served[queued.arrival.tier] += queued.tokens
    assert [served[tier] / served.total() for tier in SHARED] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("tier", "waited_s", "priority"),
    [
        (Tier.BACKGROUND, 0, 2.0),
        (Tier.BACKGROUND, 10, 1.0),
        (Tier.BACKGROUND, 15, 0.5),
        (Tier.BACKGROUND, 1000, 0.5),
        (Tier.STANDARD, 3, 0.7),
        (Tier.STANDARD, 1000, 0.5),
        (Tier.PREMIUM, 1000, 0.0),
        (Tier.SYSTEM, 1000, -1.0),
    ],
)
def test_age_raises_priority_to_just_behind_premium(tier: Tier, waited_s: float, priority: float) -> None:
    """0.1 a second, 1.5 at most, and never before a fresh premium request."""
    assert effective_priority(TiersConfig(), tier, waited_s) == pytest.approx(priority)


def test_an_aged_background_request_goes_before_fresh_standard_and_behind_fresh_premium() -> None:
    """Within a round age decides, and not beyond it."""
    queue = TierQueue(TiersConfig())
    queue.put(request("old", Tier.BACKGROUND, since_s=0.0))
    queue.put(request("fresh", Tier.STANDARD, since_s=20.0))
    queue.put(request("paid", Tier.PREMIUM, since_s=20.0))
    assert [serve(queue, 20.0).item for _ in range(3)] == ["paid", "old", "fresh"]


def test_tenants_of_equal_demand_are_served_alike() -> None:
    """Jain's index over a tier's tenants is at least 0.95, though one of them came first with everything."""
    queue = TierQueue(TiersConfig())
    tenants = [f"t{at}" for at in range(8)]
    for tenant in tenants:
        for at in range(200):
            queue.put(request((tenant, at), tokens=50 + 37 * (at % 11), tenant=tenant))
    served: Counter[str] = Counter()
    for _ in range(600):
        queued = serve(queue)
        served[queued.arrival.tenant] += queued.tokens
    amounts = [served[tenant] for tenant in tenants]
    assert sum(amounts) ** 2 / (len(amounts) * sum(each * each for each in amounts)) >= 0.95


def test_a_tenant_that_comes_back_gets_no_arrears() -> None:
    """Having asked for nothing earns nothing: it shares evenly from then on."""
    queue = TierQueue(TiersConfig())
    for at in range(300):
        queue.put(request(("busy", at), tenant="busy"))
    for _ in range(100):
        serve(queue)
    for at in range(100):
        queue.put(request(("back", at), tenant="back"))
    served = Counter(serve(queue).arrival.tenant for _ in range(40))
    assert abs(served["back"] - served["busy"]) <= 2


def test_tenants_that_are_gone_are_forgotten() -> None:
    """A thousand tenants that come one after the other leave no trace of those before."""
    queue = TierQueue(TiersConfig())
    for at in range(1000):
        queue.put(request(at, tenant=f"t{at}"))
        serve(queue)
    assert len(queue._tiers[Tier.STANDARD]._tags) == 1


class TierQueueMachine(RuleBasedStateMachine):
    """Arrivals, clients that leave and turns in any order."""

    def __init__(self) -> None:
        super().__init__()
        tiers = TiersConfig()
        self.queue = TierQueue(tiers)
        self.waiting: dict[int, QueuedRequest] = {}
        self.count = 0
        self.now_s = 0.0
        self.ahead = dict.fromkeys(SHARED, 0)
        # Rounds that a tier in debt waits, and one request of each other tier.
        self.bound = {
            tier: (LARGEST // quantum(tiers, tier) + 2) * tiers.round_tokens + 2 * LARGEST for tier in SHARED
        }

    @rule(
        tier=st.sampled_from(list(PRIORITIES)),
        tokens=st.integers(1, LARGEST),
        tenant=st.sampled_from("abc"),
        is_first=st.booleans(),
        count=st.integers(1, 8),
    )
    def arrive(self, tier: Tier, tokens: int, tenant: str, is_first: bool, count: int) -> None:
        """Queue requests."""
        for _ in range(count):
            self.count += 1
            queued = request(self.count, tier, tokens, tenant=tenant, since_s=self.now_s)
            self.waiting[self.count] = queued
            self.queue.put(queued, is_first=is_first)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data) -> None:
        """A client leaves."""
        item = data.draw(st.sampled_from(list(self.waiting)))
        self.queue.pull(self.waiting.pop(item))

    @rule(turns=st.integers(1, 12))
    def turn(self, turns: int) -> None:
        """Serve, and count what each waiting tier sees pass by."""
        for _ in range(min(turns, len(self.waiting))):
            had = {queued.arrival.tier for queued in self.waiting.values()}
            queued = serve(self.queue, self.now_s)
            assert self.waiting.pop(queued.item) is queued
            tier = queued.arrival.tier
            if Tier.SYSTEM in had:
                assert tier is Tier.SYSTEM
                continue
            for each in SHARED:
                waits_on = each in had and each is not tier
                self.ahead[each] = self.ahead[each] + queued.tokens if waits_on else 0
                assert self.ahead[each] <= self.bound[each]

    @invariant()
    def nothing_is_lost_or_made(self) -> None:
        """What waits is what came and has not gone."""
        assert {queued.item for queued in self.queue} == set(self.waiting)
        assert bool(self.queue) == bool(self.waiting)

    @invariant()
    def credits_stay_in_their_bounds(self) -> None:
        """More than the largest request below zero, at most one share above."""
        for tier in SHARED:
            assert -LARGEST < self.queue.credit(tier) <= quantum(TiersConfig(), tier)


TierQueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTierQueueMachine = TierQueueMachine.TestCase
