"""The bytes of answers: JSON bodies and server-sent events of completions and chats; ``reply`` calls it.

A stream's events differ only in their word, so the bytes around it are made once per choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from penstock.core.http.sse import DONE
from penstock.engine.core.requests import FinishReason
from penstock.engine.serve import logprobs
from penstock.engine.serve.protocol import Api, Choice, EngineCall, Usage

EVENT_STREAM = "text/event-stream; charset=utf-8"
_SLOT = "\x00"
"""Stands for the word while an event is encoded; JSON escapes it, so it cannot be taken for anything else."""
_ENCODED_SLOT = b"\\u0000"


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice that has ended.

    Attributes:
        cached_tokens: Prompt tokens that were not computed.
        kv_transfer_params: Where its KV is kept, or None.
    """

    choice: Choice
    output_tokens: int
    reason: FinishReason
    cached_tokens: int
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The generated text, as far as it is shown."""
        return b"".join(self.choice.texts(0, self.output_tokens)).decode()


class ChoiceEvents(Protocol):
    """Encodes the events of one choice.

    Attributes:
        opening: What comes before its first token.
    """

    opening: bytes

    def tokens(self, start: int, texts: Sequence[bytes]) -> bytes:
        """Return one event per text; ``start`` is the first one's token."""

    def last(self, start: int, text: bytes, reason: FinishReason) -> bytes:
        """Return the event of the last text, which begins with token ``start``, and what ends the choice."""


class Format(Protocol):
    """Encodes one answer."""

    def events(self, choice: Choice) -> ChoiceEvents:
        """Return what encodes a choice's events."""

    def closing(self, finished: Sequence[Finished]) -> bytes:
        """Return what ends a stream whose choices have all ended."""

    def complete(self, finished: Sequence[Finished]) -> bytes:
        """Return the JSON body of an answer that is not streamed."""


class CompletionFormat:
    """Encodes a completion or a chat."""

    def __init__(self, call: EngineCall, response_id: str, created_s: int) -> None:
        self._call = call
        self._head: dict[str, Any] = {"id": response_id, "created": created_s, "model": call.model}

    def events(self, choice: Choice) -> ChoiceEvents:
        """Return what encodes a choice's events."""
        kind = "chat.completion.chunk" if self._call.api is Api.CHAT else "text_completion"
        head = {**self._head, "object": kind}
        if self._call.events_differ:
            return _SeparateEvents(self._call, choice, head)
        return EventFormat(self._call, choice, head)

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
            shown["text"] = (logprobs.prompt_text(choice) if call.echo else "") + done.text
        shown.update(_end(done.reason, choice))
        if call.logprobs is not None:
            shown["logprobs"] = _logprobs(call, choice, 0, done.output_tokens)
        return shown


class EventFormat:
    """Encodes one choice's events."""

    __slots__ = ("_call", "_choice", "_head", "_lead", "_seam", "_tail", "opening")

    def __init__(self, call: EngineCall, choice: Choice, head: dict[str, Any]) -> None:
        """Make the bytes that all events share; ``head`` is what their JSON begins with."""
        self._call = call
        self._choice = choice
        self._head = head
        self._lead, self._tail = self._around(None)
        self._seam = self._tail + self._lead
        self.opening = _opening(call, choice, head)

    def tokens(self, start: int, texts: Sequence[bytes]) -> bytes:  # noqa: ARG002 - of the protocol
        """Return one event per text."""
        return self._lead + self._seam.join(texts) + self._tail

    def last(self, start: int, text: bytes, reason: FinishReason) -> bytes:  # noqa: ARG002 - of the protocol
        """Return the event that carries the last text and the reason."""
        lead, tail = self._around(reason)
        return lead + text + tail

    def _around(self, reason: FinishReason | None) -> tuple[bytes, bytes]:
        event = _event(self._head, [_delta(self._call, self._choice, _SLOT, reason)])
        lead, _, tail = event.partition(_ENCODED_SLOT)
        return lead, tail


class _SeparateEvents:
    """Encodes one choice's events where each differs in its log probabilities or its counts."""

    __slots__ = ("_call", "_choice", "_echoes", "_head", "opening")

    def __init__(self, call: EngineCall, choice: Choice, head: dict[str, Any]) -> None:
        self._call = call
        self._choice = choice
        self._head = head
        # An echoed prompt comes with the first token where its probabilities do.
        self._echoes = call.echo and call.logprobs is not None
        self.opening = b"" if self._echoes else _opening(call, choice, head)

    def tokens(self, start: int, texts: Sequence[bytes]) -> bytes:
        return b"".join(self._event(start + at, text, None) for at, text in enumerate(texts))

    def last(self, start: int, text: bytes, reason: FinishReason) -> bytes:
        return self._event(start, text, reason)

    def _event(self, at: int, text: bytes, reason: FinishReason | None) -> bytes:
        call, choice = self._call, self._choice
        prompt = logprobs.prompt_text(choice) if self._echoes and at == 0 else ""
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
        return _event(head, [_delta(call, choice, logprobs.prompt_text(choice), None)])
    return b""


def _delta(call: EngineCall, choice: Choice, text: str, reason: FinishReason | None) -> dict[str, Any]:
    if call.api is Api.CHAT:
        end = _chat_open() if reason is None else _end(reason, choice)
        return {"index": choice.index, "delta": {"content": text}, **end}
    return {"index": choice.index, "text": text, **_end(reason, choice)}


def _logprobs(call: EngineCall, choice: Choice, start: int, stop: int) -> dict[str, Any]:
    count = call.logprobs or 0
    if call.api is Api.CHAT:
        return logprobs.for_chat(choice, start, stop, count)
    return logprobs.for_completion(choice, start, stop, count, echo=call.echo)


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
    """Return the same for chat events, of which only the last has the stop reason."""
    return {"logprobs": None, "finish_reason": None}
