"""OpenAI-style JSON error bodies; used by the server's own refusals and by every handler."""

from __future__ import annotations

import orjson

JSON = "application/json"
EVENT_STREAM = "text/event-stream"


def error_body(
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | int | None = None,
    param: str | None = None,
) -> bytes:
    """Return ``{"error": {"message", "type", "param", "code"}}`` as the OpenAI API and its clients spell it.

    Args:
        message: What is wrong, with the bound and the remedy.
        kind: The ``type`` field: ``invalid_request_error``, ``server_error``, ``rate_limit_error``...
        code: Stable machine-readable word, the HTTP status as vLLM has it, or None.
        param: The field that is wrong, or None.
    """
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
