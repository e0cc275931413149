"""The timeline: steps follow each other without drift, late callers lose nothing."""

import pytest

from penstock.engine.core.lease import Read


def test_steps_start_where_the_last_one_ended(make_timeline, request_of, run_all):
    """TTFT 1.008 s, then gaps of exactly 0.1 s."""
    timeline = make_timeline()
    timeline.submit(request_of("a", outputs=4, arrival_s=5.0))
    assert timeline.next_due_s() == 5.0
    ends = [outcome.end_s for outcome in run_all(timeline)]
    assert ends == pytest.approx([6.008, 6.108, 6.208, 6.308])
    assert timeline.next_due_s() is None
    assert timeline.is_idle


def test_late_caller_gets_all_steps_with_their_own_times(make_timeline, request_of, run_all):
    """Waking up once at the end gives the same outcomes as waking up for each."""
    timely, late = make_timeline(), make_timeline()
    for timeline in (timely, late):
        for number in range(3):
            timeline.submit(request_of(f"r{number}", outputs=5, arrival_s=number * 1.05))
    expected = [(outcome.end_s, outcome.steady_tokens) for outcome in run_all(timely)]
    outcomes = late.run_until(1000.0, max_steps=1000)
    assert [(outcome.end_s, outcome.steady_tokens) for outcome in outcomes] == expected


def test_arrival_during_a_late_step_waits_for_its_own_time(make_timeline, request_of):
    """A step that began before a request arrived does not hold it, even if it is processed afterwards."""
    timeline = make_timeline()
    timeline.submit(request_of("a", outputs=9, arrival_s=0.0))
    timeline.submit(request_of("b", outputs=9, arrival_s=1.05))
    assert timeline.backlog == 2
    timeline.run_until(1.04, max_steps=10)
    assert timeline.backlog == 1
    outcomes = timeline.run_until(10.0, max_steps=2)
    assert [outcome.end_s for outcome in outcomes] == pytest.approx([1.108, 2.116])
    assert outcomes[1].started[0].first_scheduled_s == pytest.approx(1.108)


def test_steps_per_call_are_bounded(make_timeline, request_of):
    """The rest is due at once at the next call."""
    timeline = make_timeline()
    timeline.submit(request_of("a", outputs=9))
    assert len(timeline.run_until(100.0, max_steps=3)) == 3
    assert timeline.next_due_s() < 100.0
    assert len(timeline.run_until(100.0, max_steps=100)) == 6


def test_release_from_outside_is_used_at_once(make_timeline, request_of, run_all):
    """After a read, `retry` starts the request that waited for its blocks."""
    timeline = make_timeline(role="prefill", blocks=4)
    timeline.submit(request_of("a", prompt=12, outputs=1, pin_blocks=True))
    timeline.submit(request_of("b", prompt=12, outputs=1, arrival_s=2.0))
    run_all(timeline, until_s=3.0)
    timeline.engine.end_leases([Read("a")])
    timeline.retry(7.0)
    assert timeline.next_due_s() == pytest.approx(8.012)
    timeline.retry(7.5)
    assert timeline.next_due_s() == pytest.approx(8.012)


def test_abort_before_arrival_is_reached(make_timeline, request_of):
    """A request that the timeline has not reached yet disappears without a trace."""
    timeline = make_timeline()
    timeline.submit(request_of("a", arrival_s=5.0))
    assert timeline.abort("a", 1.0)
    assert not timeline.abort("a", 1.0)
    assert timeline.is_idle
    assert timeline.next_due_s() is None
