"""The beginning of a stream; nothing of it is sent before a token is seen, so that another worker can be tried.

vLLM 0.32 begins a stream with status 200 before it has the prompt's KV. If the KV cannot be fetched, an
error event follows, in a chat after the event that names the role.
"""

from __future__ import annotations

from typing import Any

import orjson

from penstock.core.errors import StreamBroken, WrongAnswer
from penstock.core.http.sse import MAX_EVENT_BYTES, EventSplitter, payload
from penstock.core.http.streaming import StreamingResponse
from penstock.router.proxy.worker_answer import ErrorReply


class ErrorEvent(Exception):  # noqa: N818 - what the worker said, not a fault of the router
    """A stream says that it failed before its first token.

    Attributes:
        reply: With the status that the answer would have had, and the event's data.
    """

    def __init__(self, reply: ErrorReply) -> None:
        self.reply = reply
        super().__init__(f"error event of status {reply.status}")


async def read_preamble(response: StreamingResponse, worker: str) -> bytes:
    """Return the bytes up to the read that shows the first token.

    Args:
        response: A worker's stream, unread.
        worker: Its name, for messages.

    Raises:
        ErrorEvent: an error event came first.
        WrongAnswer: an event is no chunk of a completion, or nothing but comments and roles comes.
        UpstreamError: the stream broke off, or ended without a token.
    """
    splitter = EventSplitter()
    pieces: list[bytes] = []
    size = 0
    while size <= MAX_EVENT_BYTES:
        data = await anext(response, None)
        if data is None:
            raise StreamBroken(f"{worker} ended its stream before the first token")
        pieces.append(data)
        size += len(data)
        for event in splitter.feed(data):
            if _shows_token(event, worker):
                return b"".join(pieces)
    raise WrongAnswer(f"{worker} sent {size} bytes of events without a token")


def _shows_token(event: bytes, worker: str) -> bool:
    """Return whether tokens have begun; every chunk but one that names the role counts."""
    data = payload(event)
    if data is None:
        return False
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise WrongAnswer(f"{worker} began its stream with an event that is not JSON") from exc
    if not isinstance(chunk, dict):
        raise WrongAnswer(f"{worker} began its stream with an event that is no object")
    if chunk.get("error") is not None:
        raise ErrorEvent(ErrorReply(_status_of(chunk["error"]), data))
    kind = chunk.get("type")
    if isinstance(kind, str) and (kind == "error" or kind.startswith("response.")):
        return _shows_response_token(kind, data)
    if not isinstance(chunk.get("choices"), list):
        raise WrongAnswer(f"{worker} began its stream with an event that is no chunk of a completion")
    return not _names_role_only(chunk["choices"])


def _shows_response_token(kind: str, data: bytes) -> bool:
    """Return whether tokens have begun in a stream of the Responses API, whose events say what they are."""
    if kind in {"error", "response.failed"}:
        raise ErrorEvent(ErrorReply(500, data))
    return kind.endswith((".delta", ".completed", ".incomplete"))


def _status_of(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _names_role_only(choices: list[Any]) -> bool:
    if not choices:
        return False
    deltas = [choice.get("delta") for choice in choices if isinstance(choice, dict)]
    return all(
        isinstance(delta, dict) and "role" in delta and not any(v for k, v in delta.items() if k != "role")
        for delta in deltas
    )
