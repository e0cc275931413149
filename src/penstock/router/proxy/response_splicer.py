"""Joins the streams of the Responses API: events are numbered, refer to one item, and the last ones repeat the text. Pure."""

from __future__ import annotations

from typing import Any, Final

import orjson

from penstock.router.proxy.continuation import EmittedPrefix, StreamSplicer

_OPENING: Final = frozenset(
    {
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    }
)


class ResponseSplicer(StreamSplicer):
    """Joins the parts of an interrupted stream of the Responses API, whose events are numbered.

    ``before`` is the `ResponseSplicer` that has joined the previous part of the same stream, if the stream was interrupted
    before, so that the numbers continue; None at the first interruption.

    Attributes:
        number: Number of the last event that the client has.
    """

    def __init__(self, emitted: EmittedPrefix, before: ResponseSplicer | None) -> None:
        super().__init__(emitted)
        self._emitted = emitted.text
        self._head = dict(emitted.head)
        number = self._head.pop("sequence_number")
        self.number: int = number if before is None else before.number
        self._item_id = self._head.pop("item_id")

    def _spliced_chunk(self, chunk: dict[str, Any]) -> bytes:
        kind = str(chunk.get("type"))
        if kind in _OPENING:
            return b""
        if kind == "response.output_text.delta":
            chunk["delta"] = self._overlap.new(chunk["delta"])
            if not chunk["delta"]:
                return b""
        elif kind == "response.output_text.done":
            chunk["text"] = self._emitted + chunk["text"]
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
            response["usage"] = self._whole(usage, "input_tokens", "output_tokens")
        return {**response, **self._head}

    def _complete_items(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            if item.get("type") == "message":
                item["id"] = self._item_id
                self._complete(item.get("content") or [])

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        for part in parts:
            if part.get("type") == "output_text":
                part["text"] = self._emitted + part["text"]
