"""How fast load leaves, from what has left: tokens per second over the last seconds. Pure."""

from __future__ import annotations

from math import exp

_WINDOW_S = 10.0
"""Chosen: some tens of answers of a busy worker; older ones count for a third and less."""


class DrainRate:
    """Tokens per second, exponentially weighted; the weights of what was not yet watched are left out."""

    __slots__ = ("_seen_s", "_since_s", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._since_s: float | None = None
        self._seen_s = 0.0

    def drained(self, tokens: float, now_s: float) -> None:
        """Count tokens that have left just now, simulated seconds; a clock that steps back counts as standing."""
        if self._since_s is None:
            self._since_s = self._seen_s = now_s
        passed_s = max(0.0, now_s - self._seen_s)
        self._tokens = self._tokens * exp(-passed_s / _WINDOW_S) + tokens
        self._seen_s = max(self._seen_s, now_s)

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return the rate; None while nothing tells one."""
        if self._since_s is None or now_s <= self._since_s:
            return None
        kept = self._tokens * exp(-max(0.0, now_s - self._seen_s) / _WINDOW_S)
        watched_s = _WINDOW_S * (1.0 - exp(-(now_s - self._since_s) / _WINDOW_S))
        rate = kept / watched_s
        return rate if rate > 0 else None
