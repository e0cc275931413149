"""Converts between text or chats and tokens without the engine: /tokenize, /detokenize and count_tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final

import orjson
from pydantic import Field

from penstock.core.http.anthropic import MESSAGES
from penstock.core.simulated_tokens import BYTES_PER_TOKEN, token_ids
from penstock.engine.serve.fields import ChatFields, CompletionFields, Fields, read_fields, read_object
from penstock.engine.serve.message_fields import CountFields
from penstock.engine.serve.protocol import check_model
from penstock.engine.serve.settings import ServeSettings


class _DetokenizeFields(Fields):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2 ** (8 * BYTES_PER_TOKEN))]]


def tokenize(body: bytes, settings: ServeSettings) -> bytes:
    """Return the response body of /tokenize.

    Raises:
        RequestError: The request is refused.
    """
    given = read_object(body)
    is_chat = given.get("messages") is not None
    fields = read_fields(ChatFields, given) if is_chat else read_fields(CompletionFields, given)
    check_model(fields.model, settings)
    tokens = list(token_ids(fields.prompt))
    return orjson.dumps({"count": len(tokens), "max_model_len": settings.max_model_len, "tokens": tokens})


def detokenize(body: bytes, settings: ServeSettings) -> bytes:
    """Return the response body of /detokenize.

    Raises:
        RequestError: The request is refused.
    """
    fields = read_fields(_DetokenizeFields, read_object(body))
    check_model(fields.model, settings)
    text = b"".join(token.to_bytes(BYTES_PER_TOKEN, "little") for token in fields.tokens)
    return orjson.dumps({"prompt": text.rstrip(b"\0").decode(errors="replace")})


def count_tokens(body: bytes, settings: ServeSettings) -> bytes:
    """Return the response body of Anthropic's /v1/messages/count_tokens.

    Raises:
        RequestError: The request is refused.
    """
    fields = read_fields(CountFields, read_object(body))
    check_model(fields.model, settings)
    return orjson.dumps({"input_tokens": len(token_ids(fields.prompt))})


Answer = Callable[[bytes, ServeSettings], bytes]
"""Function that returns the response body for a request body."""
ANSWERS: Final[Mapping[str, Answer]] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    f"{MESSAGES}/count_tokens": count_tokens,
}
"""Functions that answer requests for tokens, by the path of the request."""
