"""Bounds what a request's JSON may cost before it is parsed, and how deep it may be nested. Pure.

Python's objects cost up to 300 times the bytes that make them: a body of 13 MB holds a million small objects. So the
number of values is bounded apart from the number of bytes. ``app`` calls `check_size` in steps, one a turn of the
loop; ``completion`` calls `check_depth` once the body is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from penstock.router.proxy.refusal import RequestRefused

MAX_DEPTH: Final = 64
"""Objects and lists within each other, the body included. Chosen: orjson writes 254 levels and reads 1,024, so that
what was read might not be written again; OpenAI's own schemas may have 10."""
MAX_CONTAINERS: Final = 32_768
"""Objects and lists of one body. Chosen: five times a chat of 500 messages with parts and calls and 100 tools."""
MAX_STRINGS: Final = 262_144
"""Strings of one body, keys included. Chosen: eight for each object."""
MAX_VALUES: Final = 2_097_152
"""Commas of one body outside strings. Chosen: twice the longest context of today, sent as token ids."""

SMALL_BYTES: Final = 2 * MAX_CONTAINERS
"""A body of this size cannot pass any of the bounds, because each container takes two bytes; it is parsed at once."""
_COUNTED_BYTES: Final = 1 << 18
"""Bytes counted in one step: about half a millisecond."""
_SCANNED_BYTES: Final = 1 << 15
"""Bytes scanned token by token in one step: at most a few milliseconds."""

_IN_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OUTSIDE: Final = re.compile(rb'[^"\[{]*+')


@dataclass(slots=True)
class _BodyCounts:
    """What a body holds so far."""

    containers: int = 0
    strings: int = 0
    commas: int = 0

    def excess(self) -> str | None:
        """Return what is too many, with its bound, or None."""
        if self.containers > MAX_CONTAINERS:
            return f"more than {MAX_CONTAINERS} objects and lists"
        if self.strings > MAX_STRINGS:
            return f"more than {MAX_STRINGS} strings"
        if self.commas > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
        return None


def check_size(raw: bytes) -> Iterator[None]:
    """Count a body's values in steps; the caller lets others run between two of them.

    Braces, quotes and commas are counted first wherever they are. Only a body with too many of them is read token by
    token, because the text of a prompt may hold any number.

    Raises:
        RequestRefused: 400, too many of something.
    """
    if len(raw) <= SMALL_BYTES:
        return
    counts = _BodyCounts()
    for start in range(0, len(raw), _COUNTED_BYTES):
        stop = start + _COUNTED_BYTES
        counts.containers += raw.count(b"{", start, stop) + raw.count(b"[", start, stop)
        counts.strings += raw.count(b'"', start, stop)
        counts.commas += raw.count(b",", start, stop)
        yield
    counts.strings //= 2
    if counts.excess() is not None:
        yield from _check_exactly(raw)


def _check_exactly(raw: bytes) -> Iterator[None]:
    counts, at, is_in_string = _BodyCounts(), 0, False
    while at < len(raw):
        stop = min(len(raw), at + _SCANNED_BYTES)
        before = at
        at, is_in_string = _scan(raw, at, stop, counts, is_in_string=is_in_string)
        excess = counts.excess()
        if excess is not None:
            raise RequestRefused(
                400, f"body: holds {excess}; send less in one request", code="body_too_complex"
            )
        if at == before:
            # A backslash at the end of the window, or of the body: the character after it belongs to it.
            at += 2
        yield


def _scan(raw: bytes, at: int, stop: int, counts: _BodyCounts, *, is_in_string: bool) -> tuple[int, bool]:
    """Count raw[at:stop] and return where it ended, just before ``stop`` where that cuts an escape in two."""
    while at < stop:
        if is_in_string:
            match = _IN_STRING.match(raw, at, stop)
            at = match.end() if match is not None else at
            if at == stop or raw[at] == _BACKSLASH:
                break
            is_in_string = False
            at += 1
            continue
        match = _OUTSIDE.match(raw, at, stop)
        end = match.end() if match is not None else at
        counts.commas += raw.count(b",", at, end)
        at = end
        if at < stop:
            is_in_string = raw[at] == _QUOTE
            counts.strings += is_in_string
            counts.containers += not is_in_string
            at += 1
    return at, is_in_string


_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")


def check_depth(raw: bytes, body: dict[str, Any]) -> None:
    """Refuse a body that is nested deeper than `MAX_DEPTH`.

    Args:
        raw: Body as sent; where it holds fewer braces than levels, nothing is walked.
        body: The same, parsed.

    Raises:
        RequestRefused: 400.
    """
    if raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH:
        return
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise RequestRefused(
        400,
        f"body: objects and lists are nested deeper than {MAX_DEPTH} levels; send a flatter one",
        code="body_too_deep",
    )
