"""What the week teaches: demand that comes at the same time is expected, as far as it has come as told."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cron import quarter_of_week
from penstock_planner.decide.codec import from_plain, to_plain
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.demand.week import SLOTS, Week
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory

MONDAY_S = dt.datetime(2024, 1, 1, tzinfo=dt.UTC).timestamp()
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
STEP_S = 60.0


def _followed(rate, until_s, known=None, *, since_s=0.0, time_zone="UTC"):
    known = known or Week()
    for number in range(int((until_s - since_s) / STEP_S)):
        at_s = since_s + STEP_S * number
        known = known.followed(rate(at_s) * STEP_S, STEP_S, MONDAY_S + at_s + STEP_S - 1, time_zone)
    return known


def _daily(at_s):
    """Return 2/s for twelve minutes at eight o'clock, and little at other times."""
    return 2.0 if 0 <= at_s % DAY_S - 8 * HOUR_S < 720 else 0.01


def _before_eight(day):
    return day * DAY_S + 8 * HOUR_S - 120


def _due(known, at_s, ahead_s=150.0):
    return known.recalled(ahead_s, MONDAY_S + at_s, "UTC").rate


def test_what_came_twice_is_expected_on_the_third_day():
    """Once is not a reason to believe it: of a day nothing says whether the next is like it."""
    known = _followed(_daily, _before_eight(1))
    assert _due(known, _before_eight(1)) == 0.0
    known = _followed(_daily, _before_eight(2), known, since_s=_before_eight(1))
    assert _due(known, _before_eight(2)) == pytest.approx(2.0, rel=0.05)


def test_nothing_is_expected_at_other_times():
    """Nor once it is there."""
    known = _followed(_daily, _before_eight(5))
    assert _due(known, _before_eight(5) - 1800) == 0.0
    known = _followed(_daily, _before_eight(5) + 600, known, since_s=_before_eight(5))
    assert _due(known, _before_eight(5) + 600) == 0.0


def test_a_holiday_costs_a_quarter_of_an_hour():
    """Of a day's work from eight to six what did not come at eight is hardly expected at nine."""

    def work(at_s):
        is_holiday = int(at_s // DAY_S) == 4
        return 2.0 if 8 <= at_s % DAY_S / HOUR_S < 18 and not is_holiday else 0.01

    known = _followed(work, _before_eight(4))
    assert _due(known, _before_eight(4)) == pytest.approx(2.0, rel=0.05)
    nine = 4 * DAY_S + 9 * HOUR_S
    known = _followed(work, nine, known, since_s=_before_eight(4))
    assert _due(known, nine) < 0.5


def test_the_weekday_is_believed_once_it_was_right():
    """After three weeks nothing is expected on Saturday, and all of it on Monday."""

    def work(at_s):
        return _daily(at_s) if int(at_s // DAY_S) % 7 < 5 else 0.01

    known = _followed(work, _before_eight(19))
    assert _due(known, _before_eight(19)) == 0.0
    known = _followed(work, _before_eight(21), known, since_s=_before_eight(19))
    assert _due(known, _before_eight(21)) == pytest.approx(2.0, rel=0.05)


def test_chance_is_not_believed():
    """Bursts at another time each day."""

    def chance(at_s):
        begin_s = (int(at_s // DAY_S) * 7919 % 23) * HOUR_S
        return 2.0 if 0 <= at_s % DAY_S - begin_s < 720 else 0.01

    known = Week()
    for hour in range(24 * 10):
        since_s = hour * HOUR_S
        assert _due(known, since_s, ahead_s=HOUR_S) == 0.0
        known = _followed(chance, since_s + HOUR_S, known, since_s=since_s)


def test_a_gap_records_nothing():
    """A planner that was away for a day says nothing of it, and knows the days before."""
    known = _followed(_daily, 2 * DAY_S)
    later = _followed(_daily, 3 * DAY_S + 1800, known, since_s=3 * DAY_S)
    assert later.at(2 * 96 + 32) is None
    assert later.at(1 * 96 + 32) == known.at(1 * 96 + 32)


@pytest.mark.parametrize(("zone", "hour"), [("UTC", 8), ("Europe/Berlin", 9), ("America/New_York", 3)])
def test_quarters_are_those_of_a_time_zones_clocks(zone, hour):
    """Eight o'clock in London is nine in Berlin."""
    assert quarter_of_week(MONDAY_S + 8 * HOUR_S + 901, zone) == 4 * hour + 1


def test_summer_time_moves_with_the_clocks():
    """Nine o'clock in Berlin is the same quarter on both sides of the change."""
    winter, summer = (
        dt.datetime(2026, month, day, tzinfo=dt.UTC).timestamp() for month, day in ((3, 23), (3, 30))
    )
    berlin = "Europe/Berlin"
    assert quarter_of_week(winter + 8 * HOUR_S, berlin) == quarter_of_week(summer + 7 * HOUR_S, berlin)


def test_an_older_memory_is_read_without_a_week():
    """And a week survives being written and read."""
    known = replace(AdaptiveMemory(), week=_followed(_daily, DAY_S))
    plain = to_plain(known)
    assert AdaptiveMemory.read({"adaptive": plain}) == known
    del plain["week"]
    assert AdaptiveMemory.read({"adaptive": plain}).week == Week()


@given(st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=200), st.integers(0, SLOTS - 1))
def test_what_is_expected_is_never_more_than_what_came(rates, start):
    """Whatever came, up to the rounding of what is recorded; and what is known survives the ledger."""
    known = Week()
    since_s = MONDAY_S + 900 * start
    for number, rate in enumerate(rates):
        for part in range(3):
            known = known.followed(rate * 300, 300.0, since_s + 900 * number + 300 * part + 299, "UTC")
        due = known.recalled(1800.0, since_s + 900 * number + 899, "UTC")
        assert due.rate <= 1.05 * max(rates) + 2e-4
        assert due.confidence >= 0
    assert from_plain(Week, to_plain(known)) == known


def test_pulls_have_the_real_time_where_something_reads_it():
    """Modes that follow demand, and every mode with a schedule."""
    assert DecideConfig(mode=Mode.ADAPTIVE).reads_calendar
    assert not DecideConfig(mode=Mode.LOAD).reads_calendar
