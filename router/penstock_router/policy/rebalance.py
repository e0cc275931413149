"""Moving queued requests off an overloaded instance, each only to the other candidate of its pair.

Source: DualMap, section 3.3, equation 6, and A.7 for decode-bound instances. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from penstock_router.policy.instance import Instance, Placed
from penstock_router.policy.placer import View

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Move(Generic[T]):
    """One request changes its queue.

    Attributes:
        placed: The request, still as it stands.
        to: Name of the other instance.
        benefit_s: Estimated TTFT here less than there, > 0.
    """

    placed: Placed[T]
    to: str
    benefit_s: float


@dataclass(frozen=True, slots=True)
class Aim:
    """What rebalancing aims for, and what it goes by.

    Attributes:
        slo_s: TTFT, modelled seconds.
        bottleneck_s: See `decode_delay_s`.
        now_s: Modelled seconds.
        hit_first: Order of the queues.
    """

    slo_s: float
    bottleneck_s: float
    now_s: float
    hit_first: bool


def decode_delay_s(instance: Instance[T], view: View, now_s: float, bottleneck_s: float) -> float:
    """Return the delay to add for a decode-bound instance, 0 for others.

    An instance is decode-bound when it has work and has computed no prompt for ``bottleneck_s`` longer than
    what it was given should take; the paper compares the bare interval, which long prompts exceed as well.
    """
    if not instance.running:
        return 0.0
    expected_s = view.seconds(instance, instance.running_tokens) or 0.0
    silent_s = now_s - instance.progress_s
    return silent_s if silent_s - expected_s > bottleneck_s else 0.0


class _Targets(Generic[T]):
    """The instances that requests may move to, each with its delay, pace and what is pending there by now."""

    __slots__ = ("_aim", "_known", "_view", "instances")

    def __init__(self, instances: Mapping[str, Instance[T]], view: View, aim: Aim) -> None:
        self.instances = instances
        self._view = view
        self._aim = aim
        self._known: dict[str, list[float]] = {}

    def of(self, name: str) -> list[float] | None:
        """Return [delay, seconds per token, pending tokens] of an instance; None if it is gone."""
        known = self._known.get(name)
        if known is None:
            instance = self.instances.get(name)
            if instance is None:
                return None
            delay_s = decode_delay_s(instance, self._view, self._aim.now_s, self._aim.bottleneck_s)
            token_s = self._view.seconds(instance, 1) or 0.0
            known = self._known[name] = [delay_s, token_s, float(instance.pending_tokens)]
        return known


def plan_moves(
    source: Instance[T], instances: Mapping[str, Instance[T]], view: View, aim: Aim
) -> list[Move[T]]:
    """Return the moves that bring the queue of ``source`` within the SLO, largest benefit first.

    Only requests whose other candidate would serve them sooner and within the SLO move. One round, no chains.

    Args:
        source: The overloaded instance.
        instances: All instances by name.
        view: Estimates.
        aim: SLO and order.
    """
    token_s = view.seconds(source, 1)
    if token_s is None or not source.queue:
        return []
    delay_s = decode_delay_s(source, view, aim.now_s, aim.bottleneck_s)
    targets = _Targets(instances, view, aim)
    queue = list(source.in_order(hit_first=aim.hit_first))
    own = np.fromiter((placed.uncached for placed in queue), dtype=np.float64, count=len(queue))
    here_s = np.cumsum(own)
    here_s += source.running_tokens + source.others_tokens
    here_s *= token_s
    here_s += delay_s
    order = _by_benefit(queue, here_s.tolist(), targets, aim.slo_s)
    moves: list[Move[T]] = []
    left_s = float(here_s[-1])
    for at in order:
        # With the last of the queue within the SLO, all are.
        if left_s <= aim.slo_s:
            break
        placed = queue[at]
        there = targets.of(placed.other)
        assert there is not None  # noqa: S101 - it was weighed above
        # Earlier moves have filled the target and shortened this queue.
        there_s = there[0] + (there[2] + placed.other_uncached) * there[1]
        benefit_s = float(here_s[at]) - there_s
        if there_s >= aim.slo_s or benefit_s <= 0:
            continue
        moves.append(Move(placed, placed.other, benefit_s))
        saved_s = placed.uncached * token_s
        here_s[at:] -= saved_s
        left_s -= saved_s
        there[2] += placed.other_uncached
    return moves


def _by_benefit(queue: list[Placed[T]], here_s: list[float], targets: _Targets[T], slo_s: float) -> list[int]:
    """Return the places in the queue whose requests may move, the largest benefit first, then the place."""
    benefits = []
    for at, placed in enumerate(queue):
        there = targets.of(placed.other) if placed.other else None
        if there is None:
            continue
        there_s = there[0] + (there[2] + placed.other_uncached) * there[1]
        if there_s < slo_s and there_s < here_s[at]:
            benefits.append((there_s - here_s[at], at))
    benefits.sort()
    return [at for _, at in benefits]
