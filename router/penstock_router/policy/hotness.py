"""How many blocks of a prompt make its hash key: a tree of prefixes that grows where traffic is hot.

Source: DualMap, section 3.2. A prefix that more than 2/n of the requests in the window share is hot: keys of
requests below it take one block more, so that they spread over more instances. Below 1/n it is cold again. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

WINDOW = 200
"""Requests over which traffic is counted. Source: DualMap's artefact."""
_LEAST_SEEN = 20
"""Chosen: with fewer requests in the window, shares are taken of this many, so that the first few requests do
not make everything hot."""


class _Node:
    __slots__ = ("children", "count", "hot")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.count = 0
        self.hot = False


class HotnessTree:
    """Chooses the depth of hash keys; bounded by the window: at most one path per request in it."""

    __slots__ = ("_root", "_seen", "_start_depth", "_window")

    def __init__(self, *, window: int = WINDOW, start_depth: int = 1) -> None:
        """Start empty.

        Args:
            window: Requests counted, >= 1.
            start_depth: Blocks of a key while nothing is hot, >= 1.
        """
        self._window = window
        self._start_depth = start_depth
        self._root = _Node()
        self._seen: deque[tuple[int, ...]] = deque()

    def key(self, chain: Sequence[int], instances: int) -> int:
        """Count a request and return its hash key: the chained key at the depth its traffic calls for.

        Args:
            chain: Chained prefix keys, one per block; empty for an empty prompt.
            instances: n, >= 1; at n <= 2 no prefix can be hot, and every pair holds all instances anyway.
        """
        if not chain:
            return 0
        self._forget()
        path = []
        node = self._root
        total = max(len(self._seen) + 1, min(_LEAST_SEEN, self._window))
        for depth, block in enumerate(chain, start=1):
            node = node.children.setdefault(block, _Node())
            node.count += 1
            path.append(block)
            if depth < self._start_depth:
                continue
            share = node.count / total
            node.hot = share > 2 / instances or (node.hot and share >= 1 / instances)
            if not node.hot:
                break
        self._seen.append(tuple(path))
        return path[-1]

    def _forget(self) -> None:
        """Take out the request that leaves the window, and the prefixes that nobody shares any more."""
        if len(self._seen) < self._window:
            return
        path = self._seen.popleft()
        node = self._root
        for block in path:
            child = node.children[block]
            child.count -= 1
            if not child.count:
                del node.children[block]
                return
            node = child
