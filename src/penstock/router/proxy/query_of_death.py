"""Queries of death: a request that killed a worker is rejected for some time, so that its retries do not kill other workers.

`penstock.router.core.suspects` determines which request did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from penstock.core.lru_cache import LruCache
from penstock.router.proxy.completion import RequestRefused

REFUSED_S = 600.0
"""Time for which such a request is rejected, in simulated seconds. Chosen: longer than clients retry; an engine that was fixed gets
the request again soon."""

REMEMBERED = 1024
"""Chosen: maximum number of rejected bodies, the most recently sent of which are remembered; their hashes take 100 KiB."""

QUERY_OF_DEATH = "query_of_death"


@dataclass(frozen=True, slots=True)
class _Rejection:
    """The time until which a body is rejected, in simulated seconds, and a description for the client."""

    until_s: float
    facts: str


class QueriesOfDeath:
    """The request bodies that one router rejects, because they have crashed workers; only their hashes are stored.

    Args:
        now_s: Returns the current time in simulated seconds.
        most: Maximum number of bodies.
    """

    def __init__(self, now_s: Callable[[], float], *, most: int = REMEMBERED) -> None:
        self._now_s = now_s
        self._rejected: LruCache[str, _Rejection] = LruCache(most)

    def add(self, body: bytes, before: Sequence[str], worker: str) -> str:
        """Reject requests with this body, which has crashed workers, for 10 simulated minutes (`REFUSED_S`); return its hash.

        The log and the message for the client name the body by this hash.

        Args:
            body: Body as the client sent it.
            before: Names of the workers that died while the request ran there together with others.
            worker: Name of the worker on which the request ran alone, and which died then.
        """
        digest = xxhash.xxh3_64_hexdigest(body)
        facts = f"ran on {' and '.join(before)} when they died, then alone on {worker}, which died too"
        self._rejected.put(digest, _Rejection(self._now_s() + REFUSED_S, facts))
        return digest

    def check(self, body: bytes) -> None:
        """Check that no request with the same body has crashed workers within the last 10 simulated minutes.

        ``body`` is the body as the client sent it. Returns nothing if the request may be served.

        Raises:
            RequestRefused: 422, a request with this body has crashed workers, so that requests with it are rejected now.
        """
        if not self._rejected:
            return
        digest = xxhash.xxh3_64_hexdigest(body)
        entry = self._rejected.get(digest)
        if entry is None:
            return
        left_s = entry.until_s - self._now_s()
        if left_s <= 0:
            self._rejected.forget(digest)
            return
        message = (
            f"request {digest} {entry.facts}; it is refused for another {left_s:.0f} s, so that it does not kill more "
            "workers; change it, or see the workers' logs"
        )
        raise RequestRefused(422, message, code=QUERY_OF_DEATH)
