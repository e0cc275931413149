"""What a placing policy sees and answers: instances with their queues, a request, and its place with the reason.

A placing policy puts each request into one instance's queue when it arrives. To write one, give a class a
``place`` method, and name it in `registry`. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock_router.policy.arrival import Arrival
from penstock_router.policy.instance import Instance, Pace

__all__ = ["Arrival", "Instances", "Place", "Placer", "View", "eligible"]

_CLEARLY = 1.25
"""Chosen: measured paces of equal GPUs differ by less, since prompts differ; mixed GPUs differ by more."""

Instances = Mapping[str, Instance[Any]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes.

    Attributes:
        name: The instance.
        reason: One short phrase for logs.
        other: The other candidate to which it may be moved while it waits; empty if there is none.
        is_hot: Both candidates are overloaded: their queues should be rebalanced.
        uncached: Tokens to compute there, if the policy has looked; None: it has not.
        other_uncached: Tokens to compute at ``other``, likewise.
    """

    name: str
    reason: str
    other: str = ""
    is_hot: bool = False
    uncached: int | None = None
    other_uncached: int | None = None


class Placer(Protocol):
    """Chooses an instance for each request when it arrives."""

    def joined(self, name: str) -> None:
        """Take note of a new instance."""

    def left(self, name: str) -> None:
        """Take note that an instance is gone."""

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:
        """Return the place of a request; ``instances`` is not empty."""


class View:
    """Estimates over all instances, the same for every policy.

    Attributes:
        pace: Of all instances together; stands in for one that has computed little yet.
    """

    __slots__ = ("pace",)

    def __init__(self, tokens_per_s: float | None = None) -> None:
        """Start with a pace, tokens/s, or without one."""
        self.pace = Pace(tokens_per_s)

    def seconds(self, instance: Instance[Any], tokens: int) -> float | None:
        """Return how long an instance computes ``tokens``; None while no pace is known."""
        pace = instance.pace.mixed(self.pace.tokens_per_s)
        return None if pace is None else tokens / pace

    def slowness(self, instance: Instance[Any]) -> float:
        """Return how many times as long as all together an instance takes for a token; 1 where they hardly differ."""
        fleet, own = self.pace.tokens_per_s, instance.pace.tokens_per_s
        if fleet is None or own is None or not instance.pace.is_own:
            return 1.0
        ratio = fleet / own
        return 1.0 if 1 / _CLEARLY <= ratio <= _CLEARLY else ratio

    def ttft_s(self, instance: Instance[Any], uncached: int) -> float | None:
        """Return the estimated TTFT of a request that comes now: pending and own tokens over the pace."""
        return self.seconds(instance, instance.pending_tokens + uncached)


def eligible(instances: Instances, avoid: Collection[str]) -> list[Instance[Any]]:
    """Return the instances besides ``avoid``, or all when that leaves none."""
    if not avoid:
        return list(instances.values())
    rest = [each for name, each in instances.items() if name not in avoid]
    return rest or list(instances.values())
