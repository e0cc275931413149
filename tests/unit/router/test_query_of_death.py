"""Which bodies a router refuses because they killed a worker."""

import pytest

from penstock.router.proxy.completion import RequestRefused
from penstock.router.proxy.query_of_death import REFUSED_S, QueriesOfDeath


@pytest.fixture(name="clock")
def _clock():
    """Seconds that a test sets."""
    return [100.0]


def is_refused(requests, body):
    """Whether a body is refused now."""
    try:
        requests.check(body)
    except RequestRefused as refused:
        return refused.status == 422
    return False


def test_a_body_is_refused_until_its_time_has_passed_and_no_other_is(clock):
    """Ten minutes from its conviction on; the answer says what is known, for how long, and its name in the log."""
    requests = QueriesOfDeath(lambda: clock[0])
    assert not is_refused(requests, b"deadly")
    digest = requests.add(b"deadly", ("a", "b"), "c")
    known = "ran on a and b when they died, then alone on c, which died too"
    with pytest.raises(RequestRefused, match=f"request {digest} {known}; it is refused for another 600 s"):
        requests.check(b"deadly")
    assert not is_refused(requests, b"harmless")
    clock[0] += REFUSED_S - 1
    assert is_refused(requests, b"deadly")
    clock[0] += 1
    assert not is_refused(requests, b"deadly")


def test_only_the_newest_are_remembered(clock):
    """However many bodies a client sends, memory is bounded; one that kills again counts as new."""
    requests = QueriesOfDeath(lambda: clock[0], most=2)
    for body in (b"a", b"b", b"a", b"c"):
        requests.add(body, ("a",), "b")
    assert [body for body in (b"a", b"b", b"c") if is_refused(requests, body)] == [b"a", b"c"]
