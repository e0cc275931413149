"""The bytes of answers: JSON bodies and server-sent events of both APIs; streams call it.

A stream's events differ only in their word, so the bytes around it are made once per request.
"""

from __future__ import annotations

from typing import Any

import orjson

from penstock_engine.core.requests import FinishReason
from penstock_engine.serve.protocol import Call

EVENT_STREAM = "text/event-stream; charset=utf-8"
_SLOT = "\x00"
"""Stands for the word while an event is encoded; JSON escapes it, so it cannot be taken for anything else."""
_ENCODED_SLOT = b"\\u0000"

WORDS: tuple[bytes, ...] = tuple(
    f" {first}{vowel}{last}".encode() for first in "bdfgklmp" for vowel in "aeio" for last in "lmnrstkd"
)
"""The simulated vocabulary: 256 words of 4 ASCII bytes, one token each."""


def words(salt: int, start: int, stop: int) -> list[bytes]:
    """Return the output tokens [start, stop) of the request with ``salt``."""
    return [WORDS[(salt + position * 37) & 255] for position in range(start, stop)]


class EventFormat:
    """Encodes one stream's events."""

    __slots__ = ("_call", "_head", "_lead", "_seam", "_tail", "opening")

    def __init__(self, call: Call, response_id: str, created_s: int) -> None:
        self._call = call
        kind = "chat.completion.chunk" if call.is_chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": kind,
            "created": created_s,
            "model": call.model,
        }
        self._lead, self._tail = self._around(None)
        self._seam = self._tail + self._lead
        self.opening = b""
        if call.is_chat:
            self.opening = self._event(
                {"index": 0, "delta": {"role": "assistant", "content": ""}, **_chat_open()}
            )

    def tokens(self, texts: list[bytes]) -> bytes:
        """Return one event per text."""
        return self._lead + self._seam.join(texts) + self._tail

    def last(self, text: bytes, reason: FinishReason) -> bytes:
        """Return the event that carries the last text and the reason."""
        lead, tail = self._around(reason)
        return lead + text + tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the event that ``stream_options.include_usage`` asks for."""
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": usage}) + b"\n\n"

    def _around(self, reason: FinishReason | None) -> tuple[bytes, bytes]:
        if self._call.is_chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"content": _SLOT}, **_chat_open(reason)}
        else:
            choice = {"index": 0, "text": _SLOT, **_open(reason)}
        lead, _, tail = self._event(choice).partition(_ENCODED_SLOT)
        return lead, tail

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._head, "choices": [choice]}) + b"\n\n"


def whole(
    call: Call,
    response_id: str,
    created_s: int,
    *,
    text: bytes,
    reason: FinishReason,
    usage: dict[str, Any],
    kv_transfer_params: dict[str, Any] | None,
) -> bytes:
    """Return the JSON body of an answer that is not streamed."""
    choice: dict[str, Any] = {"index": 0}
    if call.is_chat:
        choice["message"] = {"role": "assistant", "content": text.decode()}
    else:
        choice["text"] = text.decode()
    choice.update(_open(reason))
    return orjson.dumps(
        {
            "id": response_id,
            "object": "chat.completion" if call.is_chat else "text_completion",
            "created": created_s,
            "model": call.model,
            "choices": [choice],
            "usage": usage,
            "kv_transfer_params": kv_transfer_params,
        }
    )


def usage_of(call: Call, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the ``usage`` object."""
    return {
        "prompt_tokens": call.prompt_tokens,
        "total_tokens": call.prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def problem(message: str, status: int, kind: str) -> bytes:
    """Return an error object in vLLM's form."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}})


def _open(reason: FinishReason | None = None) -> dict[str, Any]:
    return {"logprobs": None, "finish_reason": reason, "stop_reason": None}


def _chat_open(reason: FinishReason | None = None) -> dict[str, Any]:
    """Return the same for chat events, of which only the last has the stop reason."""
    return {"logprobs": None, "finish_reason": None} if reason is None else _open(reason)
