"""Ends waits for a router that has fallen silent: its node has vanished, or its process is stopped. Pure.

Neither closes a connection, so nothing else would end what waits on one before the request's own limit. Silence is summed
over asks without an answer, so that a pause of this process is not taken for the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

ASK_REAL_S: Final = 1.0
"""Chosen: longest wait for one answer of another router, real seconds; it takes milliseconds."""
FALL_BACK_REAL_S: Final = 2.0
"""Chosen: silence after which a request is decided elsewhere; shorter pauses are a busy machine's."""
BREAK_REAL_S: Final = 10.0
"""Chosen: silence after which a stream that has begun is broken; nobody can continue it, so pauses are borne longer."""
_INTERVALS: Final = 5
"""Chosen: asks that a silence lasts at least, however seldom others are asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """What waits for a router.

    Attributes:
        has_begun: Tells whether the client has had a byte.
        end: Ends the wait; called once at most.
    """

    has_begun: Callable[[], bool]
    end: Callable[[], None]


class SilenceWatch:
    """Sums each router's silence, and ends the waits for it that have lasted too long."""

    def __init__(self, interval_real_s: float) -> None:
        """Start with all heard.

        Args:
            interval_real_s: Between two asks, real seconds > 0.
        """
        self._interval_s = interval_real_s
        self._silent_s: dict[str, float] = {}
        self._waits: dict[str, set[Wait]] = {}

    @property
    def urls(self) -> frozenset[str]:
        """The routers that are waited for."""
        return frozenset(self._waits)

    @contextmanager
    def waiting(self, url: str, wait: Wait) -> Iterator[None]:
        """Hold a wait for a router while the block runs."""
        self._waits.setdefault(url, set()).add(wait)
        try:
            yield
        finally:
            self._drop(url, wait)

    def heard(self, url: str) -> None:
        """Take note of a sign of life: an answer, or a refused or closed connection."""
        self._silent_s.pop(url, None)

    def missed(self, url: str, waited_s: float) -> None:
        """Take note of an ask without an answer, and end the waits that it makes too long.

        Args:
            url: Of the router.
            waited_s: How long it was waited for, real seconds >= 0.
        """
        silent_s = self._silent_s.get(url, 0.0) + min(waited_s, ASK_REAL_S) + self._interval_s
        self._silent_s[url] = silent_s
        for wait in tuple(self._waits.get(url, ())):
            bound_s = BREAK_REAL_S if wait.has_begun() else FALL_BACK_REAL_S
            if silent_s >= max(bound_s, _INTERVALS * self._interval_s):
                self._drop(url, wait)
                wait.end()

    def forget_all_but(self, urls: frozenset[str]) -> None:
        """Forget the silence of routers that are asked no more."""
        for url in self._silent_s.keys() - urls:
            del self._silent_s[url]

    def _drop(self, url: str, wait: Wait) -> None:
        waits = self._waits.get(url)
        if waits is not None:
            waits.discard(wait)
            if not waits:
                del self._waits[url]
