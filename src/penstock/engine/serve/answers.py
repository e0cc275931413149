"""Encodes responses: JSON bodies and server-sent events of completions, chats and OpenAI Responses; used by `streams`.

The events of a completion differ only in their word, so the bytes around it are encoded only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.core.http.sse import DONE
from penstock.core.simulated_tokens import BYTES_PER_TOKEN, token_ids
from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.protocol import WORDS, Api, EngineCall, Usage

EVENT_STREAM = "text/event-stream; charset=utf-8"
"""Content type of streamed responses."""
_SLOT = "\x00"
"""Placeholder for the word while an event is encoded; JSON escapes it, so it cannot occur otherwise."""
_ENCODED_SLOT = b"\\u0000"


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a request that has ended.

    Attributes:
        output_tokens: Number of generated tokens.
        reason: Finish reason.
        cached_tokens: Number of prompt tokens that were found in a prefix cache, as the prefill worker reports it;
            without such a report, the number that were not computed here.
        kv_transfer_params: Parameters with which another worker can fetch the request's KV; None if its blocks are not
            kept.
    """

    output_tokens: int
    reason: FinishReason
    cached_tokens: int
    kv_transfer_params: dict[str, Any] | None = None


class CompletionFormat:
    """Encodes the response to a completion or chat request."""

    def __init__(self, call: EngineCall, response_id: str, created_s: int, *, interval: int = 1) -> None:
        """Create the format of one response.

        Args:
            call: The parsed request.
            response_id: ID that the client sees.
            created_s: Unix time of the response in seconds.
            interval: Number of tokens per streamed event, except the first event, which has one token. Used only if
                the response contains token IDs.
        """
        self._call = call
        self._interval = interval
        self._is_chat = call.api is Api.CHAT
        self._head: dict[str, Any] = {"id": response_id, "created": created_s, "model": call.model}
        self._lead, self._tail = self._around(None)
        self._seam = self._tail + self._lead

    def opening(self) -> bytes:
        """Return the events before the first token."""
        if not self._is_chat:
            return b""
        role = {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": self._prompt_ids()} if self._call.returns_ids else {}
        return self._event([{"index": 0, "delta": role, "logprobs": None, "finish_reason": None}], **ids)

    def events(self, start: int, texts: Sequence[bytes], reason: FinishReason | None) -> bytes:
        """Return one event per text.

        Args:
            start: Index of the output token from which the first text comes.
            texts: Text of each event.
            reason: Finish reason for the last event; None if the response has not ended.
        """
        call = self._call
        if (
            call.usage is Usage.EVERY_EVENT
            or call.returns_ids
            or call.content is not None
            or call.alternatives is not None
        ):
            return b"".join(self._events_one_by_one(start, texts, reason))
        if reason is None:
            return self._lead + self._seam.join(texts) + self._tail
        lead, tail = self._around(reason)
        return b"".join(self._lead + text + self._tail for text in texts[:-1]) + lead + texts[-1] + tail

    def _events_one_by_one(
        self, start: int, texts: Sequence[bytes], reason: FinishReason | None
    ) -> Iterator[bytes]:
        call = self._call
        for at, text in enumerate(texts):
            stop = min(call.output_tokens, start + (self._interval if start else 1))
            choice = self._delta(text.decode(), reason if at == len(texts) - 1 else None, is_first=not start)
            if call.returns_ids:
                if not start and not self._is_chat:
                    choice["prompt_token_ids"] = self._prompt_ids()
                choice["token_ids"] = call.ids(start, stop)
            choice["logprobs"] = self._logprobs(start, stop)
            counts = {}
            if call.usage is Usage.EVERY_EVENT:
                counts["usage"] = _counts(call.prompt_tokens, stop)
            yield self._event([choice], **counts)
            start = stop

    def _prompt_ids(self) -> list[int]:
        return list(token_ids(self._call.prompt))

    def _logprobs(self, start: int, stop: int) -> dict[str, Any] | None:
        """Return made-up log probabilities of output tokens in the API's form; None if they are not requested."""
        call = self._call
        if call.alternatives is None:
            return None
        tokens = [piece.decode() for piece in call.pieces(start, stop)]
        values = [-0.01 * (1 + at % 50) for at in range(start, stop)]
        others = [
            _alternatives(token, value, call.alternatives)
            for token, value in zip(tokens, values, strict=True)
        ]
        if self._is_chat:
            content = [
                {**_shown(token, value), "top_logprobs": [_shown(*each) for each in other]}
                for token, value, other in zip(tokens, values, others, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = [at * BYTES_PER_TOKEN for at in range(start, stop)]
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": [dict(each) for each in others] if call.alternatives else None,
        }

    def closing(self, done: Finished) -> bytes:
        """Return the bytes that end the stream: an event with the token counts, if ``stream_options`` asks for it, and the end mark."""
        if self._call.usage is Usage.NONE:
            return DONE
        return self._event([], usage=self._usage(done)) + DONE

    def complete(self, done: Finished) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        text = self._call.text(done.output_tokens)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._call.tool is not None:
            message |= {"content": None, "tool_calls": [self._tool_call(text)]}
        said: dict[str, Any] = {"message": message} if self._is_chat else {"text": text}
        choice = {"index": 0, **said, **self._end(done.reason)}
        answer = {
            **self._head,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [choice],
            "usage": self._usage(done),
            "kv_transfer_params": done.kv_transfer_params,
        }
        choice["logprobs"] = self._logprobs(0, done.output_tokens)
        if self._call.returns_ids:
            choice["token_ids"] = self._call.ids(0, done.output_tokens)
            (answer if self._is_chat else choice)["prompt_token_ids"] = self._prompt_ids()
        return orjson.dumps(answer)

    def _usage(self, done: Finished) -> dict[str, Any]:
        counts = _counts(self._call.prompt_tokens, done.output_tokens)
        return {**counts, "prompt_tokens_details": {"cached_tokens": done.cached_tokens}}

    def _around(self, reason: FinishReason | None) -> tuple[bytes, bytes]:
        lead, _, tail = self._event([self._delta(_SLOT, reason)]).partition(_ENCODED_SLOT)
        return lead, tail

    def _tool_call(self, arguments: str) -> dict[str, Any]:
        function = {"name": self._call.tool, "arguments": arguments}
        return {"id": f"call-{self._head['id']}", "type": "function", "function": function}

    def _said(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """Return the delta of a chat's chunk: a part of the text, or of the arguments of a call that the first one names."""
        if self._call.tool is None:
            return {"content": text}
        call = self._tool_call(text) if is_first else {"function": {"arguments": text}}
        return {"tool_calls": [{"index": 0, **call}]}

    def _delta(self, text: str, reason: FinishReason | None, *, is_first: bool = False) -> dict[str, Any]:
        if not self._is_chat:
            return {"index": 0, "text": text, **self._end(reason)}
        # In a chat only the last event has the stop reason.
        end = {"logprobs": None, "finish_reason": None} if reason is None else self._end(reason)
        return {"index": 0, "delta": self._said(text, is_first=is_first), **end}

    def _end(self, reason: FinishReason | None) -> dict[str, Any]:
        stop_reason = self._call.stop_reason if reason is FinishReason.STOP else None
        # As in vLLM, a call of a function that the client named ends by stop.
        is_chosen = reason is FinishReason.STOP and self._call.tool is not None and self._call.must_choose
        shown = "tool_calls" if is_chosen else reason
        return {"logprobs": None, "finish_reason": shown, "stop_reason": stop_reason}

    def _event(self, choices: list[Any], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        event = {**self._head, "object": kind, "choices": choices, **more}
        return b"data: " + orjson.dumps(event) + b"\n\n"


def _alternatives(token: str, value: float, count: int) -> list[tuple[str, float]]:
    """Return the most probable tokens with their log probabilities: the one that was chosen, then others of the vocabulary."""
    others = (word.decode() for word in WORDS if word.decode() != token)
    return [
        (token, value),
        *((other, value - 1 - at) for at, other in zip(range(count - 1), others, strict=False)),
    ][:count]


def _shown(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def _counts(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }


class ResponseFormat:
    """Encodes the response of OpenAI's Responses API: one message with one text, as numbered events."""

    def __init__(self, call: EngineCall, response_id: str, created_s: int) -> None:
        self._call = call
        self._id = response_id
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        self._at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._created_s = created_s
        self._serial = 0

    def opening(self) -> bytes:
        """Return the events before the first token."""
        begun = {"response": self._response("in_progress", [], None)}
        item = {**self._item("", "in_progress"), "content": []}
        return (
            self._event("response.created", begun)
            + self._event("response.in_progress", begun)
            + self._event("response.output_item.added", {"output_index": 0, "item": item})
            + self._event("response.content_part.added", {**self._at, "part": _part("")})
        )

    def events(self, start: int, texts: Sequence[bytes], reason: FinishReason | None) -> bytes:  # noqa: ARG002 - signature of CompletionFormat
        """Return one event per text; the finish reason is in the events of `closing`. The arguments are those of `CompletionFormat.events`."""
        kind = "response.output_text.delta"
        return b"".join(
            self._event(kind, {**self._at, "delta": text.decode(), "logprobs": []}) for text in texts
        )

    def closing(self, done: Finished) -> bytes:
        """Return the events that end text, part, message and response.

        As in vLLM, the last event is named completed even if the token limit cut the text; the status in this event
        shows that.
        """
        text = self._call.text(done.output_tokens)
        item = self._item(text, _status(done))
        return (
            self._event("response.output_text.done", {**self._at, "text": text, "logprobs": []})
            + self._event("response.content_part.done", {**self._at, "part": _part(text)})
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
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p", 1.0),
            "truncation": asked.get("truncation") or "disabled",
            "usage": usage,
        }

    def _item(self, text: str, status: str) -> dict[str, Any]:
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
