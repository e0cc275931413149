"""Preble with its own window: what a worker was given over three minutes counts, not what waits there now."""

import pytest

from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.policies import WINDOW_S, PrebleE2
from penstock.router.policy.routing_policy import Arrival, WorkerLoad


def queues_of(*names):
    """Return an empty queue before workers of these names."""
    queues = DispatchQueue(PrebleE2(), QueueSettings())
    queues.set_workers(map(WorkerLoad, names), 0.0)
    return queues


def send(queues, item, chain, tokens, now_s, *, avoid=()):
    """Place a request that is computed at once; return its worker."""
    queues.submit(item, Arrival(chain, tokens, frozenset(avoid), block_tokens=1000), now_s)
    (handed,) = queues.dispatch(now_s)
    queues.prefilled(item, now_s)
    return handed.worker


def test_what_was_computed_long_ago_still_counts_within_the_window():
    """Both workers are idle; the one that was given less in the last three minutes is taken."""
    queues = queues_of("a", "b")
    first = send(queues, "large", (1, 2, 3, 4), 4000, 0.0)

    nine = {send(queues, f"small {i}", (100 + i,), 400, 1.0 + i) for i in range(9)}

    assert nine == {"a", "b"} - {first}


def test_beyond_the_window_it_is_forgotten():
    """After three minutes the large prompt no longer weighs."""
    queues = queues_of("a", "b")
    first = send(queues, "large", (1, 2, 3, 4), 4000, 0.0)
    send(queues, "small", (5,), 1000, 1.0)

    assert send(queues, "next", (6,), 1000, WINDOW_S) == first


@pytest.mark.parametrize(("shared", "follows"), [(3, True), (2, False)])
def test_a_prefix_is_followed_when_it_outweighs_the_rest(shared, follows):
    """Of four blocks three cached are more than the rest, two are not, and the less loaded worker is taken."""
    queues = queues_of("a", "b")
    holder = send(queues, "first", (1, 2, 3, 4), 4000, 0.0)

    chosen = send(queues, "next", (*range(1, 1 + shared), *range(50, 54 - shared)), 4000, 1.0)

    assert (chosen == holder) is follows


def test_of_several_that_hold_the_prefix_the_less_loaded_is_taken():
    """Two of three hold it; the third, though idle, is not asked."""
    queues = queues_of("a", "b", "c")
    for name in ("a", "b"):
        send(queues, f"warm {name}", (1, 2, 3, 4), 4000, 0.0, avoid={"a", "b", "c"} - {name})
    send(queues, "load", (9,), 8000, 1.0, avoid={"b", "c"})

    assert send(queues, "next", (1, 2, 3, 4), 4000, 2.0) == "b"


def test_a_worker_that_came_back_begins_with_nothing_given():
    """What it was given before it left was another time's load."""
    queues = queues_of("a", "b")
    first = send(queues, "large", (1, 2, 3, 4), 4000, 0.0)
    other = ({"a", "b"} - {first}).pop()
    queues.set_workers([WorkerLoad(other)], 1.0)
    queues.set_workers(map(WorkerLoad, ("a", "b")), 2.0)
    send(queues, "small", (5,), 100, 3.0, avoid={first})

    assert send(queues, "next", (6,), 1000, 4.0) == first
