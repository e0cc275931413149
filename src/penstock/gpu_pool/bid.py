"""A graph's bid: its wanted replicas in order of need, and the part of them that a grant covers. Pure.

The planner uses it by role, and the operator by service, so that both select the same replicas for a grant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

K = TypeVar("K")

WANTS_S: Final = 60.0
"""Seconds after which an unchanged bid (wanted replicas of a graph) is confirmed again; longer intervals mean fewer writes. Chosen."""
WANTS_VALID_S: Final = 180.0
"""Seconds after which a bid (wanted replicas) that its planner has not confirmed expires. Chosen: three times `WANTS_S`, 60 s."""


@dataclass(frozen=True, slots=True)
class RoleBid:
    """Replicas that one role or one service wants, as its part of the graph's bid for GPUs of a pool.

    Attributes:
        replicas: Number of replicas wanted, >= 0.
        floor: Minimum number of replicas that the planner keeps. Replicas up to the floors of all roles precede all other replicas.
        gpus: GPUs per replica, >= 0.
        is_prefill: Whether it is the prefill role. If two roles have the same fraction of their replicas, the other role comes first, since
            a full decode pool discards computed prompts.
    """

    replicas: int
    floor: int
    gpus: int
    is_prefill: bool = False


def by_need(bids: Mapping[K, RoleBid]) -> tuple[K, ...]:
    """Return the role or service of each wanted replica, the most urgent replica first.

    Replicas up to the floors (the minimum numbers that the planner keeps) come first. Each further replica is one of the role or service
    that has the lowest fraction of its wanted replicas so far.

    Args:
        bids: Wanted replicas by role or by service.
    """
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


def replicas_within(bids: Mapping[K, RoleBid], gpus: int) -> dict[K, int]:
    """Return the number of replicas, by role or service, whose GPUs fit into ``gpus``: those of the most urgent wanted replicas.

    Args:
        bids: Wanted replicas by role or by service.
        gpus: Maximum GPUs that all the replicas may hold together (the grant of a GPU pool).
    """
    have, remaining = dict.fromkeys(bids, 0), gpus
    for key in by_need(bids):
        if bids[key].gpus > remaining:
            break
        remaining -= bids[key].gpus
        have[key] += 1
    return have


def sizes(bids: Mapping[K, RoleBid]) -> tuple[int, ...]:
    """Return the GPU count of each wanted replica of all roles or services, the most urgent first; replicas without GPUs are left out.

    Args:
        bids: Wanted replicas by role or by service.
    """
    return tuple(bids[key].gpus for key in by_need(bids) if bids[key].gpus)
