"""Token ids that the router asks workers for, to continue streams by them, and that the client did not ask for. Pure."""

from __future__ import annotations

from typing import Final

from penstock.core.http.streaming import Observe
from penstock.router.proxy.completion import CompletionRequest, changed_body
from penstock.router.proxy.not_continued import WITH_IDS

_KEY: Final = b'token_ids":['
"""Before the ids of a token, and of the prompt, as vLLM writes them. In a text the quote would be escaped."""
_NULL: Final = b"null"


def with_ids(request: CompletionRequest) -> CompletionRequest:
    """Return a request that asks its worker for the ids of prompt and answer."""
    if request.body.get(WITH_IDS):
        return request
    asked = {WITH_IDS: True}
    return request._replace(raw=changed_body(request, asked), body={**request.body, **asked})


def without_ids(events: bytes) -> bytes:
    """Return complete events with null for each list of ids, as a worker writes them that is not asked for ids."""
    at = events.find(_KEY)
    if at < 0:
        return events
    kept = []
    begin = 0
    while at >= 0:
        at += len(_KEY) - 1
        kept.append(events[begin:at])
        begin = events.find(b"]", at) + 1
        at = events.find(_KEY, begin)
    kept.append(events[begin:])
    return _NULL.join(kept)


def observe_without_ids(observe: Observe, data: bytes, at: int = 0) -> bytes:
    """Take one read, and return what to send without ids; as `RelayMeter.observe`."""
    return without_ids(observe(data[at:-2] if at else data, 0))
