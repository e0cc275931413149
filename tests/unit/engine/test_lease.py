"""Leases: which rank reads from which, their terms, renewal, reads and expiry, and when heartbeats are due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.lease import HeartbeatSchedule, LeaseTable, LeaseTerms, PinnedPrompts, reads_of
from penstock.engine.core.requests import EngineCounters, EngineRequest, EngineRole, RequestState


@pytest.mark.parametrize(
    ("source", "reader", "expected"),
    [
        (1, 1, [(0, 0, 1)]),
        (4, 2, [(0, 0, 1), (1, 0, 1), (2, 1, 1), (3, 1, 1)]),
        (2, 4, [(0, 0, 2), (0, 1, 2), (1, 2, 2), (1, 3, 2)]),
        (1, 2, [(0, 0, 2), (0, 1, 2)]),
    ],
)
def test_ranks_are_paired(source, reader, expected):
    """Rank read from, rank that reads, readers of the former; the document's example is prefill 4, decode 2."""
    reads = list(reads_of("a", source, reader))
    assert [(each.rank, each.reader, each.readers) for each in reads] == expected


powers = st.sampled_from([1, 2, 4, 8])


@given(powers, powers, st.randoms(use_true_random=False))
def test_all_reads_in_any_order_end_it_with_the_last(source, reader, random):
    """Every rank is read, and only the last notification frees the prompt."""
    reads = list(reads_of("a", source, reader))
    assert {each.rank for each in reads} == set(range(source))
    assert {each.reader for each in reads} == set(range(reader))
    random.shuffle(reads)
    freed, counters = [], EngineCounters()
    kept = PinnedPrompts(
        LeaseTerms(), EngineRole.PREFILL, ranks=source, counters=counters, release=freed.append
    )
    kept.keep(RequestState(EngineRequest("a", 8, 1, 0.0), 0, 8, remote_pending=False), 0.0)
    for each in reads:
        assert not freed
        assert kept.read([each, each][: 1 + (each is not reads[-1])]) == []
    assert len(freed) == 1


@pytest.mark.parametrize(
    ("duration_s", "interval_s", "extension_s"),
    [(30, 5, 20), (60, 10, 40), (12, 2, 8), (6, 1, 4), (7, 1, 4), (3, 0.5, 2)],
)
def test_terms_follow_from_the_duration(duration_s, interval_s, extension_s):
    """Interval is a sixth and extension two thirds, in whole seconds; below 6 s the interval stays above 0."""
    terms = LeaseTerms(duration_s)
    assert (terms.heartbeat_interval_s, terms.extension_s) == (interval_s, extension_s)


def test_ended_leases_do_not_pile_up():
    """Prompts that are read at once leave no entries behind, however long their lease would have been."""
    table = LeaseTable()
    table.grant("kept", 30)
    for number in range(10_000):
        table.grant(f"r{number}", 1e9)
        table.end(f"r{number}")
    assert len(table._heap) < 200
    assert table.expire(30) == [("kept", 30)]


def test_heartbeats_go_out_in_rounds_one_message_for_each_engine():
    """The first at once, waiting or not; a request that comes between two rounds waits for the next."""
    schedule = HeartbeatSchedule(5)
    assert schedule.next_s() is None
    schedule.track("p0", "a")
    assert schedule.next_s() < 0
    assert schedule.due(100) == {"p0": ["a"]}
    schedule.track("p0", "b")
    schedule.track("p1", "c")
    assert (schedule.due(104.9), schedule.next_s()) == ({}, 105)
    assert schedule.due(105) == {"p0": ["a", "b"], "p1": ["c"]}
    for engine, request in (("p0", "a"), ("p0", "a"), ("p0", "b"), ("p1", "c"), ("p9", "unknown")):
        schedule.untrack(engine, request)
    assert (schedule.next_s(), schedule.due(1000)) == (None, {})


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
            is_moved = name in model and at > model[name]
            assert table.extend([name], at) == (is_moved, [] if name in model else [name])
            if is_moved:
                model[name] = at
        elif kind == "end":
            table.end(name)
            model.pop(name, None)
        elif kind == "expire":
            due = {each: end for each, end in model.items() if end <= at}
            assert sorted(table.expire(at)) == sorted(due.items())
            model = {each: end for each, end in model.items() if each not in due}
        assert table.next_expiry_s() == min(model.values(), default=None)
        assert {name: table.expiry_s(name) for name in model} == model
