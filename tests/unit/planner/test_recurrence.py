"""When demand comes again: a period is believed once it was seen, and forgotten when it is not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_planner.decide.demand.recurrence import SLOT_S, Recurrence, period_of

STARTUP_S = 120.0


def _followed(asked, known=None, dt_s=SLOT_S):
    known = known or Recurrence()
    for each in asked:
        known = known.followed(dt_s, STARTUP_S, is_asked=each)
    return known


def _turns(period, length, turns):
    return ([False] * (period - length) + [True] * length) * turns


@pytest.mark.parametrize(("period", "length"), [(10, 2), (30, 3), (120, 40)])
def test_a_period_is_found_after_three_turns(period, length):
    """Not after two; whatever its length, and whatever share of it is busy."""
    assert _followed(_turns(period, length, 2)).period == 0
    assert _followed(_turns(period, length, 4)).period == period


def test_a_slot_early_or_late_is_the_same_turn():
    """Bursts every quarter of an hour, give or take half a minute."""
    randomly = random.Random(3)
    slots = [False] * 300
    for turn in range(10):
        start = 30 * turn + 10 + randomly.choice((-1, 0, 1))
        slots[start : start + 3] = [True] * 3
    assert _followed(slots).period in {29, 30, 31}


def _irregular(seed, turns, *, late_most, one_of=0):
    """Return bursts of 90 s, a quarter of an hour apart: each up to this many slots early or late, and one of this many left out."""
    randomly = random.Random(seed)
    slots = [False] * 30 * turns
    for turn in range(turns):
        if one_of and turn % one_of == 0:
            left_out = turn + randomly.randrange(one_of)
        if not one_of or turn != left_out:
            start = 30 * turn + 12 + round(randomly.uniform(-late_most, late_most))
            slots[start : start + 3] = [True] * 3
    return slots


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("late_most", "one_of"), [(4, 0), (0, 5), (4, 5)])
def test_runs_that_are_early_late_or_left_out_are_still_expected(seed, late_most, one_of):
    """Two minutes early or late, one in five left out, or both: in six hours after six most bursts find their workers started.

    A start-up before they begin, and without these being there for more than three quarters of the time.
    """
    slots = _irregular(seed, 48, late_most=late_most, one_of=one_of)
    known, ready = _followed(slots[:720]), []
    for asked in slots[720:]:
        ready.append(known.due_s >= STARTUP_S)
        known = known.followed(SLOT_S, STARTUP_S, is_asked=asked)
    asked = slots[720:]
    begins = [place for place in range(1, 720) if asked[place] and not asked[place - 1]]
    assert sum(ready[place] for place in begins) >= 0.75 * len(begins)
    assert sum(ready) <= 0.75 * 720


@given(st.integers(0, 2**32), st.integers(2, 40), st.integers(1, 6))
def test_bursts_at_random_have_no_period(seed, number, length):
    """However many and long they are, except for a few that happen to lie as if they had one."""
    found = 0
    for draw in range(4):
        randomly = random.Random(f"{seed} {draw}")
        slots = [False] * 1200
        for start in randomly.sample(range(1190), number):
            slots[start : start + length] = [True] * length
        found += period_of(sum(each << place for place, each in enumerate(slots)), 1200)[0] > 0
    assert found <= 2


def test_chance_has_no_period():
    """Bursts at random over half a day."""
    randomly = random.Random(5)
    slots = [False] * 1200
    for start in randomly.sample(range(1190), 40):
        slots[start : start + 3] = [True] * 3
    assert _followed(slots).period == 0


def test_it_is_due_a_start_up_before_and_until_it_is_over():
    """A burst of three slots in thirty: due within a start-up and two slots before, and a slot or two after."""
    known = _followed(_turns(30, 3, 5))
    due = []
    for slot in range(30):
        known = known.followed(SLOT_S, STARTUP_S, is_asked=slot >= 27)
        due.append(known.due_s > 0)
    first = due.index(True, 5)
    assert 27 * SLOT_S - (STARTUP_S + 3 * SLOT_S) <= first * SLOT_S <= 27 * SLOT_S - STARTUP_S
    assert all(due[first:])
    assert known.due_s >= STARTUP_S


def test_a_period_that_ended_is_forgotten():
    """Three days of nothing after six turns: nothing is due."""
    known = _followed([False] * 8640, _followed(_turns(30, 3, 6)))
    assert (known.period, known.due_s, known.is_between) == (0, 0.0, True)


def test_pulls_of_any_length_make_the_same_slots():
    """Of two seconds, or of a minute after a gap."""
    slots = _turns(30, 4, 4)
    fine = _followed([each for each in slots for _ in range(15)], dt_s=2.0)
    coarse = _followed(slots[::2], dt_s=60.0)
    assert fine.period == 30
    assert coarse.period == 30
