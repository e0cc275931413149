"""Joins the streams of Anthropic's Messages API: the remaining part comes from a chat, whose chunks become its events. Pure."""

from __future__ import annotations

from typing import Any, Final

import orjson

from penstock.core.http.sse import payload
from penstock.router.proxy.continuation import EmittedPrefix, StreamSplicer

_DONE: Final = b"[DONE]"
_REASONS: Final = {"length": "max_tokens"}
"""Stop reason by finish reason, where it is not ``end_turn``; streams of messages with tools or stop sequences are not resumed."""


class MessageSplicer(StreamSplicer):
    """Joins the parts of an interrupted stream of Anthropic's Messages API, so that the client sees one stream.

    The stream consists of one text block, whose start the client has received from the first worker: the events by which
    the next worker starts the message and the block are left out.
    """

    def __init__(self, emitted: EmittedPrefix) -> None:
        super().__init__(emitted)
        self._stop_reason = "end_turn"

    def _spliced(self, event: bytes) -> bytes:
        return self._ending() if payload(event) == _DONE else super()._spliced(event)

    def _spliced_chunk(self, chunk: dict[str, Any]) -> bytes | None:
        if "choices" not in chunk:
            return None
        if isinstance(usage := chunk.get("usage"), dict):
            self._whole(usage, "prompt_tokens", "completion_tokens")
        events = b""
        for choice in chunk["choices"]:
            text = self._overlap.new(choice["delta"].get("content") or "")
            if text:
                delta = {"type": "text_delta", "text": text}
                events += _event("content_block_delta", index=0, delta=delta)
            self._stop_reason = _REASONS.get(choice.get("finish_reason"), self._stop_reason)
        return events

    def _ending(self) -> bytes:
        """Return the events that end block and message."""
        whole = self.usage or {}
        details = whole.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        usage = {"input_tokens": whole.get("prompt_tokens"), "output_tokens": whole.get("completion_tokens")}
        if isinstance(cached, int) and isinstance(usage["input_tokens"], int):
            usage |= {"input_tokens": usage["input_tokens"] - cached, "cache_read_input_tokens": cached}
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        ending = _event("message_delta", delta=delta, usage=usage)
        return _event("content_block_stop", index=0) + ending + _event("message_stop")


def _event(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **more}))
