"""The queue of dirty keys: no duplicates, one worker per key, backoff, fairness, resync."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from graph_harness import Clock
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ClusterError
from penstock_operator.queue import RateLimits, WorkQueue, serve

A, B, C = ("ns", "a"), ("ns", "b"), ("ns", "c")


def _queue(clock=None, **limits):
    limits = {"gap_s": 0.0, "jitter": 0.0, **limits}
    return WorkQueue(RateLimits(**limits), now_s=clock or Clock(), spread=random.Random(1))


def test_a_key_that_comes_again_waits_behind_the_others():
    """Fairness: one busy graph does not starve the rest."""
    clock = Clock()
    queue = _queue(clock)
    for key in (A, B, C):
        queue.enqueue(key)
        clock.s += 0.001
    order = []
    for _ in range(6):
        key = queue.pop()
        order.append(key)
        queue.enqueue(key)
        clock.s += 0.001
        queue.done(key)
    assert order == [A, B, C, A, B, C]


def test_failures_double_the_wait_up_to_a_limit_and_success_resets_it():
    """Backoff 0.5, 1, 2, 4, 4; then 0.5 again."""
    clock = Clock()
    queue = _queue(clock, first_backoff_s=0.5, max_backoff_s=4.0)
    queue.enqueue(A)
    waits = []
    for _ in range(5):
        assert queue.pop() == A
        waits.append(queue.failed(A))
        clock.s += waits[-1]
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert queue.pop() == A
    queue.done(A)
    queue.enqueue(A)
    assert queue.pop() == A
    assert queue.failed(A) == 0.5


def test_an_event_does_not_cut_a_backoff_short_but_a_users_change_does():
    """A key whose own writes cause events would spin otherwise."""
    clock = Clock()
    queue = _queue(clock, first_backoff_s=10.0)
    queue.enqueue(A)
    queue.pop()
    queue.failed(A)
    queue.enqueue(A)
    clock.s += 1
    assert queue.pop() is None
    queue.enqueue(A, urgent=True)
    assert queue.pop() == A


def test_a_burst_of_events_after_a_look_costs_one_more_look():
    """The gap collects them."""
    clock = Clock()
    queue = _queue(clock, gap_s=0.1)
    queue.enqueue(A)
    queue.pop()
    queue.done(A)
    looks = 0
    for _ in range(9):
        clock.s += 0.01
        queue.enqueue(A)
        looks += queue.pop() is not None
    assert looks == 0
    clock.s += 0.02
    assert queue.pop() == A


def test_a_wanted_look_comes_when_wanted_unless_an_earlier_mark_does():
    """Drains look again after a second."""
    clock = Clock()
    queue = _queue(clock)
    queue.enqueue(A)
    queue.pop()
    queue.done(A, requeue_after_s=1.0)
    clock.s += 0.9
    assert queue.pop() is None
    clock.s += 0.1
    assert queue.pop() == A
    queue.done(A, requeue_after_s=5.0)
    queue.enqueue(A)
    assert queue.pop() == A


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["mark", "pop", "done", "fail"]))))
def test_no_key_is_lost_and_none_runs_twice(steps):
    """Whatever the order: every key marked since its last start is worked on in the end."""
    clock = Clock()
    queue = _queue(clock, gap_s=0.05)
    wanted, running = set(), set()
    for name, step in steps:
        key = ("ns", name)
        clock.s += 0.01
        if step == "mark":
            queue.enqueue(key)
            wanted.add(key)
        elif step == "pop":
            found = queue.pop()
            if found is not None:
                assert found not in running
                running.add(found)
                wanted.discard(found)
        elif key in running:
            running.discard(key)
            if step == "done":
                queue.done(key)
            else:
                queue.failed(key)
                wanted.add(key)
    for key in running:
        queue.done(key)
    clock.s += 100
    found = set()
    while (key := queue.pop()) is not None:
        found.add(key)
    assert found >= wanted


async def test_workers_survive_failures_and_retry():
    """A cluster's refusal and a defect both cost the key a wait, and the others nothing."""
    queue = WorkQueue(RateLimits(gap_s=0, first_backoff_s=0.001))
    tries = {A: 0, B: 0, C: 0}
    all_done = asyncio.Event()

    async def work(key):
        tries[key] += 1
        if key == A and tries[A] == 1:
            raise ClusterError("503")
        if key == B and tries[B] <= 2:
            raise ValueError("defect")
        if tries[A] == 2 and tries[B] == 3 and tries[C] == 1:
            all_done.set()

    task = asyncio.create_task(serve(queue, work, workers=2))
    for key in (A, B, C):
        queue.enqueue(key)
    await all_done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tries == {A: 2, B: 3, C: 1}


async def test_a_cancellation_left_behind_by_one_look_does_not_reach_the_next():
    """A failed task group may leave its task marked as being cancelled; a worker that inherits it would end."""
    queue = WorkQueue(RateLimits(gap_s=0, first_backoff_s=0.001))
    inherited = []
    all_done = asyncio.Event()

    async def work(key):
        task = asyncio.current_task()
        inherited.append(task.cancelling())
        if len(inherited) == 3:
            all_done.set()
            return
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        raise ValueError("defect")

    task = asyncio.create_task(serve(queue, work, workers=1))
    queue.enqueue(A)
    await all_done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inherited == [0, 0, 0]


async def test_a_waiting_worker_wakes_for_an_earlier_key():
    """A mark wakes those that sleep until a later one."""
    queue = WorkQueue(RateLimits(gap_s=0))
    queue.enqueue(A, delay_s=60)
    taken = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.enqueue(B)
    assert await taken == B
