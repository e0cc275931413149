"""The beginning of a decode stream that depends on a hand-over; nothing of it is sent before a token is seen.

vLLM 0.32 begins a stream with status 200 before it has the prompt's KV. If the KV cannot be fetched, an
error event follows, in a chat after the event that names the role.
"""

from __future__ import annotations

from typing import Any

import orjson

from penstock_core.errors import StreamBroken
from penstock_router.proxy.failures import StageFailed, WorkerAnswer
from penstock_wire.client import StreamingResponse
from penstock_wire.sse import EventSplitter, payload


async def read_opening(response: StreamingResponse, worker: str) -> bytes:
    """Return the bytes up to the read that shows the first token or the stream's end.

    Args:
        response: Decode's answer, unread.
        worker: Its name, for messages.

    Raises:
        StageFailed: an error event came first.
        UpstreamError: the stream broke off.
    """
    splitter = EventSplitter()
    opening = b""
    while True:
        data = await anext(response, None)
        if data is None:
            raise StreamBroken(f"{worker} ended its stream before the first token")
        opening += data
        for event in splitter.feed(data):
            if _shows_token(event):
                return opening


def _shows_token(event: bytes) -> bool:
    """Return whether tokens have begun; whatever is neither role nor error counts, the end included.

    Raises:
        StageFailed: the event is an error.
    """
    data = payload(event)
    if data is None:
        return False
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return True
    if not isinstance(chunk, dict):
        return True
    error = chunk.get("error")
    if isinstance(error, dict):
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        answer = WorkerAnswer(status, "application/json", data)
        raise StageFailed("kv_lost", worker="", may_retry=status >= 500, answer=answer)
    return not _names_role_only(chunk)


def _names_role_only(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    deltas = [choice.get("delta") for choice in choices if isinstance(choice, dict)]
    return all(
        isinstance(delta, dict) and "role" in delta and not any(v for k, v in delta.items() if k != "role")
        for delta in deltas
    )
