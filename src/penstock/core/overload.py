"""When a router counts as overloaded; `penstock doctor` and the live page have the same rule. Pure."""

from __future__ import annotations

from typing import Final

REJECTED_SHARE: Final = 0.05
"""Chosen: a share of rejected requests from which a router is overloaded; below it, it was for a moment."""


def is_overloaded(
    *, arrivals: float, rejected: float, oldest_wait_s: float = 0.0, ttft_slo_s: float = 0.0
) -> bool:
    """Return whether a router rejects too much, or lets a request wait longer than the TTFT aimed for.

    Args:
        arrivals: Requests that came in a period.
        rejected: Those turned away in it; some may have come before.
        oldest_wait_s: Of the request that waits longest now; 0: none.
        ttft_slo_s: The TTFT aimed for; simulated seconds, as the wait.
    """
    return rejected > REJECTED_SHARE * max(arrivals, rejected) or oldest_wait_s > ttft_slo_s
