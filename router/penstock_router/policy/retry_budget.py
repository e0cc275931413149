"""How many retries a router may add to its traffic, so that a failing fleet is not buried under them."""

from __future__ import annotations

_WINDOW_S = 10.0
"""Chosen: the floor may be saved up over this many modelled seconds, Finagle's window for its budgets."""
_REMEMBERED_REQUESTS = 1000
"""Chosen: a worker that dies with a full batch (max_num_seqs is 256 by default) can be retried elsewhere
at a fraction of 0.2-0.3, and traffic of the past buys no more than this many requests' worth."""


class RetryBudget:
    """Two token buckets: every request pays a fraction of a retry in, and every second a floor.

    Over a long time retries are at most ``fraction`` of the requests plus ``min_per_s`` a second.
    """

    __slots__ = ("_earned", "_floor", "_fraction", "_min_per_s", "_seen_s")

    def __init__(self, *, fraction: float, min_per_s: float, now_s: float) -> None:
        """Start with the floor full.

        Args:
            fraction: Retries per request, 0-1.
            min_per_s: Retries per modelled second whatever the traffic, >= 0.
            now_s: Modelled seconds.
        """
        self._fraction = fraction
        self._min_per_s = min_per_s
        self._earned = 0.0
        self._floor = min_per_s * _WINDOW_S
        self._seen_s = now_s

    def request_arrived(self) -> None:
        """Pay in for one request (not for its retries)."""
        self._earned = min(self._earned + self._fraction, self._fraction * _REMEMBERED_REQUESTS)

    def take(self, now_s: float) -> bool:
        """Take one retry out; False when there is none."""
        saved = self._floor + max(0.0, now_s - self._seen_s) * self._min_per_s
        self._floor = min(saved, self._min_per_s * _WINDOW_S)
        self._seen_s = now_s
        if self._earned >= 1:
            self._earned -= 1
            return True
        if self._floor >= 1:
            self._floor -= 1
            return True
        return False
