"""Consistent hashing: rings with virtual nodes, and a tree of prefixes that makes their keys longer where traffic is hot.

Source: DualMap, sections 3.2 and 3.4. Positions depend on names only, so every router agrees. Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

VIRTUAL_NODES = 128
"""Anchors of one worker per ring. Chosen: shares then differ by about 1/sqrt(128), 9%; the paper names no
number, and its figures show one."""


class HashRing:
    """Maps keys to the next worker clockwise."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._hashes: dict[str, list[int]] = {}
        self._is_stale = False
        # In order of their positions, and the worker of each.
        self._anchors = array("Q")
        self._owners: list[str] = []

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
        owners = self._owners
        if self._hashes.keys() <= {besides}:
            return None
        point = xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), self._seed)
        at = bisect_left(self._anchors, point) % len(owners)
        while owners[at] == besides:
            at = (at + 1) % len(owners)
        return owners[at]

    def _build(self) -> None:
        self._is_stale = False
        # In order of names, and stable: two names on one anchor stand in the same order everywhere.
        names = sorted(self._hashes)
        points = np.array([self._hashes[name] for name in names], dtype=np.uint64).reshape(-1)
        order = np.argsort(points, kind="stable")
        self._anchors = array("Q", points[order].tobytes())
        self._owners = [names[owner] for owner in (order // VIRTUAL_NODES).tolist()]


def pair(first: HashRing, second: HashRing, key: int) -> tuple[str, ...]:
    """Return a key's two distinct candidates on two rings of the same workers; fewer where there are fewer workers.

    Where both rings name the same worker, the second candidate is the next one on the second ring. The
    paper takes the next worker number instead (its equation 5), which remaps when numbers shift.
    """
    name = first.find(key)
    other = second.find(key, besides=name)
    return tuple(each for each in (name, other) if each is not None)


WINDOW = 200
"""Requests over which traffic is counted. Source: DualMap's artefact."""
_SEEN_PER_INSTANCE = 16
"""Chosen: a share of 1/n must be at least 16 requests to rule out chance, so the window grows with n; at 200
requests and n > 400 a single request would be hot."""
_LEAST_PART = 4
"""Chosen: before a quarter of the window is filled, shares are taken of that quarter, so that the first few
requests do not make everything hot."""
MAX_DEPTH = 64
"""Longest key in blocks. Chosen: 32,768 tokens of a prefix that more than 2/n share; bounds time and memory."""


@dataclass(slots=True, eq=False)
class _Seen:
    """A request in the window: its leading keys, and up to which depth they are counted."""

    keys: tuple[int, ...]
    counted: int = 0


@dataclass(eq=False)
class HotnessTree:
    """Chooses the depth of hash keys, how many blocks of a prompt make its key.

    A prefix that more than 2/n of the requests in the window share is hot: keys of requests below it take one block more,
    so that they spread over more workers. Below 1/n it is cold again.

    The tree is a count per prefix: a chained key names the entire path to it. Only prefixes down to one below the
    deepest hot one are counted. When a prefix turns hot, the window is counted one level deeper at once: otherwise
    a shared prompt of twelve blocks would need twelve times the traffic of one to be distinguished.

    Parameters are those of `DualMap`; the window is longer where there are many workers.
    """

    window: int = WINDOW
    start_depth: int = 1
    hot_share: float | None = None
    cold_share: float | None = None
    _counts: dict[int, int] = field(default_factory=dict, init=False)
    _hot: set[int] = field(default_factory=set, init=False)
    # Requests by the deepest prefix that they are counted in, to be found when that turns hot.
    _ends: dict[int, list[_Seen]] = field(default_factory=dict, init=False)
    _seen: deque[_Seen] = field(default_factory=deque, init=False)

    def __len__(self) -> int:
        return len(self._counts)

    def key(self, chain: Sequence[int], workers: int) -> int:
        """Count a request of chained keys, and return the one at the depth that its traffic calls for.

        With ``workers`` <= 2 no prefix can be hot, and every pair holds all workers anyway.
        """
        if not chain:
            return 0
        window = max(self.window, _SEEN_PER_INSTANCE * workers)
        while len(self._seen) >= window:
            self._forget(self._seen.popleft())
        seen = _Seen(tuple(chain[:MAX_DEPTH]))
        self._seen.append(seen)
        total = max(len(self._seen), window // _LEAST_PART)
        hot = total * (2 / workers if self.hot_share is None else self.hot_share)
        cold = total * (1 / workers if self.cold_share is None else self.cold_share)
        depth = min(self.start_depth, len(seen.keys))
        self._count(seen, depth)
        while self._is_hot(seen.keys[depth - 1], hot, cold) and depth < len(seen.keys):
            depth += 1
            self._count(seen, depth)
        # Not before: it counts itself on its way down.
        self._ends.setdefault(seen.keys[depth - 1], []).append(seen)
        return seen.keys[depth - 1]

    def _count(self, seen: _Seen, depth: int) -> None:
        counts = self._counts
        for key in seen.keys[seen.counted : depth]:
            counts[key] = counts.get(key, 0) + 1
        seen.counted = max(seen.counted, depth)

    def _is_hot(self, key: int, hot: float, cold: float) -> bool:
        count = self._counts[key]
        if key in self._hot:
            if count >= cold:
                return True
            self._hot.remove(key)
        elif count > hot:
            self._hot.add(key)
            self._deepen(key)
            return True
        return False

    def _deepen(self, key: int) -> None:
        stay = []
        for seen in self._ends.pop(key, ()):
            if seen.counted < len(seen.keys):
                self._count(seen, seen.counted + 1)
                self._ends.setdefault(seen.keys[seen.counted - 1], []).append(seen)
            else:
                stay.append(seen)
        if stay:
            self._ends[key] = stay

    def _forget(self, seen: _Seen) -> None:
        counts = self._counts
        last = seen.keys[seen.counted - 1]
        ends = self._ends[last]
        ends.remove(seen)
        if not ends:
            del self._ends[last]
        for key in seen.keys[: seen.counted]:
            left = counts[key] - 1
            if left:
                counts[key] = left
            else:
                del counts[key]
                self._hot.discard(key)
