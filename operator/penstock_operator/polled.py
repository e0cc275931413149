"""What is read again and again, kept for a while; used by the readers of a pool's nodes and quotas."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Polled(Generic[T]):
    """The newest reading of each key."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, int, T]] = {}

    async def get(
        self, key: str, read: Callable[[T | None], Awaitable[T]], *, fresh_s: float, version: int = 0
    ) -> T:
        """Return what is known of a key, read again where that is old.

        Args:
            key: Of what is read.
            read: Reads it; its argument is what was known, None at first.
            fresh_s: For so long a reading counts, seconds.
            version: Of the question; another one is read at once.
        """
        now_s, before = time.monotonic(), self._read.get(key)
        if before is not None and before[1] == version and now_s - before[0] < fresh_s:
            return before[2]
        found = await read(None if before is None else before[2])
        self._read[key] = (now_s, version, found)
        return found

    def forget(self, key: str) -> None:
        """Forget a key."""
        self._read.pop(key, None)
