"""Server-sent events: encode them, and find them in bytes that arrive in any pieces; lines end in LF or CRLF. Pure."""

from __future__ import annotations

import re

from penstock.core.errors import StreamBroken

DONE = b"data: [DONE]\n\n"
# Chosen: far above any chunk of a completion, far below what a hostile upstream could pin per stream.
MAX_EVENT_BYTES = 4 * 1024 * 1024

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
# Enough of the end of a piece to recognise a blank line that is split over pieces: CR LF CR of CR LF CR LF.
_OVERLAP = 3


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
        tail: Bytes of an event that has not ended; the same object throughout.
    """

    __slots__ = ("_searched", "max_event_bytes", "tail")

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.max_event_bytes = max_event_bytes
        self.tail = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that ``data`` completes, each with the blank line that ends it."""
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
