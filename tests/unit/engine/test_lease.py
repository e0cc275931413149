"""Leases: initial term, extensions, reads and expiry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.lease import LeaseTable, LeaseTerms


@pytest.mark.parametrize(
    ("duration_s", "interval_s", "extension_s"),
    [(30, 5, 20), (60, 10, 40), (12, 2, 8), (6, 1, 4), (7, 1, 4), (3, 0.5, 2)],
)
def test_terms_follow_from_the_duration(duration_s, interval_s, extension_s):
    """Interval is a sixth and extension two thirds, in whole seconds; below 6 s the interval stays above 0."""
    terms = LeaseTerms(duration_s)
    assert terms.heartbeat_interval_s == interval_s
    assert terms.extension_s == extension_s


def test_a_long_lease_in_front_does_not_hide_expired_ones():
    """The reaper looks past an unexpired entry that was granted first, or that heartbeats keep alive."""
    table = LeaseTable()
    table.grant("turn", 480)
    table.grant("renewed", 30)
    table.grant("dead", 31)
    assert table.extend(["renewed"], 45) == (1, [])
    assert table.expire(35) == [("dead", 31)]
    assert table.next_expiry_s() == 45
    assert table.expire(480) == [("renewed", 45), ("turn", 480)]


def test_an_id_holds_one_lease():
    """A second grant would leave the first one's end in doubt."""
    table = LeaseTable()
    table.grant("a", 30)
    with pytest.raises(ValueError, match="holds a lease"):
        table.grant("a", 40)


def test_ended_leases_do_not_pile_up():
    """Prompts that are read at once leave no entries behind, however long their lease would have been."""
    table = LeaseTable()
    table.grant("kept", 30)
    for number in range(10_000):
        table.grant(f"r{number}", 1e9)
        table.end(f"r{number}")
    assert len(table._heap) < 200
    assert table.expire(30) == [("kept", 30)]


operations = st.lists(
    st.tuples(st.sampled_from(["grant", "extend", "end", "expire"]), st.integers(0, 7), st.floats(0, 100)),
    max_size=80,
)


@given(operations)
def test_the_table_is_a_map_of_expiries(steps):
    """Any sequence of operations gives what a plain dictionary, searched through each time, gives."""
    table, model = LeaseTable(), {}
    for kind, number, at in steps:
        name = f"r{number}"
        if kind == "grant" and name not in model:
            table.grant(name, at)
            model[name] = at
        elif kind == "extend":
            table.extend([name], at)
            if name in model:
                model[name] = max(model[name], at)
        elif kind == "end":
            assert table.end(name) == (model.pop(name, None) is not None)
        elif kind == "expire":
            due = {each: end for each, end in model.items() if end <= at}
            assert sorted(table.expire(at)) == sorted(due.items())
            model = {each: end for each, end in model.items() if each not in due}
        assert table.next_expiry_s() == min(model.values(), default=None)
        assert len(table) == len(model)
