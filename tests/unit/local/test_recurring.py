"""What a log warns of repeatedly is a finding; what it said once is none."""

from datetime import datetime, timedelta

import pytest

from penstock.local.recurring import recurring

NOW = datetime(2026, 11, 27, 6, 30)  # noqa: DTZ001 - as the logs have it


def plain(ago_s, level="ERROR", text="decision not recorded, so not applied decision_id='d1' error='full'"):
    """One line of a process's log."""
    at = NOW - timedelta(seconds=ago_s)
    return f"{at:%Y-%m-%d %H:%M:%S},123 {level:<7} penstock_planner.loop: {text}"


def test_once_a_minute_is_a_finding_with_its_newest_line():
    """Counted over its changing keys, with the time it has gone on."""
    lines = [
        plain(130, text="not taken id='1'"),
        plain(70, text="not taken id='2'"),
        plain(5, text="not taken id='3'"),
    ]
    (found,) = recurring(
        [plain(60, "INFO", "something else"), *lines, "Traceback (most recent call last):"], NOW
    )
    assert (found.text, found.times, found.over_s, found.is_error) == ("not taken id='3'", 3, 125.0, True)


@pytest.mark.parametrize(
    "lines",
    [
        [plain(100), plain(5)],  # twice
        [plain(8), plain(6), plain(5)],  # a burst
        [plain(900), plain(800), plain(700)],  # over
        [plain(130, "INFO"), plain(70, "INFO"), plain(5, "INFO")],
        ["no line of ours", "", '{"ts": 1, "level": "error"}'],
    ],
)
def test_what_is_over_or_came_at_once_is_none(lines):
    """A burst and an old trouble are in the log for those who look."""
    assert list(recurring(lines, NOW)) == []


def test_json_logs_say_the_same():
    """One object a line, with escapes shown."""
    line = '{"ts": "2026-11-27T06:%s.123", "level": "warning", "logger": "p", "event": "gone", "why": "\\u001b[2J"}'
    (found,) = recurring([line % at for at in ("27:00", "28:10", "29:30")], NOW)
    assert (found.text, found.is_error) == ("gone why='\\x1b[2J'", False)
