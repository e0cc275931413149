"""How many blocks of a prompt make its hash key: a tree of prefixes that grows where traffic is hot.

Source: DualMap, section 3.2. A prefix that more than 2/n of the requests in the window share is hot: keys of
requests below it take one block more, so that they spread over more workers. Below 1/n it is cold again. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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


class _Seen:
    """A request in the window: its leading keys, and up to which depth they are counted."""

    def __init__(self, keys: tuple[int, ...]) -> None:
        self.keys = keys
        self.counted = 0


class HotnessTree:
    """Chooses the depth of hash keys.

    The tree is a count per prefix: a chained key names the entire path to it. Only prefixes down to one below the
    deepest hot one are counted. When a prefix turns hot, the window is counted one level deeper at once: otherwise
    a shared prompt of twelve blocks would need twelve times the traffic of one to be distinguished.
    """

    def __init__(
        self,
        *,
        window: int = WINDOW,
        start_depth: int = 1,
        hot_share: float | None = None,
        cold_share: float | None = None,
    ) -> None:
        """Start empty.

        Args:
            window: Requests counted, >= 1; more where there are many workers.
            start_depth: Blocks of a key while nothing is hot, >= 1.
            hot_share: Share of the traffic above which a prefix is hot, 0-1; None: 2/n.
            cold_share: Share below which it is cold again, at most ``hot_share``; None: 1/n.
        """
        self._window = window
        self._start_depth = start_depth
        self._hot_share = hot_share
        self._cold_share = cold_share
        self._counts: dict[int, int] = {}
        self._hot: set[int] = set()
        # Requests by the deepest prefix that they are counted in, to be found when that turns hot.
        self._ends: dict[int, list[_Seen]] = {}
        self._seen: deque[_Seen] = deque()

    def __len__(self) -> int:
        """Return the number of prefixes counted."""
        return len(self._counts)

    def key(self, chain: Sequence[int], workers: int) -> int:
        """Count a request and return its hash key: the chained key at the depth its traffic calls for.

        Args:
            chain: Chained prefix keys, one per block; empty for an empty prompt.
            workers: n, >= 1; at n <= 2 no prefix can be hot, and every pair holds all workers anyway.
        """
        if not chain:
            return 0
        window = max(self._window, _SEEN_PER_INSTANCE * workers)
        while len(self._seen) >= window:
            self._forget(self._seen.popleft())
        seen = _Seen(tuple(chain[:MAX_DEPTH]))
        self._seen.append(seen)
        total = max(len(self._seen), window // _LEAST_PART)
        hot = total * (2 / workers if self._hot_share is None else self._hot_share)
        cold = total * (1 / workers if self._cold_share is None else self._cold_share)
        depth = min(self._start_depth, len(seen.keys))
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
        """Count the next block of every request in the window below a prefix that has turned hot."""
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
