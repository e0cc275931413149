"""Encodes messages of Anthropic's API as vLLM 0.32 does: one block of text, or one use of a tool; used by `streams`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.answers import Finished
from penstock.engine.serve.protocol import EngineCall


class MessageFormat:
    """Encodes the response to a message request."""

    def __init__(self, call: EngineCall, response_id: str, created_s: int) -> None:  # noqa: ARG002 - signature of CompletionFormat
        self._call = call
        self._head = {"id": response_id, "type": "message", "role": "assistant", "model": call.model}

    def opening(self) -> bytes:
        """Return the events before the first token."""
        begun: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._call.prompt_tokens, "output_tokens": 0}
        block = {"type": "text", "text": ""} if self._call.tool is None else self._tool_use({})
        return _event("message_start", message={**begun, "usage": usage}) + _event(
            "content_block_start", index=0, content_block=block
        )

    def events(self, start: int, texts: Sequence[bytes], reason: FinishReason | None) -> bytes:  # noqa: ARG002 - signature of CompletionFormat
        """Return one event per text that is not empty; the finish reason is in the events of `closing`.

        Args:
            start: Index of the first text's output token; not used.
            texts: Texts.
            reason: Finish reason; not used.
        """
        is_text = self._call.tool is None
        kind, key = ("text_delta", "text") if is_text else ("input_json_delta", "partial_json")
        return b"".join(
            _event("content_block_delta", index=0, delta={"type": kind, key: text.decode()})
            for text in texts
            if text
        )

    def closing(self, done: Finished) -> bytes:
        """Return the events that end block and message."""
        delta = _event("message_delta", delta=self._end(done), usage=self._usage(done))
        return _event("content_block_stop", index=0) + delta + _event("message_stop")

    def complete(self, done: Finished) -> bytes:
        """Return the JSON body of a message that is not streamed."""
        text = self._call.text(done.output_tokens)
        block = {"type": "text", "text": text} if self._call.tool is None else self._tool_use(_input_of(text))
        content = [block]
        answer = {**self._head, "content": content, **self._end(done), "usage": self._usage(done)}
        if done.kv_transfer_params is not None:
            answer["kv_transfer_params"] = done.kv_transfer_params
        return orjson.dumps(answer)

    def _tool_use(self, given: Any) -> dict[str, Any]:
        """Return the block of a tool use with its input, which is empty at the start of a stream."""
        assert self._call.tool is not None  # noqa: S101 - the caller has checked it
        name = str(self._head["id"]).removeprefix("msg_")
        return {"type": "tool_use", "id": f"toolu_{name}", "name": self._call.tool.name, "input": given}

    def _end(self, done: Finished) -> dict[str, Any]:
        if done.reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._call.tool is not None:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        stop = self._call.stop_reason
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}

    def _usage(self, done: Finished) -> dict[str, Any]:
        """Return the token counts; cached tokens are counted separately."""
        computed = self._call.prompt_tokens - done.cached_tokens
        return {
            "input_tokens": max(0, computed),
            "cache_read_input_tokens": done.cached_tokens,
            "output_tokens": done.output_tokens,
        }


def _input_of(arguments: str) -> Any:
    """Return the input of a tool use; empty if the token limit has cut its JSON."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}


def message_error(body: bytes) -> bytes:
    """Return an error body in Anthropic's form, as vLLM does: with the error type of the OpenAI form.

    Args:
        body: The error in OpenAI's form.
    """
    error = orjson.loads(body)["error"]
    return orjson.dumps({"type": "error", "error": {"type": error["type"], "message": error["message"]}})


def _event(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **more}))
