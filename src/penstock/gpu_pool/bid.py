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
"""Seconds after which an unchanged bid is confirmed again in the graph's status; longer intervals mean fewer writes. Chosen."""
WANTS_VALID_S: Final = 180.0
"""Seconds after which a bid that its planner has not confirmed expires. Chosen: three times `WANTS_S`."""


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
    """Return one key per wanted replica, the most urgent first.

    Replicas up to the floors (the minimum numbers that the planner keeps) come first. Each further replica is one of the role or service
    that has the lowest fraction of its wanted replicas so far.
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
    """Return the number of replicas of each role or service that a grant covers: the most urgent ones whose GPUs fit into the grant.

    Args:
        bids: Bids by role or service.
        gpus: The grant, in GPUs.
    """
    have, left = dict.fromkeys(bids, 0), gpus
    for key in by_need(bids):
        if bids[key].gpus > left:
            break
        left -= bids[key].gpus
        have[key] += 1
    return have


def sizes(bids: Mapping[K, RoleBid]) -> tuple[int, ...]:
    """Return the GPU count of each wanted replica of all roles or services, the most urgent first; replicas without GPUs are left out."""
    return tuple(bids[key].gpus for key in by_need(bids) if bids[key].gpus)
