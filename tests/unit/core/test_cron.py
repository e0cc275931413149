"""Periods that begin by a cron expression, on the nights on which clocks change."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise, takewhile
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from penstock.core.cron import Recurring, last_start_s

AUTUMN_BERLIN, SPRING_BERLIN, SUMMER_BERLIN = (2026, 10, 25), (2026, 3, 29), (2026, 6, 1)
AUTUMN_NEW_YORK = (2026, 11, 1)
AUTUMN_LORD_HOWE = (2026, 4, 5)


@pytest.mark.parametrize(
    ("cron", "zone", "day"),
    [
        ("30 2 * * *", "Europe/Berlin", AUTUMN_BERLIN),
        ("45 1 * * *", "America/New_York", AUTUMN_NEW_YORK),
        ("59 1 * * *", "America/New_York", AUTUMN_NEW_YORK),
        ("45 1 * * *", "Australia/Lord_Howe", AUTUMN_LORD_HOWE),
        ("30 2 * * *", "Europe/Berlin", SPRING_BERLIN),
        ("30 2 * * *", "Europe/Berlin", SUMMER_BERLIN),
    ],
)
def test_a_period_holds_without_a_gap_on_the_night_of_a_clock_change(
    cron: str, zone: str, day: tuple[int, int, int]
) -> None:
    """Six hours from the first occurrence of its start on: a floor that dropped out in between would drain workers."""
    period = Recurring(cron, zone, duration_s=6 * 3600)
    midnight_s = datetime(*day, tzinfo=ZoneInfo(zone)).timestamp()

    states = [period.is_on(midnight_s + 60 * minute) for minute in range(12 * 60)]

    changes = sum(before != after for before, after in pairwise(states))
    assert (sum(states), changes) == (6 * 60, 2)


@pytest.mark.parametrize("cron", ["30 2 * * *", "*/20 * * * *", "0 3 * * *", "15 */2 * * *"])
@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Europe/Berlin", AUTUMN_BERLIN),
        ("Europe/Berlin", SPRING_BERLIN),
        ("America/New_York", AUTUMN_NEW_YORK),
    ],
)
def test_the_newest_start_is_the_one_that_the_calendar_lists(
    cron: str, zone: str, day: tuple[int, int, int]
) -> None:
    """At any minute of the night, looked up from that minute, as listed from the evening before on."""
    midnight = datetime(*day, tzinfo=ZoneInfo(zone))
    begin_s = midnight.timestamp()
    evening = datetime.fromtimestamp(begin_s - 86400, tz=ZoneInfo(zone))
    listed = [
        each.timestamp()
        for each in takewhile(lambda each: each.timestamp() < begin_s + 43200, CronSim(cron, evening))
    ]

    for minute in range(0, 12 * 60, 5):
        at_s = begin_s + 60 * minute
        assert last_start_s(cron, zone, int(at_s // 60)) == max(each for each in listed if each <= at_s)
