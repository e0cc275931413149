"""Every placing policy among fleets that misbehave: nothing is lost, nothing stays counted."""

import pytest

from penstock.api import QueueOrder, RouterConfig
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.prefixes import prompt_keys
from penstock.router.policy.registry import StickySessions, make_policy, policy_names
from penstock.router.policy.routing_policy import Arrival, AssignTime, RoutingDecision, WorkerLoad

NAMES = ["a", "b", "c"]


@pytest.fixture(params=policy_names())
def queues(request):
    """Return queues under each policy, with sessions, no worker yet."""
    placer = StickySessions(make_policy(RouterConfig(policy=request.param, ttft_slo_seconds=1.0)))
    return DispatchQueue(placer, QueueSettings(slot_tokens=1000, slo_s=1.0, order=QueueOrder.IN_TIME_FIRST))


def drain(queues, now_s):
    """Serve all that waits, in a fleet of three, and return the number served."""
    queues.set_workers(map(WorkerLoad, NAMES), now_s)
    served = 0
    while taken := list(queues.dispatch(now_s)):
        for handed in taken:
            queues.prefilled(handed.item, now_s)
            queues.release(handed.item, now_s)
            served += 1
    return served


def assert_idle(queues):
    """Nothing waits, runs or is decoded anywhere."""
    assert (queues.waiting, queues.tokens, queues.oldest_s(1e9)) == (0, 0, 0.0)
    assert queues.waiting_requests() == []
    assert {queues.workers.load_of(name, 1e9)[0] for name in NAMES} == {0}


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_clock_that_steps_breaks_nothing(queues, step_s):
    """An hour back or forth between arrival, start and end: estimates stay finite, everybody is served."""
    queues.set_workers(map(WorkerLoad, NAMES), 10_000.0)
    now_s = 10_000.0
    for item in range(30):
        queues.submit(item, Arrival((item % 3, item), 800), now_s)
        now_s += step_s if item % 10 == 5 else 0.1
        for handed in list(queues.dispatch(now_s)):
            now_s += step_s if item % 10 == 9 else 0.1
            queues.prefilled(handed.item, now_s)
            queues.release(handed.item, now_s)
        queues.rebalance(now_s)
    drain(queues, now_s)

    assert_idle(queues)
    assert all(0.0 < each.relative_slowdown < float("inf") for each in queues.workers.eligible.values())


def test_prompts_of_no_and_of_a_million_tokens_are_served(queues):
    """Neither an empty chain nor one of half a thousand keys is special."""
    huge = prompt_keys(bytes(4_000_000))
    queues.set_workers(map(WorkerLoad, NAMES), 0.0)
    queues.submit("empty", Arrival((), 0), 0.0)
    queues.submit("huge", Arrival(huge, 1_000_000), 0.0)
    queues.submit("again", Arrival(huge, 1_000_000), 0.0)

    assert drain(queues, 1.0) == 3
    assert_idle(queues)


class Raising:
    """A policy that raises while it is told to."""

    assigns = AssignTime.ON_ARRIVAL

    def __init__(self):
        self.is_broken = True

    def worker_joined(self, name):
        """Ignore it."""

    worker_left = worker_joined

    def route(self, arrival, workers, estimates):
        """Choose the first worker, or none."""
        if self.is_broken:
            raise ZeroDivisionError
        return RoutingDecision(next(iter(workers)), "first")


def counts_of(queues):
    """Return what an empty queue has zero of."""
    return queues.waiting, queues.tokens, queues.room.tiers.total(), queues.prompt_tokens.waiting


def test_a_request_for_which_the_policy_raises_leaves_nothing_counted():
    """Neither a place, nor room, nor tokens: a defect in a policy may not fill the queue for good."""
    policy = Raising()
    queues = DispatchQueue(policy, QueueSettings(max_requests=1))
    queues.set_workers([WorkerLoad("a")], 0.0)
    with pytest.raises(ZeroDivisionError):
        queues.submit(1, Arrival((), 10), 0.0)
    assert counts_of(queues) == (0, 0, 0, 0)
    policy.is_broken = False
    assert queues.submit(2, Arrival((), 10), 0.0)


def test_what_waits_while_the_policy_raises_can_still_leave_and_be_served():
    """Three wait for a worker that goes; the policy raises over the first; one leaves, the others are served later."""
    policy = Raising()
    policy.is_broken = False
    queues = DispatchQueue(policy, QueueSettings())
    queues.set_workers([WorkerLoad("a")], 0.0)
    for item in range(3):
        queues.submit(item, Arrival((), 10), 0.0)
    policy.is_broken = True
    with pytest.raises(ZeroDivisionError):
        queues.set_workers([WorkerLoad("b")], 1.0)
    queues.cancel(1)
    policy.is_broken = False
    queues.set_workers([WorkerLoad("b")], 2.0)
    assert [each.item for each in queues.dispatch(2.0)] == [0, 2]
    assert counts_of(queues) == (0, 0, 0, 0)
