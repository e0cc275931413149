"""Consistent hashing: rings with virtual nodes, and a tree of prefixes that makes their keys longer where traffic is hot.

Source: DualMap, sections 3.2 and 3.4. Positions depend only on names, so that all routers agree. Pure.
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
"""Number of virtual nodes of one worker per ring. Chosen: the workers' shares then differ by about 1/sqrt(128), 9%; the paper names
no number, and its figures show one virtual node."""


class HashRing:
    """A consistent-hash ring: maps a key to the next worker clockwise.

    Each worker has 128 positions on the ring (virtual nodes). Rings with different ``seed`` have different positions, so
    that two rings map a key to two workers that are independent of each other.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._hashes: dict[str, list[int]] = {}
        self._is_stale = False
        # Positions of the virtual nodes in ascending order, and the worker of each.
        self._anchors = array("Q")
        self._owners: list[str] = []

    def add(self, name: str) -> None:
        """Add a worker to the ring; about an equal part of every other worker's keys is then mapped to the new worker.

        The other keys keep their worker. Does nothing if the worker is on the ring already.
        """
        if name not in self._hashes:
            digest = xxhash.xxh3_64_intdigest
            self._hashes[name] = [
                digest(f"{name}#{node}".encode(), self._seed) for node in range(VIRTUAL_NODES)
            ]
            self._is_stale = True

    def remove(self, name: str) -> None:
        """Remove a worker from the ring; only the keys that it had are mapped to others. Does nothing if it is not on the ring."""
        if self._hashes.pop(name, None) is not None:
            self._is_stale = True

    def find(self, key: int, *, excluded: str | None = None) -> str | None:
        """Return the worker to which the ring maps ``key``; None if the ring is empty.

        The worker ``excluded`` is left out: if the key is mapped to it, the next other worker clockwise is returned, or
        None if there is none.
        """
        if self._is_stale:
            self._build()
        owners = self._owners
        if self._hashes.keys() <= {excluded}:
            return None
        point = xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), self._seed)
        at = bisect_left(self._anchors, point) % len(owners)
        while owners[at] == excluded:
            at = (at + 1) % len(owners)
        return owners[at]

    def _build(self) -> None:
        self._is_stale = False
        # Sorted by name first, and the sort by position is stable, so that two names at one position have the same order in
        # all routers.
        names = sorted(self._hashes)
        points = np.array([self._hashes[name] for name in names], dtype=np.uint64).reshape(-1)
        order = np.argsort(points, kind="stable")
        self._anchors = array("Q", points[order].tobytes())
        self._owners = [names[owner] for owner in (order // VIRTUAL_NODES).tolist()]


def pair(first: HashRing, second: HashRing, key: int) -> tuple[str, ...]:
    """Return the names of the two candidate workers of ``key``: that of the ring ``first``, then that of the ring ``second``.

    They differ; if there are fewer than two workers, the result has fewer names. Both rings must contain the same workers.

    If both rings map the key to the same worker, the second candidate is the next worker on the second ring. DualMap's
    paper uses the next worker number instead (its equation 5), which remaps keys when numbers shift.
    """
    name = first.find(key)
    other = second.find(key, excluded=name)
    return tuple(each for each in (name, other) if each is not None)


WINDOW = 200
"""Number of recent requests over which traffic is counted. Source: DualMap's artefact."""
_SEEN_PER_INSTANCE = 16
"""Chosen: a fraction of 1/n must be at least 16 requests to rule out chance, so the window grows with the number n of workers; with
200 requests and n > 400 a single request would make a prefix hot."""
_MIN_PART = 4
"""Chosen: before a quarter of the window is filled, fractions are of that quarter, so that the first few requests do not make every
prefix hot."""
MAX_DEPTH = 64
"""Maximum number of blocks in a key. Chosen: 32,768 tokens of a prefix that more than 2/n of the requests share; bounds time and
memory."""


@dataclass(slots=True, eq=False)
class _Seen:
    """A request in the window: its leading keys, and the number of them that are counted."""

    keys: tuple[int, ...]
    counted: int = 0


@dataclass(eq=False)
class HotnessTree:
    """Chooses, for each request, how many blocks of its prompt make the key by which hash rings choose workers.

    The window is the recent requests that are counted. A prefix that more than 2/n of them share (n is the number of
    workers) is hot: keys of requests with this prefix use one block more, so that they are spread over more workers.
    Below 1/n it is no longer hot.

    The tree is a count per prefix, because a chained key identifies the entire path to it. Prefixes are counted down to one
    block below the deepest hot one. When a prefix becomes hot, the requests in the window are counted one block deeper at
    once: otherwise a shared prompt of twelve blocks would need twelve times the traffic to be distinguished.

    Attributes:
        window: Minimum number of recent requests that are counted; with n workers at least 16 n are.
        start_depth: Number of blocks of a key while no prefix is hot.
        hot_share: Fraction of the requests in the window above which a prefix is hot, 0-1; None uses 2/n.
        cold_share: Fraction of the requests in the window below which a prefix is no longer hot, 0-1; None uses 1/n.
    """

    window: int = WINDOW
    start_depth: int = 1
    hot_share: float | None = None
    cold_share: float | None = None
    _counts: dict[int, int] = field(default_factory=dict, init=False)
    _hot: set[int] = field(default_factory=set, init=False)
    # Requests by the deepest prefix in which they are counted, to find them when that prefix becomes hot.
    _ends: dict[int, list[_Seen]] = field(default_factory=dict, init=False)
    _seen: deque[_Seen] = field(default_factory=deque, init=False)

    def __len__(self) -> int:
        return len(self._counts)

    def key(self, chain: Sequence[int], workers: int) -> int:
        """Count a request with the prefix keys ``chain``, and return the key of as many of its blocks as the traffic requires.

        A prefix that many recent requests share needs more blocks, so that these requests are spread over more of the
        ``workers`` workers. Returns 0 if ``chain`` is empty. With two or fewer ``workers`` no prefix can be hot, because
        each key's candidates are all workers anyway.
        """
        if not chain:
            return 0
        window = max(self.window, _SEEN_PER_INSTANCE * workers)
        while len(self._seen) >= window:
            self._forget(self._seen.popleft())
        seen = _Seen(tuple(chain[:MAX_DEPTH]))
        self._seen.append(seen)
        total = max(len(self._seen), window // _MIN_PART)
        hot = total * (2 / workers if self.hot_share is None else self.hot_share)
        cold = total * (1 / workers if self.cold_share is None else self.cold_share)
        depth = min(self.start_depth, len(seen.keys))
        self._count(seen, depth)
        while self._is_hot(seen.keys[depth - 1], hot, cold) and depth < len(seen.keys):
            depth += 1
            self._count(seen, depth)
        # Added only now, because `_count` has already counted this request on each level.
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
