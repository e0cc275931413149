"""Which workers of a large fleet are worth asking for their cost: those that hold a prompt's beginning, and the idlest.

To ask all of 1,024 workers takes ten times as long as to read the prompt. Three kinds are asked instead: those that were
given prompts of the same beginning, the least loaded as far as they are known, and a few more in turn, by which it becomes
known which are the least loaded. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any, Final

from penstock.router.policy.routing_policy import Arrival, Estimates, WorkerQueues
from penstock.router.policy.worker_queue import WorkerQueue

ALL_UP_TO: Final = 64
"""Chosen: of so many workers all are asked, in some 30 us; nothing is left to chance where it costs little."""
_IDLEST: Final = 16
_IN_TURN: Final = 8
"""Chosen: the whole fleet of 1,024 is seen once in 128 requests, within a second where such a fleet is busy."""
_HOLDERS: Final = 4
"""Chosen: workers remembered of each beginning; the fifth to hold a prefix is found by its load."""
_PREFIXES: Final = 1 << 16
"""Chosen: beginnings remembered, least recently used forgotten; 20 MB at most."""


class Shortlist:
    """Names the workers to ask.

    Of a prompt's beginnings those of 1, 2, 4, 8, ... blocks and the whole are remembered: another prompt that shares n blocks
    with it is found to share more than n/2 of them, and the worker's own index then says how many.
    """

    __slots__ = ("_holders", "_idlest", "_names", "_turn")

    def __init__(self) -> None:
        """Start without knowing anybody."""
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._idlest: list[str] = []
        self._names: list[str] = []
        self._turn = 0

    def worker_joined(self, name: str) -> None:
        """Take a worker into the turn, and among the idlest until its load is known."""
        self._names.append(name)
        self._idlest.append(name)

    def worker_left(self, name: str) -> None:
        """Leave a worker out."""
        self._names.remove(name)
        if name in self._idlest:
            self._idlest.remove(name)

    def candidates(
        self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates
    ) -> list[WorkerQueue[Any]]:
        """Return the workers to ask, each once, besides those to avoid; empty where those are all.

        Args:
            arrival: The request.
            workers: All workers.
            estimates: Estimates.
        """
        idlest = [
            workers[name] for name in dict.fromkeys((*self._idlest, *self._in_turn())) if name in workers
        ]
        # Of so few, sorting all is quicker than a heap.
        idlest.sort(key=lambda each: (estimates.pending_tokens(each), each.index.count))
        del idlest[_IDLEST:]
        self._idlest = [each.name for each in idlest]
        found = {name: workers[name] for name in self._holders_of(arrival) if name in workers}
        for each in idlest:
            found.setdefault(each.name, each)
        return _besides(found.values(), arrival.avoid)

    def chosen(self, arrival: Arrival, name: str) -> None:
        """Remember that a worker will hold a prompt."""
        holders = self._holders
        for key in _beginnings(arrival.chain):
            known = holders.get(key, ())
            if known[:1] != (name,):
                holders[key] = (name, *(each for each in known if each != name))[:_HOLDERS]
            holders.move_to_end(key)
        while len(holders) > _PREFIXES:
            holders.popitem(last=False)

    def _in_turn(self) -> Iterable[str]:
        names, first = self._names, self._turn
        self._turn = (first + _IN_TURN) % max(1, len(names))
        return names[first : first + _IN_TURN]

    def _holders_of(self, arrival: Arrival) -> Iterator[str]:
        known = self._holders
        return chain.from_iterable([known[key] for key in _beginnings(arrival.chain) if key in known])


def _beginnings(keys: tuple[int, ...]) -> list[int]:
    """Return the keys of a prompt's beginnings of 1, 2, 4, ... blocks, and of the whole."""
    found, blocks = [], 1
    while blocks < len(keys):
        found.append(keys[blocks - 1])
        blocks *= 2
    return [*found, *keys[-1:]]


def _besides(found: Iterable[WorkerQueue[Any]], avoid: Collection[str]) -> list[WorkerQueue[Any]]:
    return [each for each in found if each.name not in avoid] if avoid else list(found)
