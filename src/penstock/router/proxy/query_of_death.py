"""Queries of death: a request that broke workers off is refused for a while, so that its retries do not break the next ones."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from penstock.core.lru_cache import LruCache
from penstock.router.proxy.completion import RequestRefused

REFUSED_S = 600.0
"""Chosen: longer than clients retry, simulated seconds; a fixed engine gets the request again soon."""

REMEMBERED = 1024
"""Chosen: so many bodies are remembered, those that were sent last; their hashes take 100 KiB."""

QUERY_OF_DEATH = "query_of_death"


class QueriesOfDeath:
    """The bodies that one router refuses, by their hash."""

    def __init__(self, now_s: Callable[[], float], *, most: int = REMEMBERED) -> None:
        self._now_s = now_s
        self._until_s: LruCache[str, float] = LruCache(most)

    def add(self, body: bytes) -> str:
        """Refuse a body from now on; return the hash that names it in the log and to clients."""
        digest = xxhash.xxh3_64_hexdigest(body)
        self._until_s.put(digest, self._now_s() + REFUSED_S)
        return digest

    def check(self, body: bytes) -> None:
        """Raise `RequestRefused` for a body that broke workers off lately; costs nothing where none has."""
        if not self._until_s:
            return
        digest = xxhash.xxh3_64_hexdigest(body)
        until_s = self._until_s.get(digest)
        if until_s is None:
            return
        left_s = until_s - self._now_s()
        if left_s <= 0:
            self._until_s.forget(digest)
            return
        message = (
            f"request {digest} broke off every worker that had it; it is refused for another {left_s:.0f} s, so that it does not "
            "break off more; change it, or see the workers' logs"
        )
        raise RequestRefused(422, message, code=QUERY_OF_DEATH)
