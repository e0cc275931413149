"""Measures one streamed completion: when its tokens came, what it says it used, whether it is whole.

Pure: the time of each read is an argument. The replayer keeps one `ClientStreamMeter` per request in flight.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import orjson

from penstock.core.errors import StreamBroken
from penstock.core.http.sse import EventSplitter, payload

MAX_EVENT_BYTES: Final = 1 << 20
"""Chosen: a thousand times the longest event of one token; beyond it the stream is no event stream."""


class StreamError(StreamBroken):
    """The server reported an error inside the stream, after its headers had said 200."""


class ClientStreamMeter:
    """Token times and usage of one stream.

    A token event is one whose choice carries text; a server with a stream interval puts several tokens
    in one event, and then the gaps are gaps between such events.

    Attributes:
        first_s: Time of the first token event, or None before it.
        last_s: Time of the newest token event.
        gaps_s: Seconds between successive token events, as 32-bit floats: 4 bytes a token.
        prompt_tokens, output_tokens, cached_tokens: From ``usage``; None when it does not say.
        is_done: Whether ``[DONE]`` came.
    """

    __slots__ = (
        "_splitter",
        "cached_tokens",
        "first_s",
        "gaps_s",
        "is_done",
        "last_s",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self._splitter = EventSplitter(max_event_bytes=MAX_EVENT_BYTES)
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gaps_s: array[float] = array("f")
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.is_done = False

    def feed(self, now_s: float, data: bytes) -> int:
        """Take one read and return how many token events it completed.

        Raises:
            StreamError: the stream carries an error object; the message is the server's.
            StreamBroken: an event is not a JSON object, or has no end.
        """
        tokens = 0
        for raw in self._splitter.feed(data):
            content = payload(raw)
            if content is None:
                continue
            if content == b"[DONE]":
                self.is_done = True
                continue
            event = _object(content)
            if _has_text(event):
                tokens += 1
                if self.first_s is None:
                    self.first_s = now_s
                else:
                    self.gaps_s.append(now_s - self.last_s)
                self.last_s = now_s
            if usage := event.get("usage"):
                self._take_usage(usage)
            if error := event.get("error"):
                raise StreamError(error.get("message", str(error)) if isinstance(error, dict) else str(error))
        return tokens

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first: (last - first) / (tokens - 1), or None below two.

        Tokens are counted by ``usage`` where it says so, and by token events otherwise.
        """
        tokens = self.output_tokens if self.output_tokens is not None else len(self.gaps_s) + 1
        return (
            (self.last_s - self.first_s) / (tokens - 1) if self.first_s is not None and tokens > 1 else None
        )

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            raise StreamBroken(f"usage: {usage!r} is no JSON object")
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        self.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _object(content: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        raise StreamBroken(f"an event is not JSON ({exc}): {content[:80]!r}") from exc
    if not isinstance(event, dict):
        raise StreamBroken(f"an event is no JSON object: {content[:80]!r}")
    return event


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices")
    if not choices:
        return False
    try:
        choice = choices[0]
        text = choice.get("text")
        if text is None:
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content")
    except (TypeError, AttributeError, LookupError) as exc:
        raise StreamBroken(f"choices: {choices!r} is no list of JSON objects") from exc
    return bool(text)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
