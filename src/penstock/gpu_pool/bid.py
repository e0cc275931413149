"""What a graph bids for, a replica at a time in order of need, and which of them a grant is for. Pure.

Used by the planner, by roles, and by the operator, by services, so that both find the same replicas within a grant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

K = TypeVar("K")

WANTS_S: Final = 60.0
"""Seconds between two times at which it is noted that a bid stands, so that not every look writes. Chosen."""
WANTS_VALID_S: Final = 180.0
"""For this long a bid counts after its planner last said it. Chosen: three of those."""


@dataclass(frozen=True, slots=True)
class RoleBid:
    """What one role, or one service, bids for.

    Attributes:
        replicas: That it wants, >= 0.
        floor: Replicas that it never goes below while it is served.
        gpus: Of one replica, >= 0.
        is_prefill: Of two that lack the same share, the other one goes first: a full decode pool destroys work.
    """

    replicas: int
    floor: int
    gpus: int
    is_prefill: bool = False


def by_need(bids: Mapping[K, RoleBid]) -> tuple[K, ...]:
    """Return whose replicas are wanted, the most needed first: floors, then of whom the smallest share is there."""
    have = Counter[K]()
    order: list[K] = []

    def need(key: K) -> tuple[bool, float, bool]:
        bid = bids[key]
        return have[key] >= bid.floor, have[key] / bid.replicas, bid.is_prefill

    while lacking := [key for key, bid in bids.items() if have[key] < bid.replicas]:
        key = min(lacking, key=need)
        have[key] += 1
        order.append(key)
    return tuple(order)


def granted(bids: Mapping[K, RoleBid], gpus: int) -> dict[K, int]:
    """Return the replicas of each that a grant is for: the first of the bid that fit together."""
    have, left = dict.fromkeys(bids, 0), gpus
    for key in by_need(bids):
        if bids[key].gpus > left:
            break
        left -= bids[key].gpus
        have[key] += 1
    return have


def sizes(bids: Mapping[K, RoleBid]) -> tuple[int, ...]:
    """Return the GPUs of each replica that is wanted, in order of need; those that need none are left out."""
    return tuple(bids[key].gpus for key in by_need(bids) if bids[key].gpus)
