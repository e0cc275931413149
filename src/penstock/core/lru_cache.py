"""A cache with a maximum size that evicts the least recently used entry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Cache of at most ``limit`` entries; the least recently used one is evicted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value of ``key`` and mark it as used; None if there is none."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Store the value of ``key``, replacing an earlier one; if there are then more than ``limit``, evict the least recently used."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def forget(self, key: K) -> None:
        """Remove the value of ``key``; does nothing if there is none."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        """Remove all values."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
