"""Moving queued requests off an overloaded instance, each only to the other candidate of its pair.

Source: DualMap, section 3.3, equation 6, and A.7 for decode-bound instances. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock_router.policy.instance import Instance, Placed
from penstock_router.policy.placer import View

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Move(Generic[T]):
    """One request changes its queue.

    Attributes:
        placed: The request, still as it stands.
        to: Name of the other instance.
        benefit_s: Estimated TTFT there less than here, > 0.
    """

    placed: Placed[T]
    to: str
    benefit_s: float


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


def plan_moves(
    source: Instance[T],
    instances: Mapping[str, Instance[T]],
    view: View,
    *,
    slo_s: float,
    delay_s: Mapping[str, float],
    hit_first: bool,
) -> list[Move[T]]:
    """Return the moves that bring the queue of ``source`` within the SLO, largest benefit first.

    Only requests whose other candidate would serve them sooner and within the SLO move. One round, no chains.

    Args:
        source: The overloaded instance.
        instances: All instances by name.
        view: Estimates.
        slo_s: TTFT aimed for, modelled seconds.
        delay_s: Decode delay by instance; absent is 0.
        hit_first: Order of the queue.
    """
    pace = view.seconds(source, 1)
    if pace is None:
        return []
    source_delay_s = delay_s.get(source.name, 0.0)
    ahead = source.running_tokens + source.others_tokens
    benefits: list[tuple[float, int, Placed[T]]] = []
    pending = {name: each.pending_tokens for name, each in instances.items()}
    for order, placed in enumerate(source.in_order(hit_first=hit_first)):
        ahead += placed.uncached
        other = instances.get(placed.other)
        if other is None:
            continue
        there_s = _there_s(placed, other, view, pending, delay_s)
        benefit_s = source_delay_s + ahead * pace - there_s
        if benefit_s > 0 and there_s < slo_s:
            benefits.append((-benefit_s, order, placed))
    benefits.sort(key=lambda entry: entry[:2])
    moves: list[Move[T]] = []
    for negative_s, _, placed in benefits:
        if source_delay_s + ahead * pace <= slo_s:
            break
        # Earlier moves have filled the target: what was worth moving then may not be now.
        there_s = _there_s(placed, instances[placed.other], view, pending, delay_s)
        if there_s >= slo_s:
            continue
        moves.append(Move(placed, placed.other, -negative_s))
        ahead -= placed.uncached
        pending[placed.other] += placed.other_uncached
    return moves


def _there_s(
    placed: Placed[T],
    other: Instance[T],
    view: View,
    pending: Mapping[str, int],
    delay_s: Mapping[str, float],
) -> float:
    own_s = view.seconds(other, pending[other.name] + placed.other_uncached) or 0.0
    return delay_s.get(other.name, 0.0) + own_s
