"""Recurring calendar periods defined by a cron expression in a time zone, and the quarter-hour of the week. Pure.

The cron parser is imported only if a graph has a schedule. Times are Unix times in seconds. Time zones are from the
system's database, or else from the package ``tzdata``.
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
"""Start of the search for overlapping periods. Chosen: a Monday at the start of a leap year."""

_MAX_STARTS = 2000
"""Number of starts that are examined. Chosen: five years of daily starts, or three weeks of quarter-hourly ones."""

_CLOCK_CHANGE_S = 3 * 3600
"""Chosen: longer than any hour that clocks repeat, together with the hour after it."""

FIELDS_PATTERN = r"^[^\s]+( [^\s]+){4}$"
"""Pattern of a cron expression with five fields."""


@dataclass(frozen=True, slots=True)
class Recurring:
    """Recurring periods of equal length.

    Attributes:
        cron: Cron expression of their starts, with five fields: minute, hour, day of month, month, day of week.
        time_zone: IANA name of the time zone in which ``cron`` applies.
        duration_s: Length of a period in wall-clock seconds, above 0. A period that is longer than the time until the
            next start is followed by the next one without a gap.
    """

    cron: str
    time_zone: str
    duration_s: float

    def is_on(self, at_s: float) -> bool:
        """Return whether a period is active at Unix time ``at_s``: at or after the period's start, and before its end."""
        start_s = last_start_s(self.cron, self.time_zone, int(at_s // 60))
        return start_s is not None and at_s < start_s + self.duration_s

    def ends_s(self, at_s: float) -> float | None:
        """Return the Unix time at which the period active at ``at_s`` ends; None if none is active, or if another begins before that end."""
        start_s = last_start_s(self.cron, self.time_zone, int(at_s // 60))
        if start_s is None or not at_s < start_s + self.duration_s:
            return None
        end_s = start_s + self.duration_s
        return None if last_start_s(self.cron, self.time_zone, int(end_s // 60)) != start_s else end_s

    def ends_in_words(self, at_s: float) -> str:
        """Return the result of `ends_s` as local time, such as ``until 2026-01-05 18:00 Europe/Berlin``; empty if it is None."""
        end_s = self.ends_s(at_s)
        if end_s is None:
            return ""
        return (
            f"until {datetime.fromtimestamp(end_s, tz=_zone(self.time_zone)):%Y-%m-%d %H:%M} {self.time_zone}"
        )

    def meets(self, other: Recurring) -> bool:
        """Return whether a period of ``other`` ever overlaps one of these; of both, the first 2,000 starts since 2024 are examined."""
        return any(map(other.is_on, self._starts_s())) or any(map(self.is_on, other._starts_s()))

    def _starts_s(self) -> Iterator[float]:
        from cronsim import CronSim  # noqa: PLC0415 - for graphs with a schedule

        begin = _FROM.astimezone(_zone(self.time_zone))
        return (each.timestamp() for each in islice(CronSim(self.cron, begin), _MAX_STARTS))


def check(cron: str) -> None:
    """Check that ``cron`` is a valid cron expression; `FIELDS_PATTERN` checks its number of fields.

    Raises:
        ConfigError: A field is invalid; the message names it.
    """
    from cronsim import CronSim, CronSimError  # noqa: PLC0415 - for graphs with a schedule

    try:
        CronSim(cron, _FROM)
    except CronSimError as exc:
        raise ConfigError(
            f"{cron!r}: {exc}; write it as '0 8 * * 1-5', eight o'clock from Monday to Friday"
        ) from exc


def check_time_zone(name: str) -> None:
    """Check that ``name`` is a time zone.

    Raises:
        ConfigError: The database has no time zone of this name.
    """
    try:
        _zone(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise ConfigError(f"{name!r}: no time zone; give an IANA name, such as Europe/Berlin") from exc


@lru_cache(maxsize=1024)
def last_start_s(cron: str, time_zone: str, minute: int) -> float | None:
    """Return the Unix time of the newest start at or before a minute; None if there was none.

    In the hour that clocks repeat in autumn, a start counts at its first occurrence.

    Args:
        cron: Cron expression with five fields.
        time_zone: IANA name of the time zone.
        minute: Unix time in whole minutes.
    """
    after = _local((minute + 1) * 60, time_zone)
    before = _local((minute + 1) * 60 - _CLOCK_CHANGE_S, time_zone)
    if after.utcoffset() == before.utcoffset():
        return _newest_before(cron, after)
    # Searching backwards, CronSim misses the first pass of a repeated hour; searching forwards it finds both.
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
    """Return the quarter-hour of the week in local time: 0 (Monday 0:00) to 671.

    Args:
        at_s: Unix time in seconds.
        time_zone: IANA name of the time zone.
    """
    local = datetime.fromtimestamp(at_s, tz=_zone(time_zone))
    return local.weekday() * 96 + local.hour * 4 + local.minute // 15


def clock_at(at_s: float, time_zone: str) -> str:
    """Return the local time of a Unix time in a time zone as hour and minute, such as ``02:10``."""
    return f"{_local(at_s, time_zone):%H:%M}"


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
