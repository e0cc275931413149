"""The queue order in-time-first: who can still meet the SLO goes before who cannot, and nobody waits for ever."""

import pytest

from penstock.api import QueueOrder
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.policies import LeastPending
from penstock.router.policy.routing_policy import Arrival, WorkerLoad

PACE = 1000.0


def queue_of(order=QueueOrder.IN_TIME_FIRST, **settings):
    """Return one worker that computes a prompt at a time, 1,000 tokens/s, for an SLO of 5 s."""
    queues = DispatchQueue(
        LeastPending(),
        QueueSettings(slot_requests=1, slo_s=5.0, tokens_per_s=PACE, order=order, **settings),
    )
    queues.set_workers(map(WorkerLoad, ["a"]), 0.0)
    return queues


def submit(queues, item, tokens, now_s):
    """Queue a prompt of which nothing is cached."""
    queues.submit(item, Arrival((hash(item) & 0xFFFF,), tokens), now_s)


def next_of(queues, now_s):
    """Return who is handed over now."""
    (handed,) = list(queues.dispatch(now_s))
    return handed.item


@pytest.mark.parametrize(
    ("order", "expected"),
    [(QueueOrder.ARRIVAL, ["late", "early"]), (QueueOrder.IN_TIME_FIRST, ["early", "late"])],
)
def test_who_can_be_in_time_goes_first(order, expected):
    """At 4 s a prompt of 2 s is late for 5 s; one that came after it and takes 1 s is not."""
    queues = queue_of(order)
    submit(queues, "runs", 4000, 0.0)
    list(queues.dispatch(0.0))
    submit(queues, "late", 2000, 0.0)
    submit(queues, "early", 1000, 1.0)
    queues.prefilled("runs", 4.0)
    first = next_of(queues, 4.0)
    queues.prefilled(first, 5.0)

    assert [first, next_of(queues, 5.0)] == expected


def test_all_in_time_keep_the_order_of_arrival():
    """A longer prompt that is still in time is not overtaken."""
    queues = queue_of()
    for item, tokens in (("long", 3000), ("short", 10), ("middle", 500)):
        submit(queues, item, tokens, 0.0)
    served = []
    for step in range(3):
        served.append(next_of(queues, 0.0))
        queues.prefilled(served[-1], 0.001 * step)

    assert served == ["long", "short", "middle"]


def test_the_late_are_served_when_nobody_else_waits():
    """Late is not refused: an empty queue turns to them at once, in order of arrival."""
    queues = queue_of()
    submit(queues, "first", 100, 0.0)
    submit(queues, "second", 100, 0.0)

    assert next_of(queues, 60.0) == "first"
    queues.prefilled("first", 60.1)
    assert next_of(queues, 60.1) == "second"
    queues.prefilled("second", 60.2)
    assert queues.waiting == 0


def test_a_prompt_that_can_never_be_in_time_is_served_when_idle():
    """A million tokens take longer than any SLO."""
    queues = queue_of()
    submit(queues, "huge", 1_000_000, 0.0)

    assert next_of(queues, 0.0) == "huge"


def test_the_late_get_every_tenth_turn_of_a_busy_instance():
    """However many arrive in time, a late request waits at most ten turns per late one before it."""
    queues = queue_of()
    submit(queues, "late 0", 6000, 0.0)
    submit(queues, "late 1", 6000, 0.0)
    served = []
    for step in range(40):
        now_s = step * 0.1
        for twin in range(2):
            submit(queues, f"{step}.{twin}", 50, now_s)
        served.append(next_of(queues, now_s))
        queues.prefilled(served[-1], now_s + 0.05)

    assert [served.index("late 0") + 1, served.index("late 1") + 1] == [10, 20]


def test_late_work_does_not_scare_newcomers_away():
    """What lets newcomers pass does not count as pending before them, and does count as queued."""
    queues = queue_of()
    submit(queues, "late", 6000, 0.0)
    submit(queues, "in time", 100, 0.0)
    assert queues.workers.load_of("a", 0.0)[0] == 6100

    assert next_of(queues, 0.0) == "in time"
    assert queues.workers.eligible["a"].pending_tokens == 100
    assert queues.workers.queued_tokens("a") == 6000
    assert queues.workers.load_of("a", 0.0)[0] == 100, "late work lets other routers' requests go first, too"


def test_a_late_request_can_leave_and_expire():
    """Withdrawn, timed out or queued again: counters return to zero."""
    queues = queue_of(max_wait_s=30.0)
    for item in ("gone", "expired", "moved"):
        submit(queues, item, 6000, 0.0 if item != "moved" else 20.0)
    submit(queues, "in time", 10, 20.0)
    assert next_of(queues, 20.0) == "in time"

    queues.cancel("gone")
    assert [each.item for each in queues.take_expired(31.0)] == ["expired"]
    queues.set_workers(map(WorkerLoad, ["b"]), 31.0)
    assert next_of(queues, 31.0) == "moved"

    assert queues.waiting == queues.tokens == 0
    assert queues.workers.queued_tokens("b") == 0


def test_without_a_pace_nobody_is_late():
    """Nothing was measured yet: order of arrival."""
    queues = DispatchQueue(
        LeastPending(), QueueSettings(slot_requests=1, slo_s=5.0, order=QueueOrder.IN_TIME_FIRST)
    )
    queues.set_workers(map(WorkerLoad, ["a"]), 0.0)
    submit(queues, "old", 1_000_000, 0.0)
    submit(queues, "new", 1, 50.0)

    assert next_of(queues, 50.0) == "old"
