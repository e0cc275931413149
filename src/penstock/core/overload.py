"""Decides when a router counts as overloaded; used by `penstock doctor` and the live page. Pure."""

from __future__ import annotations

from typing import Final

REJECTED_SHARE: Final = 0.05
"""Fraction of rejected requests above which a router counts as overloaded. Chosen: lower values also result from
short bursts."""


def is_overloaded(
    *, arrivals: float, rejected: float, oldest_wait_s: float = 0.0, ttft_slo_s: float = 0.0
) -> bool:
    """Return whether a router rejects too many requests, or lets one wait longer than the TTFT target.

    Args:
        arrivals: Number of requests that arrived in a period.
        rejected: Number of requests rejected in the same period; some may have arrived before the period.
        oldest_wait_s: Current wait of the longest-waiting request, in simulated seconds; 0 if none waits.
        ttft_slo_s: TTFT target in simulated seconds; if it is 0, any wait is too long.
    """
    return rejected > REJECTED_SHARE * max(arrivals, rejected) or oldest_wait_s > ttft_slo_s
