"""Server-sent events: encode them, and find them in bytes that arrive in any pieces.

Pure; called by the worker (encode), by the router's relay (``EventScanner``) and by clients that read
streams (``EventSplitter``, ``payload``). Lines may end in LF or CRLF.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from penstock_core.errors import StreamBroken

DONE = b"data: [DONE]\n\n"
# Chosen: far above any chunk of a completion, far below what a hostile upstream could pin per stream.
MAX_EVENT_BYTES = 4 * 1024 * 1024

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
# Enough of the end of a piece to recognise a blank line that is split over pieces: CR LF CR of CR LF CR LF.
_OVERLAP = 3
_USAGE = b'"usage":'
_NULL_USAGE_END = b'"usage":null}\n\n'
_DATA_LINE = re.compile(rb"^data:", re.MULTILINE)
_DONE_LINE = re.compile(rb"^data: ?\[DONE\]\r?$", re.MULTILINE)


def encode_event(data: bytes) -> bytes:
    """Return one event whose data is ``data``; data with line breaks becomes several ``data:`` lines."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(data.splitlines())
    return b"data: " + data + b"\n\n"


def payload(event: bytes) -> bytes | None:
    """Return the data of an event without field names, or None when it carries none (a comment)."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class EventSplitter:
    """Cuts a body into events.

    Attributes:
        max_event_bytes: Longest event accepted.
        tail: Bytes of an event that has not ended; the same object throughout.
    """

    __slots__ = ("_searched", "max_event_bytes", "tail")

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.max_event_bytes = max_event_bytes
        self.tail = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that ``data`` completes, each with the blank line that ends it.

        Raises:
            StreamBroken: an event is longer than ``max_event_bytes``.
        """
        tail = self.tail
        if not tail and data.endswith(b"\n\n") and data.count(b"\n") == 2:
            return [data]
        if not tail and data.endswith(b"\n\n") and b"\r" not in data and b"\n\n\n" not in data:
            return [event + b"\n\n" for event in data[:-2].split(b"\n\n")]
        tail += data
        events: list[bytes] = []
        begin = 0
        for blank in _BLANK_LINE.finditer(tail, self._searched):
            events.append(bytes(tail[begin : blank.end()]))
            begin = blank.end()
        del tail[:begin]
        if len(tail) > self.max_event_bytes:
            raise StreamBroken(f"event stream: an event exceeds {self.max_event_bytes} bytes")
        self._searched = max(0, len(tail) - _OVERLAP)
        return events


class EventScanner:
    """Counts events in bytes that are relayed as they are, and remembers the last ``usage``.

    Attributes:
        events: Events with data so far, ``[DONE]`` not counted.
        done: ``[DONE]`` has been seen.
        usage_event: The last event that carries a ``usage`` object, or None.
    """

    __slots__ = ("_splitter", "_tail", "done", "events", "usage_event")

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._splitter = EventSplitter(max_event_bytes=max_event_bytes)
        self._tail = self._splitter.tail
        self.events = 0
        self.done = False
        self.usage_event: bytes | None = None

    def feed(self, data: bytes) -> int:
        """Return how many events with data end in ``data``; ``[DONE]`` and comments are not counted.

        Raises:
            StreamBroken: an event is longer than the bound.
        """
        # The usual case first, at the price of five C calls: one whole event of one line, without usage counts.
        if (
            data.startswith(b"data: {")
            and data.endswith(b"\n\n")
            and data.count(b"\n") == 2
            and not self._tail
            and (_USAGE not in data or data.endswith(_NULL_USAGE_END))
        ):
            self.events += 1
            return 1
        count = 0
        for event in self._splitter.feed(data):
            if event.startswith(b"data: {") or self._is_data(event):
                count += 1
                if _USAGE in event:
                    self._note_usage(event)
        self.events += count
        return count

    def usage(self) -> dict[str, Any] | None:
        """Return the last ``usage`` object, or None when there is none that parses."""
        if self.usage_event is None:
            return None
        try:
            usage = orjson.loads(payload(self.usage_event) or b"null")["usage"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return None
        return usage if isinstance(usage, dict) else None

    def _is_data(self, event: bytes) -> bool:
        if _DATA_LINE.search(event) is None:
            return False
        if _DONE_LINE.search(event) is not None:
            self.done = True
            return False
        return True

    def _note_usage(self, event: bytes) -> None:
        # A quote inside a JSON string is escaped, so the word cannot come from generated text.
        behind = event[event.rindex(_USAGE) + len(_USAGE) :].lstrip()
        if not behind.startswith(b"null"):
            self.usage_event = event
