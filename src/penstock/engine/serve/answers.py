"""Encodes responses of completions and chats: JSON bodies and server-sent events; used by `streams`.

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
from penstock.engine.serve.protocol import Api, EngineCall, Usage
from penstock.engine.serve.words import WORDS

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
        choice = {"index": self._call.choice, "delta": role, "logprobs": None, "finish_reason": None}
        return self._event([choice], **ids)

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
        choice = {"index": self._call.choice, **said, **self._end(done.reason)}
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
        assert self._call.tool is not None  # noqa: S101 - the caller has checked it
        function = {"name": self._call.tool.name, "arguments": arguments}
        # As in vLLM, each choice has its own id; a client returns it with the tool's result.
        name = f"call-{self._head['id']}" + (f"-{self._call.choice}" if self._call.choice else "")
        return {"id": name, "type": "function", "function": function}

    def _said(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """Return the delta of a chat's chunk: a part of the text, or of the arguments of a call that the first one names."""
        if self._call.tool is None:
            return {"content": text}
        call = self._tool_call(text) if is_first else {"function": {"arguments": text}}
        return {"tool_calls": [{"index": 0, **call}]}

    def _delta(self, text: str, reason: FinishReason | None, *, is_first: bool = False) -> dict[str, Any]:
        if not self._is_chat:
            return {"index": self._call.choice, "text": text, **self._end(reason)}
        # In a chat only the last event has the stop reason.
        end = {"logprobs": None, "finish_reason": None} if reason is None else self._end(reason)
        return {"index": self._call.choice, "delta": self._said(text, is_first=is_first), **end}

    def _end(self, reason: FinishReason | None) -> dict[str, Any]:
        stop_reason = self._call.stop_reason if reason is FinishReason.STOP else None
        # As in vLLM, a call of a function that the client named ends by stop.
        tool = self._call.tool
        is_chosen = reason is FinishReason.STOP and tool is not None and tool.is_chosen
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
