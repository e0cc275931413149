"""The bytes of answers: JSON bodies and server-sent events of completions, chats and responses; `streams` calls it.

A stream's events differ only in their word, so the bytes around it are made once per choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from penstock.core.http.sse import DONE
from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.protocol import Api, Choice, EngineCall, Usage
from penstock.engine.serve.vocabulary import LOG_HALF, alternatives, words


def for_chat(choice: Choice, start: int, stop: int, count: int) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat's output tokens [start, stop)."""
    return {
        "content": [
            {
                **_entry(word, LOG_HALF),
                "top_logprobs": [_entry(*each) for each in alternatives(word, count)],
            }
            for word in words(choice.salt, start, stop)
        ]
    }


def for_completion(
    choice: Choice, start: int, stop: int, count: int, *, echo: bool = False
) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's output tokens [start, stop)."""
    shown = _pieces(choice.prompt) if echo and start == 0 else []
    offset = start * BYTES_PER_TOKEN + (_characters(choice.prompt) if echo and start else 0)
    tokens = shown + [word.decode() for word in words(choice.salt, start, stop)]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    has_first = not shown
    return {
        "text_offset": offsets,
        # Nothing comes before the first token of a prompt, so that it has no probability.
        "token_logprobs": [LOG_HALF if has_first or at else None for at in range(len(tokens))],
        "tokens": tokens,
        "top_logprobs": [_top(token, count) if has_first or at else None for at, token in enumerate(tokens)],
    }


def prompt_text(choice: Choice) -> str:
    """Return the prompt as text; ids that are none are replaced."""
    return "".join(_pieces(choice.prompt))


@lru_cache(maxsize=64)
def _characters(prompt: bytes) -> int:
    """Return the length of a prompt's text; a stream asks at every token."""
    return sum(map(len, _pieces(prompt)))


def _pieces(prompt: bytes) -> list[str]:
    return [
        prompt[at : at + BYTES_PER_TOKEN].decode("utf-8", "replace")
        for at in range(0, len(prompt), BYTES_PER_TOKEN)
    ]


def _top(token: str, count: int) -> dict[str, float]:
    return {
        word.decode("utf-8", "replace"): value for word, value in alternatives(token.encode(), max(count, 1))
    }


def _entry(word: bytes, value: float) -> dict[str, Any]:
    return {"token": word.decode(), "logprob": value, "bytes": list(word)}


EVENT_STREAM = "text/event-stream; charset=utf-8"
_SLOT = "\x00"
"""Stands for the word while an event is encoded; JSON escapes it, so it cannot be taken for anything else."""
_ENCODED_SLOT = b"\\u0000"


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice that has ended."""

    choice: Choice
    output_tokens: int
    reason: FinishReason
    cached_tokens: int
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The generated text, as far as it is shown."""
        return b"".join(self.choice.texts(0, self.output_tokens)).decode()


class CompletionFormat:
    """Encodes a completion or a chat."""

    def __init__(self, call: EngineCall, response_id: str, created_s: int) -> None:
        self._call = call
        self._head: dict[str, Any] = {"id": response_id, "created": created_s, "model": call.model}

    def events(self, choice: Choice) -> ChoiceEvents:
        """Return what encodes a choice's events."""
        kind = "chat.completion.chunk" if self._call.api is Api.CHAT else "text_completion"
        head = {**self._head, "object": kind}
        return ChoiceEvents(self._call, choice, head)

    def closing(self, finished: Sequence[Finished]) -> bytes:
        """Return the usage event where ``stream_options`` ask for it, and the end of the stream."""
        if self._call.usage is Usage.NONE:
            return DONE
        kind = "chat.completion.chunk" if self._call.api is Api.CHAT else "text_completion"
        return _event({**self._head, "object": kind}, [], usage=usage_of(self._call, finished)) + DONE

    def complete(self, finished: Sequence[Finished]) -> bytes:
        """Return the JSON body of an answer that is not streamed."""
        call = self._call
        return orjson.dumps(
            {
                **self._head,
                "object": "chat.completion" if call.api is Api.CHAT else "text_completion",
                "choices": [self._choice(each) for each in finished],
                "usage": usage_of(call, finished),
                "kv_transfer_params": finished[0].kv_transfer_params,
            }
        )

    def _choice(self, done: Finished) -> dict[str, Any]:
        call, choice = self._call, done.choice
        shown: dict[str, Any] = {"index": choice.index}
        if call.api is Api.CHAT:
            shown["message"] = {"role": "assistant", "content": done.text}
        else:
            shown["text"] = (prompt_text(choice) if call.echo else "") + done.text
        shown.update(_end(done.reason, choice))
        if call.logprobs is not None:
            shown["logprobs"] = _logprobs(call, choice, 0, done.output_tokens)
        return shown


class ChoiceEvents:
    """Encodes one choice's events: around words alone the bytes are made once, else each event is its own."""

    def __init__(self, call: EngineCall, choice: Choice, head: dict[str, Any]) -> None:
        self._call = call
        self._choice = choice
        self._head = head
        # An echoed prompt comes with the first token where its probabilities do.
        self._echoes = call.echo and call.logprobs is not None
        self.opening = b"" if self._echoes else _opening(call, choice, head)
        self._lead, self._tail = self._around(None)
        self._seam = self._tail + self._lead

    def tokens(self, start: int, texts: Sequence[bytes]) -> bytes:
        """Return one event per text."""
        if self._call.events_differ:
            return b"".join(self._event(start + at, text, None) for at, text in enumerate(texts))
        return self._lead + self._seam.join(texts) + self._tail

    def last(self, start: int, text: bytes, reason: FinishReason) -> bytes:
        """Return the event that carries the last text and the reason."""
        if self._call.events_differ:
            return self._event(start, text, reason)
        lead, tail = self._around(reason)
        return lead + text + tail

    def _around(self, reason: FinishReason | None) -> tuple[bytes, bytes]:
        event = _event(self._head, [_delta(self._call, self._choice, _SLOT, reason)])
        lead, _, tail = event.partition(_ENCODED_SLOT)
        return lead, tail

    def _event(self, at: int, text: bytes, reason: FinishReason | None) -> bytes:
        call, choice = self._call, self._choice
        prompt = prompt_text(choice) if self._echoes and at == 0 else ""
        delta = _delta(call, choice, prompt + text.decode(), reason)
        if call.logprobs is not None:
            delta["logprobs"] = _logprobs(call, choice, at, at + 1)
        if call.usage is not Usage.EVERY_EVENT:
            return _event(self._head, [delta])
        return _event(self._head, [delta], usage=_counts(choice.prompt_tokens, at + 1))


def usage_of(call: EngineCall, finished: Sequence[Finished]) -> dict[str, Any]:
    """Return the ``usage`` object; each prompt counts once, however many answers it has."""
    output_tokens = sum(each.output_tokens for each in finished)
    return {
        **_counts(call.prompt_tokens, output_tokens),
        "prompt_tokens_details": {"cached_tokens": cached_of(call, finished)},
    }


def cached_of(call: EngineCall, finished: Sequence[Finished]) -> int:
    """Return the prompt tokens that were not computed, of each prompt's first answer."""
    return sum(each.cached_tokens for each in finished if each.choice.index % call.n == 0)


def _counts(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }


def _opening(call: EngineCall, choice: Choice, head: dict[str, Any]) -> bytes:
    if call.api is Api.CHAT:
        delta = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, **_chat_open()}
        return _event(head, [delta])
    if call.echo:
        return _event(head, [_delta(call, choice, prompt_text(choice), None)])
    return b""


def _delta(call: EngineCall, choice: Choice, text: str, reason: FinishReason | None) -> dict[str, Any]:
    if call.api is Api.CHAT:
        end = _chat_open() if reason is None else _end(reason, choice)
        return {"index": choice.index, "delta": {"content": text}, **end}
    return {"index": choice.index, "text": text, **_end(reason, choice)}


def _logprobs(call: EngineCall, choice: Choice, start: int, stop: int) -> dict[str, Any]:
    count = call.logprobs or 0
    if call.api is Api.CHAT:
        return for_chat(choice, start, stop, count)
    return for_completion(choice, start, stop, count, echo=call.echo)


def _event(head: dict[str, Any], choices: list[Any], **more: Any) -> bytes:
    return b"data: " + orjson.dumps({**head, "choices": choices, **more}) + b"\n\n"


def _end(reason: FinishReason | None, choice: Choice) -> dict[str, Any]:
    is_stopped = reason is FinishReason.STOP
    return {
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": choice.stop_reason if is_stopped else None,
    }


def _chat_open() -> dict[str, Any]:
    """Return the same for chat events; only the last has the stop reason."""
    return {"logprobs": None, "finish_reason": None}


class ResponseFormat:
    """Encodes one response: one message of one text.

    Events are numbered, and the last one repeats the complete response. So there is one writer for all of them.
    """

    def __init__(self, call: EngineCall, response_id: str, created_s: int) -> None:
        self._call = call
        self._id = response_id
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        self._created_s = created_s
        self._serial = 0
        self.opening = b""

    def events(self, choice: Choice) -> ResponseFormat:  # noqa: ARG002 - there is one
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
        """Return the last text's event; how it ended comes with the complete response."""
        return self._delta(text)

    def closing(self, finished: Sequence[Finished]) -> bytes:
        """Return the events that end text, part, message and response.

        As vLLM's, the last one is named completed even where the limit cut the text; its status shows that.
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
