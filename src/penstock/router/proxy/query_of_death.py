"""Queries of death: a request that killed a worker is refused for a while, so that its retries do not kill the next ones.

`penstock.router.core.suspects` says which one did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from penstock.core.lru_cache import LruCache
from penstock.router.proxy.completion import RequestRefused

REFUSED_S = 600.0
"""Chosen: longer than clients retry, simulated seconds; a fixed engine gets the request again soon."""

REMEMBERED = 1024
"""Chosen: this many bodies are remembered, those that were sent last; their hashes take 100 KiB."""

QUERY_OF_DEATH = "query_of_death"


@dataclass(frozen=True, slots=True)
class _Conviction:
    """Until when a body is refused, simulated seconds, and what is known of it."""

    until_s: float
    facts: str


class QueriesOfDeath:
    """The bodies that one router refuses, by their hash."""

    def __init__(self, now_s: Callable[[], float], *, most: int = REMEMBERED) -> None:
        self._now_s = now_s
        self._convicted: LruCache[str, _Conviction] = LruCache(most)

    def add(self, body: bytes, before: Sequence[str], worker: str) -> str:
        """Refuse a body from now on; return the hash that names it in the log and to clients.

        Args:
            body: The client's.
            before: Workers that died while it ran there alongside others.
            worker: On which it ran alone and which died then.
        """
        digest = xxhash.xxh3_64_hexdigest(body)
        facts = f"ran on {' and '.join(before)} when they died, then alone on {worker}, which died too"
        self._convicted.put(digest, _Conviction(self._now_s() + REFUSED_S, facts))
        return digest

    def check(self, body: bytes) -> None:
        """Raise `RequestRefused` for a body that killed a worker lately; costs nothing where none has."""
        if not self._convicted:
            return
        digest = xxhash.xxh3_64_hexdigest(body)
        conviction = self._convicted.get(digest)
        if conviction is None:
            return
        left_s = conviction.until_s - self._now_s()
        if left_s <= 0:
            self._convicted.forget(digest)
            return
        message = (
            f"request {digest} {conviction.facts}; it is refused for another {left_s:.0f} s, so that it does not kill more "
            "workers; change it, or see the workers' logs"
        )
        raise RequestRefused(422, message, code=QUERY_OF_DEATH)
