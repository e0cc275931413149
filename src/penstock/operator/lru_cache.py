"""A bounded memory of results that cost more to compute than to keep for a moment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """The entries that were used last."""

    def __init__(self, limit: int) -> None:
        """Remember nothing yet.

        Args:
            limit: Entries kept, at least 1.
        """
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return what is remembered; None if nothing is, or not any more."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Remember a value; the one that nobody asked for longest goes if there are too many."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def forget(self, key: K) -> None:
        """Drop what is remembered."""
        self._entries.pop(key, None)
