"""Consistent hashing: a ring with virtual nodes, and two independent ones that give each key a pair.

Source: DualMap, section 3.4. Pure; positions depend on names only, so every router agrees.
"""

from __future__ import annotations

from bisect import bisect_right, insort

import xxhash

VIRTUAL_NODES = 64
"""Anchors of one instance per ring. Chosen: shares within about a quarter of each other at eight instances;
the paper names no number."""


class HashRing:
    """Maps keys to the next instance clockwise."""

    __slots__ = ("_anchors", "_names", "_owners", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._anchors: list[int] = []
        self._owners: dict[int, str] = {}
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Let an instance join; only keys between its anchors and those before them move, all to it."""
        if name in self._names:
            return
        self._names.add(name)
        for anchor in self._anchors_of(name):
            # Two names on one anchor: the smaller keeps it, whoever came first.
            owner = self._owners.get(anchor)
            if owner is None:
                insort(self._anchors, anchor)
            if owner is None or name < owner:
                self._owners[anchor] = name

    def remove(self, name: str) -> None:
        """Let an instance leave; only its own keys move."""
        if name not in self._names:
            return
        self._names.remove(name)
        for anchor in self._anchors_of(name):
            if self._owners.get(anchor) == name:
                del self._owners[anchor]
        self._anchors = sorted(self._owners)

    def find(self, key: int, *, besides: str | None = None) -> str | None:
        """Return the instance for ``key``, or the next one clockwise that is not ``besides``; None if there is none."""
        anchors = self._anchors
        count = len(anchors)
        start = bisect_right(anchors, xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), self._seed))
        for step in range(count):
            name = self._owners[anchors[(start + step) % count]]
            if name != besides:
                return name
        return None

    def _anchors_of(self, name: str) -> list[int]:
        digest = xxhash.xxh3_64_intdigest
        return [digest(f"{name}#{node}".encode(), self._seed) for node in range(VIRTUAL_NODES)]


class DualRing:
    """Two rings with independent hashes."""

    __slots__ = ("_first", "_second")

    def __init__(self) -> None:
        self._first = HashRing(seed=1)
        self._second = HashRing(seed=2)

    def add(self, name: str) -> None:
        """Let an instance join both rings."""
        self._first.add(name)
        self._second.add(name)

    def remove(self, name: str) -> None:
        """Let an instance leave both rings."""
        self._first.remove(name)
        self._second.remove(name)

    def pair(self, key: int) -> tuple[str, ...]:
        """Return the key's two distinct candidates; one if there is only one instance, none without any.

        Where both rings name the same instance, the second candidate is the next one on the second ring. The
        paper takes the next instance number instead (its equation 5), which remaps when numbers shift.
        """
        first = self._first.find(key)
        if first is None:
            return ()
        second = self._second.find(key, besides=first)
        return (first,) if second is None else (first, second)
