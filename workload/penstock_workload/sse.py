"""Splits a byte stream of server-sent events into payloads; pure, no event is decoded here.

The replayer shares its cores with the servers it measures, so the common case (one event, whole, in one
read) costs one partition and no loop.
"""

from __future__ import annotations

from penstock_core.errors import StreamBroken

MAX_EVENT_BYTES = 1 << 20
"""Chosen: a thousand times the longest event of one token; beyond it the stream is no event stream."""


class SseParser:
    """Feeds on reads of any size; one per stream."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that ``data`` completes, in order.

        Comments, ``event:``, ``id:`` and ``retry:`` lines carry nothing and are left out. A carriage
        return ends a line only together with a line feed.

        Raises:
            StreamBroken: an event grows beyond `MAX_EVENT_BYTES`.
        """
        if b"\r" in data:
            data = data.replace(b"\r", b"")
        if self._tail:
            data = self._tail + data
        events, end, self._tail = data.rpartition(b"\n\n")
        if not end:
            if len(self._tail) > MAX_EVENT_BYTES:
                raise StreamBroken(f"an event of the stream is longer than {MAX_EVENT_BYTES} bytes")
            return []
        if b"\n" not in events and events.startswith(b"data: "):
            return [events[6:]]
        return [payload for event in events.split(b"\n\n") if (payload := _payload(event)) is not None]

    @property
    def is_between_events(self) -> bool:
        """Whether everything fed so far was whole events."""
        return not self._tail


def _payload(event: bytes) -> bytes | None:
    lines = [
        line[6:] if line.startswith(b"data: ") else line[5:]
        for line in event.split(b"\n")
        if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None
