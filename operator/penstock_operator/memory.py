"""What saves memory and work: shared parts of objects, and results that cost more to compute than to keep."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final, Generic, TypeVar

LIMIT: Final = 20_000
"""Parts remembered. Chosen: all that a few hundred graphs have in common, in about five megabytes."""


class InterningPool:
    """Remembers parts of JSON objects by their content."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._parts: dict[Any, Any] = {}

    def intern(self, value: Any) -> Any:
        """Return an equal value made of shared parts, which must not be changed; the input is left as it is."""
        if isinstance(value, float):
            return value  # 0.0 equals -0.0
        # A part is known by the identities of its own parts: those are shared, and live as long as it does.
        made, identity = value, (type(value), value)
        if isinstance(value, dict):
            made = {key: self.intern(each) for key, each in value.items()}
            identity = (dict, (*made, *map(id, made.values())))
        elif isinstance(value, list):
            made = list(map(self.intern, value))
            identity = (list, tuple(map(id, made)))
        if len(self._parts) >= self._limit:
            self._parts.clear()
        return self._parts.setdefault(identity, made)


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """The entries that were used last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the remembered value; None without one."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Remember a value; evict the least recently used one if there are too many."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def forget(self, key: K) -> None:
        """Forget a value."""
        self._entries.pop(key, None)
