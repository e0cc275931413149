"""Converts errors to the form of Anthropic's Messages API. Pure."""

from __future__ import annotations

from typing import Final

import orjson

MESSAGES: Final = "/v1/messages"
"""Path of Anthropic's Messages API."""
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
"""Error type by HTTP status. Source: Anthropic's documentation, "Errors"; its own 529 has the meaning of 503."""


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's Messages API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def anthropic_error(status: int, body: bytes) -> bytes:
    """Return an error body in Anthropic's form, ``{"type": "error", "error": {"type", "message"}}``.

    Args:
        status: HTTP status of the response.
        body: The error in OpenAI's form, or the flat form of a rejection.
    """
    answer = orjson.loads(body)
    message = answer.get("error", answer)["message"]
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


def error_body_for(path: str, status: int, body: bytes) -> bytes:
    """Return an error body in the form that clients of ``path`` expect: Anthropic's, or OpenAI's unchanged.

    Args:
        path: Path of the request.
        status: HTTP status of the response.
        body: The error in OpenAI's form.
    """
    return anthropic_error(status, body) if is_anthropic(path) else body


def error_event(body: bytes) -> bytes:
    """Return the SSE event with which a stream ends in an error; ``body`` is the result of `anthropic_error`."""
    return b"event: error\ndata: " + body + b"\n\n"
