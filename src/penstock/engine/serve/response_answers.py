"""Encodes responses of OpenAI's Responses API: JSON bodies and numbered server-sent events; used by `streams`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.answers import Finished
from penstock.engine.serve.protocol import EngineCall


class ResponseFormat:
    """Encodes the response of OpenAI's Responses API, as numbered events: one message with one text, or one call of a function."""

    def __init__(self, call: EngineCall, response_id: str, created_s: int) -> None:
        self._call = call
        self._id = response_id
        name = response_id.removeprefix("resp_")
        self._call_id = f"call_{name}"
        self._item_id = f"msg_{name}" if call.tool is None else f"fc_{name}"
        self._at: dict[str, Any] = {"item_id": self._item_id, "output_index": 0}
        if call.tool is None:
            self._at["content_index"] = 0
        self._created_s = created_s
        self._serial = 0

    def opening(self) -> bytes:
        """Return the events before the first token."""
        begun = {"response": self._response("in_progress", [], None)}
        item = self._item("", "in_progress")
        if self._call.tool is None:
            item["content"] = []
        events = (
            self._event("response.created", begun)
            + self._event("response.in_progress", begun)
            + self._event("response.output_item.added", {"output_index": 0, "item": item})
        )
        if self._call.tool is not None:
            return events
        return events + self._event("response.content_part.added", {**self._at, "part": _part("")})

    def events(self, start: int, texts: Sequence[bytes], reason: FinishReason | None) -> bytes:  # noqa: ARG002 - signature of CompletionFormat
        """Return one event per text; the finish reason is in the events of `closing`. The arguments are those of `CompletionFormat.events`."""
        is_text = self._call.tool is None
        kind = "response.output_text.delta" if is_text else "response.function_call_arguments.delta"
        more: dict[str, Any] = {"logprobs": []} if is_text else {}
        return b"".join(self._event(kind, {**self._at, "delta": text.decode(), **more}) for text in texts)

    def closing(self, done: Finished) -> bytes:
        """Return the events that end text, part, message (or the call of a function) and response.

        As in vLLM, the last event is named completed even if the token limit cut the text; the status in this event
        shows that.
        """
        text = self._call.text(done.output_tokens)
        item = self._item(text, _status(done))
        tool = self._call.tool
        if tool is None:
            events = self._event("response.output_text.done", {**self._at, "text": text, "logprobs": []})
            events += self._event("response.content_part.done", {**self._at, "part": _part(text)})
        else:
            said = {**self._at, "name": tool.name, "arguments": text}
            events = self._event("response.function_call_arguments.done", said)
        return (
            events
            + self._event("response.output_item.done", {"output_index": 0, "item": item})
            + self._event("response.completed", {"response": self._complete(done)})
        )

    def complete(self, done: Finished) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        return orjson.dumps(self._complete(done))

    def _complete(self, done: Finished) -> dict[str, Any]:
        status, tokens = _status(done), self._call.prompt_tokens
        usage = {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": done.cached_tokens},
            "output_tokens": done.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens + done.output_tokens,
        }
        return self._response(status, [self._item(self._call.text(done.output_tokens), status)], usage)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        asked = self._call.fields
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": self._call.model,
            "output": output,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": asked.get("temperature", 1.0),
            "text": {"format": (asked.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p", 1.0),
            "truncation": asked.get("truncation") or "disabled",
            "usage": usage,
        }

    def _item(self, text: str, status: str) -> dict[str, Any]:
        tool = self._call.tool
        if tool is not None:
            named = {"call_id": self._call_id, "name": tool.name, "arguments": text}
            return {"id": self._item_id, "type": "function_call", "status": status, **named}
        head = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [_part(text)]}

    def _event(self, kind: str, more: dict[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._serial, **more})
        self._serial += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(done: Finished) -> str:
    return "incomplete" if done.reason is FinishReason.LENGTH else "completed"
