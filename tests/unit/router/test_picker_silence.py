"""How long routers wait for a silent one, and what they say when they stood themselves."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.picker.silence import CALM_TICKS, MAX_TICKS, SilencePatience
from penstock.router.server import PAUSE_REAL_S, PauseLog


def patience(jitter=0.0, *, wrong=0):
    """One that was wrong this often."""
    made = SilencePatience(5, lambda: jitter)
    for _ in range(wrong):
        made.record_false_alarm()
    return made


@pytest.mark.parametrize(("wrong", "ticks"), [(0, 5), (1, 10), (2, 20), (3, 40), (4, 50), (9, 50)])
def test_each_mistake_doubles_the_patience(wrong, ticks):
    """Up to five seconds; a router that was never slow is waited for as short as before."""
    assert patience(wrong=wrong).ticks == ticks


def test_a_calm_minute_halves_it():
    """And another one again, down to the least."""
    made, found = patience(wrong=3), []
    for _ in range(4):
        for _ in range(CALM_TICKS):
            made.tick()
        found.append(made.ticks)
    assert found == [20, 10, 5, 5]


def test_routers_of_equal_patience_do_not_all_act_in_one_tick():
    """Each waits up to a quarter longer by chance."""
    assert [patience(jitter, wrong=2).ticks for jitter in (0.0, 0.4, 1.0)] == [20, 22, 25]


@given(st.lists(st.booleans(), max_size=40), st.floats(0, 1))
def test_every_wait_has_a_bound(mistakes, jitter):
    """Whatever happens, between half a second and five."""
    made = patience(jitter)
    for is_wrong in mistakes:
        for _ in range(CALM_TICKS):
            made.tick()
        if is_wrong:
            made.record_false_alarm()
        assert 5 <= made.ticks <= MAX_TICKS


@pytest.mark.parametrize(("share", "words"), [(0.1, "more CPU"), (0.9, "more routers")])
def test_a_process_that_stood_says_so_and_not_more_than_each_ten_seconds(caplog, share, words):
    """The longest pause of that time, with the remedy: one that worked all the time had CPU enough."""
    pauses = PauseLog()
    with caplog.at_level(logging.WARNING):
        for now_s, stood_s in [(0.0, 0.01), (1.0, 0.9), (2.0, 3.0), (9.0, 0.6), (12.0, 0.1), (30.0, 0.2)]:
            pauses.add(stood_s, now_s, worked_s=share * stood_s)
    assert PAUSE_REAL_S == 0.5
    assert [each.keys["stood_s"] for each in caplog.records] == [0.9, 3.0]
    assert all(words in each.message for each in caplog.records)
