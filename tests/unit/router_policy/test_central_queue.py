"""Queues of policies that assign when a worker is free: one queue for all workers, first in, first out."""

import pytest

from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.policies import LeastLoaded, RoundRobin
from penstock.router.policy.routing_policy import Arrival, WorkerLoad


def queue_of(*names, policy=LeastLoaded, **settings):
    """Return a queue in front of idle workers."""
    queue = DispatchQueue(policy(), QueueSettings(**settings))
    queue.set_workers(map(WorkerLoad, names), 0.0)
    return queue


def submit(queue, *tokens, now_s=0.0, again=False):
    """Queue requests named by their tokens; return what goes to a worker at once."""
    for each in tokens:
        assert queue.submit(each, Arrival((), each), now_s, again=again)
    return dispatched(queue, now_s)


def dispatched(queue, now_s=0.0):
    """Return what goes to a worker now, counted in there as the router core does."""
    found = []
    for each in queue.dispatch(now_s):
        load = queue.workers.eligible[each.worker].load
        load.inflight_requests += 1
        load.inflight_tokens += each.tokens
        found.append((each.item, each.worker))
    return found


@pytest.mark.parametrize(
    ("running", "slot_tokens", "has_room"),
    [
        ((), 8192, True),
        ((8191,), 8192, True),
        ((8192,), 8192, False),
        ((100_000,), 8192, False),  # an idle worker has taken it, however long
        ((8191, 10**6), None, True),
    ],
)
def test_a_worker_takes_more_below_its_slot_budget(running, slot_tokens, has_room):
    """Tokens in flight below the budget, or nothing in flight at all."""
    queue = queue_of("a", slot_tokens=slot_tokens)
    assert len(submit(queue, *running)) == len(running)

    assert submit(queue, 7) == ([(7, "a")] if has_room else [])


def test_first_in_is_first_out_and_tokens_are_summed():
    """The oldest goes first; what leaves takes its tokens along."""
    queue = queue_of("a", slot_requests=1)
    assert submit(queue, 1) == [(1, "a")]
    assert submit(queue, 5, 7) == []
    assert (len(queue), queue.tokens, queue.oldest_s(3.0)) == (2, 12, 3.0)

    queue.release(1, 1.0)

    assert dispatched(queue, 1.0) == [(5, "a")]
    assert (len(queue), queue.tokens) == (1, 7)


def test_a_prefilled_request_weighs_until_it_is_released():
    """Its prompt is counted as computed at once, or at its end where nothing else tells, and only that makes room."""
    queue = queue_of("a", slot_requests=1)
    submit(queue, 10, 20)
    queue.prefilled(10, 1.0)
    queue.prefilled(10, 1.0)
    assert dispatched(queue, 1.0) == []
    assert (queue.prompt_tokens.computed, queue.prompt_tokens.pending) == (10, {})

    queue.release(10, 2.0)

    assert dispatched(queue, 2.0) == [(20, "a")]
    assert queue.prompt_tokens.pending == {"a": 20}

    queue.release(20, 3.0, is_computed=True)

    assert (queue.prompt_tokens.computed, queue.prompt_tokens.pending) == (30, {})


def test_a_request_that_failed_on_its_worker_goes_to_the_front():
    """It was admitted before, so it waits behind none and meets no bound."""
    queue = queue_of("a", slot_requests=1, max_requests=1)
    submit(queue, 1)
    submit(queue, 2)
    assert queue.is_full
    assert not queue.submit(3, Arrival((), 3), 0.0)
    queue.release(1, 1.0)

    assert submit(queue, 1, again=True, now_s=1.0) == [(1, "a")]
    assert len(queue) == 1


def test_a_worker_that_failed_a_request_is_taken_only_if_there_is_no_other():
    """Even where the other one is fuller; one without room is waited for."""
    queue = queue_of("a", "b", slot_tokens=100)
    queue.submit(50, Arrival((), 50, frozenset({"b"})), 0.0)
    assert dispatched(queue) == [(50, "a")]
    queue.submit(60, Arrival((), 60, frozenset({"b"})), 0.0)
    assert dispatched(queue) == [(60, "a")]
    queue.submit(70, Arrival((), 70, frozenset({"b"})), 0.0)
    assert dispatched(queue) == []

    queue.set_workers([WorkerLoad("b")], 1.0)

    assert dispatched(queue, 1.0) == [(70, "b")]


def test_round_robin_passes_over_workers_without_room():
    """Turns are taken among those that have room, in the order given."""
    queue = queue_of("a", "b", "c", policy=RoundRobin, slot_requests=1)

    assert submit(queue, 1, 2, 3, 4) == [(1, "a"), (2, "c"), (3, "b")]


def test_a_closed_worker_is_sent_nothing():
    """Circuits are asked for each dispatch."""
    queue = queue_of("a", "b")
    queue.submit(1, Arrival((), 1), 0.0)

    assert [each.worker for each in queue.dispatch(0.0, lambda name: name == "b")] == ["b"]
