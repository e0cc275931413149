"""The seam of a response: its events are numbered, name one item, and the last ones repeat all of the text. Pure."""

from __future__ import annotations

from typing import Any, Final

import orjson

from penstock.core.http.sse import EventSplitter, payload
from penstock.router.proxy.continuation import Repeated, Said

_OPENING: Final = frozenset(
    {
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    }
)


class ResponseSeam:
    """A `StreamSeam`; ``before`` is the one that the stream had so far.

    Attributes:
        number: Of the last event that the client has.
    """

    def __init__(self, said: Said, before: ResponseSeam | None) -> None:
        self.tokens = said.tokens
        self.usage: dict[str, Any] | None = None
        self._said, self._repeated = said.text, Repeated(said)
        self._head = dict(said.head)
        number = self._head.pop("sequence_number")
        self.number: int = number if before is None else before.number
        self._item_id = self._head.pop("item_id")
        self._splitter = EventSplitter()

    def join(self, data: bytes) -> bytes:
        """See `StreamSeam`."""
        return b"".join(self._joined(event) for event in self._splitter.feed(data))

    def _joined(self, event: bytes) -> bytes:
        data = payload(event)
        if data is None or not data.startswith(b"{"):
            return event
        chunk = orjson.loads(data)
        kind = str(chunk.get("type"))
        if kind in _OPENING:
            return b""
        if kind == "response.output_text.delta":
            chunk["delta"] = self._repeated.new(chunk["delta"])
            if not chunk["delta"]:
                return b""
        elif kind == "response.output_text.done":
            chunk["text"] = self._said + chunk["text"]
        elif "part" in chunk:
            self._complete([chunk["part"]])
        elif "item" in chunk:
            self._complete_items([chunk["item"]])
        elif "response" in chunk:
            chunk["response"] = self._response(chunk["response"])
        if "item_id" in chunk:
            chunk["item_id"] = self._item_id
        self.number += 1
        chunk["sequence_number"] = self.number
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(chunk))

    def _response(self, response: dict[str, Any]) -> dict[str, Any]:
        self._complete_items(response.get("output") or [])
        if isinstance(usage := response.get("usage"), dict):
            self.usage = response["usage"] = self._usage(usage)
        return {**response, **self._head}

    def _complete_items(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            if item.get("type") == "message":
                item["id"] = self._item_id
                self._complete(item.get("content") or [])

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        for part in parts:
            if part.get("type") == "output_text":
                part["text"] = self._said + part["text"]

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        prompt, output = usage.get("input_tokens"), usage.get("output_tokens")
        if not isinstance(prompt, int) or not isinstance(output, int):
            return usage
        input_tokens = max(0, prompt - self.tokens)
        complete = {**usage, "input_tokens": input_tokens, "output_tokens": output + self.tokens}
        details = usage.get("input_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            cached = min(details["cached_tokens"], input_tokens)
            complete["input_tokens_details"] = {**details, "cached_tokens": cached}
        return complete
