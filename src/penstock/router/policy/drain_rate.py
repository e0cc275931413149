"""How fast one worker gets work done: tokens per second of work, over the last of them. Pure."""

from __future__ import annotations

from math import exp

_WINDOW_S = 10.0
"""Chosen: some tens of prompts; older ones count for a third and less. Seconds of work of one worker."""


class DrainRate:
    """Tokens per second of a worker at work, exponentially weighted.

    Time in which no worker has anything to do says nothing, so that light traffic measures what the workers can and not
    what came. A clock that steps back counts as standing.
    """

    __slots__ = ("_seen_s", "_tokens", "_worked_s", "_workers")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._worked_s = 0.0
        self._workers = 0
        self._seen_s = 0.0

    def at_work(self, workers: int, now_s: float) -> None:
        """Set how many workers have work from now on, simulated seconds."""
        worked_s = self._workers * max(0.0, now_s - self._seen_s)
        kept = exp(-worked_s / _WINDOW_S)
        self._tokens *= kept
        self._worked_s = self._worked_s * kept + _WINDOW_S * (1.0 - kept)
        self._seen_s = max(self._seen_s, now_s)
        self._workers = workers

    def drained(self, tokens: float, now_s: float) -> None:
        """Count tokens that have left just now."""
        self.at_work(self._workers, now_s)
        self._tokens += tokens

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return one worker's rate; None while nothing tells one."""
        self.at_work(self._workers, now_s)
        return self._tokens / self._worked_s if self._tokens > 0 and self._worked_s > 0 else None
