"""Which router of a graph picks: a pure function of what the routers tell of themselves.

The oldest router that a majority hears claims the next term, a fencing number that only grows; the others follow the
claim of the highest term as long as a majority hears its owner. So a younger picker stays when an older router comes back,
and one that was away finds a higher term and steps down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.router.picker.messages import Status


@dataclass(frozen=True, slots=True)
class Leader:
    """The picker that a router believes in.

    Attributes:
        instance: Its name.
        term: Its fencing number, >= 1.
    """

    instance: str
    term: int


def majority(members: int) -> int:
    """Return the least number of routers that is more than half; 1: 1, 2: 2, 3: 2, 4: 3."""
    return members // 2 + 1


def elect(own: Status, heard: Iterable[Status], members: int) -> Leader | None:
    """Return the picker; None: there is none that this router may believe in now.

    Where it is this router itself and ``own`` has no claim yet, it begins the term that is returned.

    Args:
        own: This router.
        heard: The others, as far as they were heard in the last moments.
        members: Routers of the graph, this one included, but for those that are known to be gone; >= 1.
    """
    views = {each.instance: each for each in (*heard, own)}
    voters = [each for each in views.values() if each.instance in own.sees]
    needed = majority(members)

    def is_seen(instance: str) -> bool:
        return sum(instance in each.sees for each in voters) >= needed

    term = max(each.term for each in voters)
    claims = [each for each in voters if each.is_leader and each.term == term and not each.is_stopping]
    for claim in sorted(claims, key=lambda each: (each.since_s, each.instance)):
        if is_seen(claim.instance):
            return Leader(claim.instance, term)
    eligible = [each for each in voters if not each.is_stopping and is_seen(each.instance)]
    oldest = min(eligible, key=lambda each: (each.since_s, each.instance), default=None)
    if oldest is None or oldest.instance != own.instance:
        return None
    return Leader(own.instance, term + 1)
