"""Consistent hashing: a ring with virtual nodes, and two independent ones that give each key a pair.

Source: DualMap, section 3.4. Pure; positions depend on names only, so every router agrees. A table of the ring's
equal parts leads to the first anchor of each, so that a lookup costs the same among 8 workers and 1,024.
"""

from __future__ import annotations

from array import array

import numpy as np
import xxhash

VIRTUAL_NODES = 128
"""Anchors of one worker per ring. Chosen: shares then differ by about 1/sqrt(128), 9%; the paper names no
number, and its figures show one."""

_BITS = 64


class HashRing:
    """Maps keys to the next worker clockwise."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._hashes: dict[str, list[int]] = {}
        self._is_stale = False
        self._names: list[str] = []
        self._anchors = array("Q")
        self._owners = array("I")
        self._parts = array("I")
        self._shift = _BITS

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, name: str) -> None:
        """Let a worker join; only keys between its anchors and those before them move, all to it."""
        if name not in self._hashes:
            digest = xxhash.xxh3_64_intdigest
            self._hashes[name] = [
                digest(f"{name}#{node}".encode(), self._seed) for node in range(VIRTUAL_NODES)
            ]
            self._is_stale = True

    def remove(self, name: str) -> None:
        """Let a worker leave; only its own keys move."""
        if self._hashes.pop(name, None) is not None:
            self._is_stale = True

    def find(self, key: int, *, besides: str | None = None) -> str | None:
        """Return the worker for ``key``, or the next one clockwise that is not ``besides``; None: there is none."""
        if self._is_stale:
            self._build()
        anchors, owners, names = self._anchors, self._owners, self._names
        count = len(anchors)
        if count == 0 or (len(names) == 1 and names[0] == besides):
            return None
        point = xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), self._seed)
        at = self._parts[point >> self._shift]
        while at < count and anchors[at] < point:
            at += 1
        name = names[owners[at if at < count else 0]]
        while name == besides:
            at += 1
            name = names[owners[at % count]]
        return name

    def _build(self) -> None:
        """Sort the anchors again, once after any number of joins and leaves."""
        self._is_stale = False
        # In order of names, and stable: two names on one anchor stand in the same order everywhere.
        self._names = sorted(self._hashes)
        points = np.array([self._hashes[name] for name in self._names], dtype=np.uint64).reshape(-1)
        order = np.argsort(points, kind="stable")
        points = points[order]
        owners = (order // VIRTUAL_NODES).astype(np.uint32)
        bits = max(1, len(points).bit_length())
        self._shift = _BITS - bits
        parts = np.arange(1 << bits, dtype=np.uint64) << np.uint64(self._shift)
        self._anchors = array("Q", points.tobytes())
        self._owners = array("I", owners.tobytes())
        self._parts = array("I", np.searchsorted(points, parts).astype(np.uint32).tobytes())


class DualRing:
    """Two rings with independent hashes."""

    def __init__(self) -> None:
        self._first = HashRing(seed=1)
        self._second = HashRing(seed=2)

    def add(self, name: str) -> None:
        """Let a worker join both rings."""
        self._first.add(name)
        self._second.add(name)

    def remove(self, name: str) -> None:
        """Let a worker leave both rings."""
        self._first.remove(name)
        self._second.remove(name)

    def pair(self, key: int) -> tuple[str, ...]:
        """Return the key's two distinct candidates; one if there is only one worker, none without any.

        Where both rings name the same worker, the second candidate is the next one on the second ring. The
        paper takes the next worker number instead (its equation 5), which remaps when numbers shift.
        """
        first = self._first.find(key)
        if first is None:
            return ()
        second = self._second.find(key, besides=first)
        return (first,) if second is None else (first, second)
