"""Periods of the calendar that begin by a cron expression in a time zone: which holds at a time, whether two can meet; a week's quarters. Pure.

The parser is imported where a graph has a schedule. Times are seconds since 1970. Time zones are those of the system's database, else of the package ``tzdata``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.core.errors import ConfigError

_FROM = datetime(2024, 1, 1, tzinfo=UTC)
"""Chosen: a Monday that begins a leap year; whether two periods meet is looked up from here on."""

_STARTS_MOST = 2000
"""Chosen: this many starts are looked up, five years of daily ones and three weeks of quarter-hourly ones."""

_CLOCK_CHANGE_S = 3 * 3600
"""Chosen: longer than any hour that clocks repeat, with the one after it."""

FIELDS_PATTERN = r"^[^\s]+( [^\s]+){4}$"


@dataclass(frozen=True, slots=True)
class Recurring:
    """Periods of one length.

    Attributes:
        cron: Five fields: minute, hour, day of month, month, day of week; when each begins.
        time_zone: IANA's name.
        duration_s: Real seconds, > 0; longer ones than the time to the next begin again with it.
    """

    cron: str
    time_zone: str
    duration_s: float

    def is_on(self, at_s: float) -> bool:
        """Return whether a period holds at a time: from its start on, and before its end."""
        start_s = last_start_s(self.cron, self.time_zone, int(at_s // 60))
        return start_s is not None and at_s < start_s + self.duration_s

    def ends_s(self, at_s: float) -> float | None:
        """Return when the period that holds at a time ends; None: none holds, or the next begins before it ends."""
        start_s = last_start_s(self.cron, self.time_zone, int(at_s // 60))
        if start_s is None or not at_s < start_s + self.duration_s:
            return None
        end_s = start_s + self.duration_s
        return None if last_start_s(self.cron, self.time_zone, int(end_s // 60)) != start_s else end_s

    def ends_in_words(self, at_s: float) -> str:
        """Return that as clocks in the time zone show it: ``until 2026-01-05 18:00 Europe/Berlin``; empty: without an end."""
        end_s = self.ends_s(at_s)
        if end_s is None:
            return ""
        return (
            f"until {datetime.fromtimestamp(end_s, tz=_zone(self.time_zone)):%Y-%m-%d %H:%M} {self.time_zone}"
        )

    def meets(self, other: Recurring) -> bool:
        """Return whether a period of each holds at the same time, as far as their next 2,000 starts show."""
        return any(map(other.is_on, self._starts_s())) or any(map(self.is_on, other._starts_s()))

    def _starts_s(self) -> Iterator[float]:
        from cronsim import CronSim  # noqa: PLC0415 - for graphs with a schedule

        begin = _FROM.astimezone(_zone(self.time_zone))
        return (each.timestamp() for each in islice(CronSim(self.cron, begin), _STARTS_MOST))


def check(cron: str) -> None:
    """Refuse what is not a cron expression; `FIELDS_PATTERN` says how many fields it has.

    Raises:
        ConfigError: with the field that is wrong.
    """
    from cronsim import CronSim, CronSimError  # noqa: PLC0415 - for graphs with a schedule

    try:
        CronSim(cron, _FROM)
    except CronSimError as exc:
        raise ConfigError(
            f"{cron!r}: {exc}; write it as '0 8 * * 1-5', eight o'clock from Monday to Friday"
        ) from exc


def check_time_zone(name: str) -> None:
    """Refuse what is not a time zone.

    Raises:
        ConfigError: the database has no such name.
    """
    try:
        _zone(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise ConfigError(f"{name!r}: no time zone; give an IANA name, such as Europe/Berlin") from exc


@lru_cache(maxsize=1024)
def last_start_s(cron: str, time_zone: str, minute: int) -> float | None:
    """Return the newest start at or before a minute since 1970; None: there was none.

    In the hour that clocks repeat in autumn, a start counts at its first occurrence.
    """
    after = _local((minute + 1) * 60, time_zone)
    before = _local((minute + 1) * 60 - _CLOCK_CHANGE_S, time_zone)
    if after.utcoffset() == before.utcoffset():
        return _newest_before(cron, after)
    # Backwards, CronSim does not see the first pass of an hour from within the second. Forwards it sees both.
    from cronsim import CronSim  # noqa: PLC0415 - for graphs with a schedule

    starts = takewhile(lambda each: each < after.timestamp(), map(datetime.timestamp, CronSim(cron, before)))
    newest = deque(starts, maxlen=1)
    return newest[0] if newest else _newest_before(cron, before + timedelta(minutes=1))


def _newest_before(cron: str, end: datetime) -> float | None:
    from cronsim import CronSim  # noqa: PLC0415 - for graphs with a schedule

    found = next(CronSim(cron, end, reverse=True), None)
    return None if found is None else found.timestamp()


def _local(at_s: float, time_zone: str) -> datetime:
    return datetime.fromtimestamp(at_s, tz=_zone(time_zone))


def quarter_of_week(at_s: float, time_zone: str) -> int:
    """Return the quarter of an hour of the week, 0 to 671 from Monday 0:00 on, as clocks in a time zone show it."""
    local = datetime.fromtimestamp(at_s, tz=_zone(time_zone))
    return local.weekday() * 96 + local.hour * 4 + local.minute // 15


def clock_at(at_s: float, time_zone: str) -> str:
    """Return hour and minute as clocks in the time zone show them: ``02:10``."""
    return f"{_local(at_s, time_zone):%H:%M}"


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
