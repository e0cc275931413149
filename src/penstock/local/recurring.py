"""What the processes of a graph warn of repeatedly, by their logs: `penstock doctor --local` makes findings of it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.core.printable import printable

TAIL_BYTES: Final = 256 * 1024
"""How far back a log is read. Chosen: minutes of a router that logs each change of a large fleet."""
_TIMES: Final = 3
_SPAN_S: Final = 60.0
_RECENT_S: Final = 90.0
"""Chosen: three times, over a minute at least, the last within a minute and a half: once a minute is enough."""
_MAX_CHARACTERS: Final = 300

_PLAIN: Final = re.compile(
    r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} (?P<level>WARNING|ERROR) +(?P<logger>[\w.]+): (?P<text>.*)"
)
_KEYS: Final = re.compile(r" \w+=.*")
"""What follows the constant text of an event."""


@dataclass(frozen=True, slots=True)
class RecurringWarning:
    """One event of one process's log.

    Attributes:
        text: Its last line, without time and level.
        over_s: Real seconds from its first to its last time.
    """

    text: str
    times: int
    over_s: float
    is_error: bool


def recurring(lines: Iterable[str], now: datetime) -> Iterator[RecurringWarning]:
    """Yield what a log has warned of repeatedly until now.

    Args:
        lines: As Penstock's own processes write them, plain or JSON; others are passed over.
        now: Local time, as in the lines.
    """
    found: dict[tuple[str, str], list[tuple[datetime, str, bool]]] = {}
    for line in lines:
        event = _plain(line) or _json(line)
        if event is not None:
            key, entry = event
            found.setdefault(key, []).append(entry)
    for entries in found.values():
        first, (last, text, is_error) = entries[0][0], entries[-1]
        over_s = (last - first).total_seconds()
        if len(entries) >= _TIMES and over_s >= _SPAN_S and (now - last).total_seconds() <= _RECENT_S:
            yield RecurringWarning(printable(text)[:_MAX_CHARACTERS], len(entries), over_s, is_error)


_Event = tuple[tuple[str, str], tuple[datetime, str, bool]]


def _plain(line: str) -> _Event | None:
    match = _PLAIN.match(line)
    if match is None:
        return None
    text = match["text"]
    at = datetime.fromisoformat(match["at"])
    return (match["logger"], _KEYS.sub("", text)), (at, text, match["level"] == "ERROR")


def _json(line: str) -> _Event | None:
    if not line.startswith('{"ts"'):
        return None
    try:
        record = json.loads(line)
        if record["level"] not in {"warning", "error"}:
            return None
        at = datetime.fromisoformat(record["ts"]).replace(microsecond=0)
        keys = " ".join(f"{key}={value!r}" for key, value in record.items() if key not in _HEAD)
        event, logger = str(record["event"]), str(record["logger"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (logger, event), (at, f"{event} {keys}".strip(), record["level"] == "error")


_HEAD: Final = frozenset({"ts", "level", "logger", "event", "exception"})
