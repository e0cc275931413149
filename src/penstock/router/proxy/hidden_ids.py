"""Token ids that the router requests from workers to resume streams by them, and that the client did not request. Pure."""

from __future__ import annotations

from typing import Final

from penstock.core.http.streaming import Observe
from penstock.router.proxy.completion import CompletionRequest, changed_body
from penstock.router.proxy.not_resumable import WITH_IDS

_KEY: Final = b'token_ids":['
"""Before the ids of a token, and of the prompt, as vLLM writes them. In a text the quote would be escaped."""
_NULL: Final = b"null"


def with_ids(request: CompletionRequest) -> CompletionRequest:
    """Return a copy of a request that asks its worker for the token ids of the prompt and the response."""
    if request.body.get(WITH_IDS):
        return request
    asked = {WITH_IDS: True}
    return request._replace(raw=changed_body(request, asked), body={**request.body, **asked})


def without_ids(events: bytes) -> bytes:
    """Return the complete events ``events`` of a stream with null in place of each list of token ids.

    The client then sees what it would have seen if the router had not asked the worker for ids.

    A list that has no end, which only a malformed event contains, is not changed.
    """
    kept = []
    begin = 0
    while (at := events.find(_KEY, begin)) >= 0:
        at += len(_KEY) - 1
        end = events.find(b"]", at)
        if end < 0:
            break
        kept.append(events[begin:at])
        begin = end + 1
    kept.append(events[begin:])
    return _NULL.join(kept) if len(kept) > 1 else events


def observe_without_ids(observe: Observe, data: bytes, at: int = 0) -> bytes:
    """Pass one read of a worker's stream to ``observe``, and return the bytes for the client without token ids.

    ``data`` is what was read, and ``at`` the position at which the body starts in it (0 without HTTP chunk framing);
    ``observe`` is `RelayMeter.observe` or a function with the same arguments, which returns the bytes with ids.
    """
    return without_ids(observe(data[at:-2] if at else data, 0))
