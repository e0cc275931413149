"""Server-sent events: encodes them, and splits a byte stream into them; lines end in LF or CRLF. Pure."""

from __future__ import annotations

import re

from penstock.core.errors import StreamBroken

DONE = b"data: [DONE]\n\n"
"""Event that ends a stream of OpenAI's API."""
# Chosen: far above any event of a completion, and low enough to limit the memory that a hostile upstream can use.
MAX_EVENT_BYTES = 4 * 1024 * 1024

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
# Number of bytes to search again, to find a blank line that is split between reads: CR LF CR of CR LF CR LF.
_OVERLAP = 3


def encode_event(data: bytes) -> bytes:
    """Return an SSE event with ``data``; data with line breaks becomes several ``data:`` lines."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(data.splitlines())
    return b"data: " + data + b"\n\n"


def payload(event: bytes) -> bytes | None:
    """Return the data of an SSE event; None if it has none, such as a comment."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class EventSplitter:
    """Splits a byte stream into SSE events.

    Attributes:
        max_event_bytes: Maximum length of an incomplete event.
        tail: Bytes of an incomplete event; always the same object.
    """

    __slots__ = ("_searched", "max_event_bytes", "tail")

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.max_event_bytes = max_event_bytes
        self.tail = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that ``data`` completes, each including the blank line that ends it.

        Raises:
            StreamBroken: An event is too long.
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
