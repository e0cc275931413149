"""When a decode worker renews, and for whom."""

from penstock.engine.core.lease import HeartbeatSchedule


def test_first_heartbeat_is_due_on_arrival():
    """A request is renewed from the moment it is tracked, waiting or not."""
    schedule = HeartbeatSchedule(5)
    schedule.track("p0", "a")
    assert schedule.next_s() < 0
    assert schedule.due(100) == {"p0": ["a"]}
    assert schedule.next_s() == 105


def test_one_message_renews_all_requests_of_an_engine():
    """Requests of one prefill worker travel together, others apart."""
    schedule = HeartbeatSchedule(5)
    for engine, request in (("p0", "a"), ("p0", "b"), ("p1", "c")):
        schedule.track(engine, request)
    assert schedule.due(0) == {"p0": ["a", "b"], "p1": ["c"]}


def test_rounds_of_messages_keep_their_distance():
    """A request that arrives between two rounds waits for the next one, whichever engine keeps its prompt."""
    schedule = HeartbeatSchedule(5)
    schedule.track("p0", "a")
    schedule.due(0)
    schedule.track("p0", "b")
    schedule.track("p1", "c")
    assert schedule.due(4.9) == {}
    assert schedule.due(5) == {"p0": ["a", "b"], "p1": ["c"]}


def test_untracked_requests_are_not_renewed():
    """After the read, or the end, of all requests nothing is due; unknown ids do no harm."""
    schedule = HeartbeatSchedule(5)
    schedule.track("p0", "a")
    schedule.untrack("p0", "a")
    schedule.untrack("p0", "a")
    schedule.untrack("p9", "x")
    assert schedule.next_s() is None
    assert schedule.due(1000) == {}
