"""Leases: initial term, extensions, reads and expiry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_engine.core.lease import LeaseTable, LeaseTerms


@pytest.mark.parametrize(
    ("duration_s", "interval_s", "extension_s"),
    [(30, 5, 20), (60, 10, 40), (12, 2, 8), (6, 1, 4), (7, 1, 4), (3, 0.5, 2)],
)
def test_terms_follow_from_the_duration(duration_s, interval_s, extension_s):
    """Interval is a sixth and extension two thirds, in whole seconds; below 6 s the interval stays above 0."""
    terms = LeaseTerms(duration_s)
    assert terms.heartbeat_interval_s == interval_s
    assert terms.extension_s == extension_s


def test_worked_example_of_default_terms():
    """Granted at 0: heartbeats at 5 and 10 leave the end at 30, then 15, 20, 25 move it to 35, 40, 45."""
    table = LeaseTable(LeaseTerms(30))
    table.grant("a", 0)
    ends = []
    for at in (5, 10, 15, 20, 25):
        table.extend(["a"], at)
        ends.append(table.expiry_s("a"))
    assert ends == [30, 30, 35, 40, 45]


def test_expiry_is_reached_at_its_second():
    """A lease is over at its end, not before."""
    table = LeaseTable(LeaseTerms(30))
    table.grant("a", 0)
    assert table.expire(29.999) == []
    assert table.expire(30) == ["a"]
    assert len(table) == 0


def test_a_long_lease_in_front_does_not_hide_expired_ones():
    """The reaper looks past an unexpired entry that was granted first."""
    table = LeaseTable(LeaseTerms(30))
    table.grant("renewed", 0)
    table.grant("dead", 1)
    table.extend(["renewed"], 25)
    assert table.expire(35) == ["dead"]
    assert table.next_expiry_s() == 45


def test_unknown_ids_are_ignored_and_reported():
    """A heartbeat for a lease that is gone creates none."""
    table = LeaseTable(LeaseTerms(30))
    table.grant("a", 0)
    assert table.extend(["a", "gone"], 15) == ["gone"]
    assert "gone" not in table


def test_a_read_ends_the_lease_at_once():
    """After the read nothing expires, and a second read is unknown."""
    table = LeaseTable(LeaseTerms(30))
    table.grant("a", 0)
    assert table.end("a")
    assert not table.end("a")
    assert table.next_expiry_s() is None
    assert table.expire(1000) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 50)), max_size=30))
def test_heartbeats_never_shorten_a_lease(beats):
    """Whatever the order of heartbeats, each lease's end only moves forward."""
    table = LeaseTable(LeaseTerms(30))
    for name in "abc":
        table.grant(name, 0)
    for name, at in beats:
        before = table.expiry_s(name)
        table.extend([name], at)
        assert table.expiry_s(name) == max(before, at + 20)
    assert table.next_expiry_s() == min(table.expiry_s(name) for name in "abc")
