"""Errors as Anthropic's Messages API and its clients spell them. Pure."""

from __future__ import annotations

from typing import Final

import orjson

MESSAGES: Final = "/v1/messages"
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""By status. Source: Anthropic's documentation, "Errors"; its own 529 is the 503 of everyone else."""


def is_anthropic(path: str) -> bool:
    """Return whether a path is of that API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def anthropic_error(status: int, body: bytes) -> bytes:
    """Return ``{"type": "error", "error": {"type", "message"}}`` of an error in OpenAI's form, or a rejection's flat one."""
    answer = orjson.loads(body)
    message = answer.get("error", answer)["message"]
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


def in_form_of(path: str, status: int, body: bytes) -> bytes:
    """Return an error's body, given in OpenAI's form, as clients of a path read it."""
    return anthropic_error(status, body) if is_anthropic(path) else body


def error_event(body: bytes) -> bytes:
    """Return the event by which a stream ends in an error of `anthropic_error`."""
    return b"event: error\ndata: " + body + b"\n\n"
