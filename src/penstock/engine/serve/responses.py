"""The bytes of answers of the Responses API; ``reply`` calls it as it does `answers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.answers import ChoiceEvents, Finished, cached_of
from penstock.engine.serve.protocol import Choice, EngineCall


class ResponseFormat:
    """Encodes one response: one message of one text.

    Events are numbered, and the last one repeats the whole response. So there is one writer for all of them.
    """

    def __init__(self, call: EngineCall, response_id: str, created_s: int) -> None:
        self._call = call
        self._id = response_id
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        self._created_s = created_s
        self._serial = 0
        self.opening = b""

    def events(self, choice: Choice) -> ChoiceEvents:  # noqa: ARG002 - there is one
        """Return what encodes the events: this."""
        begun = {"response": self._response("in_progress", [], None)}
        part = {"item_id": self._item_id, "output_index": 0, "content_index": 0, "part": _part("")}
        self.opening = (
            self._event("response.created", begun)
            + self._event("response.in_progress", begun)
            + self._event(
                "response.output_item.added",
                {"output_index": 0, "item": {**self._item("", "in_progress"), "content": []}},
            )
            + self._event("response.content_part.added", part)
        )
        return self

    def tokens(self, start: int, texts: Sequence[bytes]) -> bytes:  # noqa: ARG002 - of the protocol
        """Return one event per text."""
        return b"".join(self._delta(text) for text in texts)

    def last(self, start: int, text: bytes, reason: FinishReason) -> bytes:  # noqa: ARG002 - of the protocol
        """Return the last text's event; how it ended comes with the whole."""
        return self._delta(text)

    def closing(self, finished: Sequence[Finished]) -> bytes:
        """Return the events that end text, part, message and response.

        As vLLM's, the last one is named completed even where the limit cut the text; the status in it tells.
        """
        (done,) = finished
        text, at = done.text, {"output_index": 0, "content_index": 0, "item_id": self._item_id}
        status = _status(done)
        return (
            self._event("response.output_text.done", {**at, "text": text, "logprobs": []})
            + self._event("response.content_part.done", {**at, "part": _part(text)})
            + self._event("response.output_item.done", {"output_index": 0, "item": self._item(text, status)})
            + self._event("response.completed", {"response": self._complete(done)})
        )

    def complete(self, finished: Sequence[Finished]) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        (done,) = finished
        return orjson.dumps(self._complete(done))

    def _complete(self, done: Finished) -> dict[str, Any]:
        status = _status(done)
        tokens = self._call.prompt_tokens
        usage = {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": cached_of(self._call, [done])},
            "output_tokens": done.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens + done.output_tokens,
        }
        return self._response(status, [self._item(done.text, status)], usage)

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
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p", 1.0),
            "truncation": asked.get("truncation") or "disabled",
            "usage": usage,
        }

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _delta(self, text: bytes) -> bytes:
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", {**at, "delta": text.decode(), "logprobs": []})

    def _event(self, kind: str, more: dict[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._serial, **more})
        self._serial += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(done: Finished) -> str:
    return "incomplete" if done.reason is FinishReason.LENGTH else "completed"
