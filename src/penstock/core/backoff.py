"""How long to wait after failures in a row: doubling, up to a limit. Pure; who waits draws its own spread."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 64
"""Chosen: a second doubled this often outlasts any limit, and no number grows without end."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses in seconds: the one after the first failure, and the longest."""

    first_s: float
    limit_s: float

    def pause_s(self, failures: int) -> float:
        """Return the pause after this many failures in a row, one at least."""
        return min(self.first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), self.limit_s)
