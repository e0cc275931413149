"""Bounds for the planner's load mode, by the formulas of Dynamo's planner document."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = 0.1
"""The document's floor of every bound."""
_QUEUE_UP, _QUEUE_DOWN = 1.2, 0.8
_KV_MARGIN = 0.2
_DIGITS = 2
"""Bounds are printed with two digits, and written to the graph as they are printed."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """An upper bound, above which a pool grows, and a lower one, below which it shrinks.

    Attributes:
        upper: Greater than ``lower``.
        lower: At least 0.1.
        is_spread: The formulas gave one number for both, and they were set 0.1 apart: a planner whose bounds are equal
            refuses to run.
    """

    upper: float
    lower: float
    is_spread: bool = False


def queue_bounds(ttft_target_s: float, ttft_s: float) -> Bounds:
    """Return the bounds of the prefill queue, in requests.

    A queue of q prompts makes the next one wait q times its TTFT. Upper: max(0.1, 1.2 · target / TTFT - 1); lower: the
    same with 0.8.

    Example: target 50 ms, TTFT 48.37 ms: 0.24 and 0.10.

    Args:
        ttft_target_s: Seconds, > 0.
        ttft_s: Of a prompt that does not wait, seconds, > 0.
    """
    ratio = ttft_target_s / ttft_s
    return _spread(max(LEAST, _QUEUE_UP * ratio - 1), max(LEAST, _QUEUE_DOWN * ratio - 1))


def kv_bounds(kv_usage: float) -> Bounds:
    """Return the bounds of decode's KV usage: the chosen point's ± 0.2, clipped to 0.1 to 1.

    Args:
        kv_usage: requests · (ISL + OSL / 2) / tokens of the KV cache, >= 0.
    """
    return _spread(_clipped(kv_usage + _KV_MARGIN), _clipped(kv_usage - _KV_MARGIN), most=1.0)


def _clipped(value: float) -> float:
    return min(1.0, max(LEAST, value))


def _spread(upper: float, lower: float, most: float = math.inf) -> Bounds:
    upper, lower = round(upper, _DIGITS), round(lower, _DIGITS)
    if upper > lower:
        return Bounds(upper, lower)
    upper = min(most, lower + LEAST)
    return Bounds(round(upper, _DIGITS), round(upper - LEAST, _DIGITS), is_spread=True)
