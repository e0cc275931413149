"""Who is next: in the central queue of policies that assign when a worker is free, and in a worker's own by deadline."""

import pytest
from placement import PACE, Arrival, arrival, placement, send

from penstock.api import QueueOrder
from penstock.router.core.waiting import Headroom
from penstock.router.policy.policies import LeastLoaded, LeastPending, RoundRobin
from penstock.router.policy.routing_policy import WorkerLoad


def queue_of(*names, policy=LeastLoaded, **settings):
    """Return a queue in front of idle workers."""
    return placement(policy(), names, **settings)


def submit(queue, *tokens, now_s=0.0, is_retry=False):
    """Queue requests named by their tokens; return what goes to a worker at once."""
    for each in tokens:
        assert queue.submit(each, Arrival((), each), now_s, is_retry=is_retry)
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

    assert submit(queue, 1, is_retry=True, now_s=1.0) == [(1, "a")]
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
    limits = {"a": Headroom.NONE, "b": Headroom.ANY}

    assert [each.worker for each in queue.dispatch(0.0, limits.__getitem__)] == ["b"]


# ---------------------------------------------------------------------- deadlines


def one_server(order=QueueOrder.IN_TIME_FIRST, tokens_per_s=PACE, **settings):
    """Return one worker that computes a prompt at a time, 1,000 tokens/s, for an SLO of 5 s."""
    settings |= {"slot_requests": 1, "slo_s": 5.0, "order": order}
    return placement(LeastPending(), ("a",), tokens_per_s=tokens_per_s, **settings)


def put(queues, item, tokens, now_s):
    """Queue a prompt of which nothing is cached."""
    queues.submit(item, arrival(hash(item) & 0xFFFF, tokens=tokens), now_s)


def next_of(queues, now_s):
    """Return who is handed over now."""
    (handed,) = list(queues.dispatch(now_s))
    return handed.item


def test_hit_first_serves_the_largest_cached_share_first():
    """Queue order is a setting of its own."""
    queues = placement(LeastPending(), names=("a",), order=QueueOrder.HIT_FIRST, slot_requests=1)
    send(queues, "warm", arrival(1, 2))
    queues.submit("cold", arrival(8, 9), 0.1)
    queues.submit("hit", arrival(1, 2), 0.2)
    queues.prefilled("warm", 1.0)

    (handed,) = list(queues.dispatch(1.0))

    assert handed.item == "hit"


RUNS_LATE_EARLY = [("runs", 4000, 0.0), ("late", 2000, 0.0), ("early", 1000, 1.0)]


@pytest.mark.parametrize(
    ("prompts", "turns_s", "options", "expected"),
    [
        (RUNS_LATE_EARLY, (0.0, 4.0, 5.0), {"order": QueueOrder.ARRIVAL}, "runs late early"),
        (RUNS_LATE_EARLY, (0.0, 4.0, 5.0), {}, "runs early late"),
        (
            [("long", 3000, 0.0), ("short", 10, 0.0), ("middle", 500, 0.0)],
            (0.0,) * 3,
            {},
            "long short middle",
        ),
        (
            [("one", 100, 0.0), ("two", 100, 0.0), ("huge", 10**6, 0.0)],
            (60.0, 61.0, 62.0),
            {},
            "one two huge",
        ),
        ([("old", 10**6, 0.0), ("new", 1, 50.0)], (50.0, 51.0), {"tokens_per_s": None}, "old new"),
    ],
    ids=[
        "by arrival",
        "at 4 s a prompt of 2 s is late for 5 s, and one of 1 s that came after it is not",
        "all in time keep the order of arrival, a longer prompt too",
        "the late, and one that can never be in time, are served when no other waits",
        "without a throughput none is late",
    ],
)
def test_who_can_be_in_time_goes_first(prompts, turns_s, options, expected):
    """Late is not refused: an empty queue turns to them at once, in order of arrival."""
    queues, left, served = one_server(**options), list(prompts), []
    for now_s in turns_s:
        while left and left[0][2] <= now_s:
            put(queues, *left.pop(0))
        served.append(next_of(queues, now_s))
        queues.prefilled(served[-1], now_s, measured=False)

    assert served == expected.split()


def test_the_late_get_every_tenth_turn_of_a_busy_instance():
    """However many arrive in time, a late request waits at most ten turns per late one before it."""
    queues = one_server()
    put(queues, "late 0", 6000, 0.0)
    put(queues, "late 1", 6000, 0.0)
    served = []
    for step in range(40):
        now_s = step * 0.1
        for twin in range(2):
            put(queues, f"{step}.{twin}", 50, now_s)
        served.append(next_of(queues, now_s))
        queues.prefilled(served[-1], now_s + 0.05)

    assert [served.index("late 0") + 1, served.index("late 1") + 1] == [10, 20]


def test_late_work_does_not_scare_newcomers_away():
    """What lets newcomers pass does not count as pending before them, and does count as queued."""
    queues = one_server()
    put(queues, "late", 6000, 0.0)
    put(queues, "in time", 100, 0.0)
    assert queues.workers.load_of("a", 0.0)[0] == 6100

    assert next_of(queues, 0.0) == "in time"
    assert queues.workers.eligible["a"].pending_tokens == 100
    assert queues.workers.queued_tokens("a") == 6000
    assert queues.workers.load_of("a", 0.0)[0] == 100, "late work lets other routers' requests go first, too"


def test_a_late_request_can_leave_and_expire():
    """Withdrawn, timed out or queued again: counters return to zero."""
    queues = one_server(max_wait_s=30.0)
    for item in ("gone", "expired", "moved"):
        put(queues, item, 6000, 0.0 if item != "moved" else 20.0)
    put(queues, "in time", 10, 20.0)
    assert next_of(queues, 20.0) == "in time"

    queues.cancel("gone")
    assert [each.item for each in queues.take_expired(31.0)] == ["expired"]
    queues.set_workers(map(WorkerLoad, ["b"]), 31.0)
    assert next_of(queues, 31.0) == "moved"

    assert queues.waiting == queues.tokens == 0
    assert queues.workers.queued_tokens("b") == 0
