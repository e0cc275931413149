"""The Retry-After header of a refusal. Pure."""

from __future__ import annotations

from math import ceil, isfinite
from typing import Final

MAX_RETRY_AFTER_S: Final = 60
"""Chosen: the longest pause of the document's own client; a rate measured just before a scale-up says little of later.
A start-up that was timed is told in full."""


def retry_after(expected_real_s: float | None, *, floor_s: int, is_rate: bool) -> bytes:
    """Return the header's value: whole real seconds until there is expected to be room.

    Args:
        expected_real_s: Real seconds; None: unknown, the floor is told.
        floor_s: ``router.admission.retryAfterSeconds``; a larger one than the bound of 60 s wins over it.
        is_rate: It follows from a measured drain rate, and is bounded.
    """
    if expected_real_s is None or not isfinite(expected_real_s):
        return str(floor_s).encode()
    whole_s = ceil(max(0.0, expected_real_s))
    return str(max(floor_s, min(MAX_RETRY_AFTER_S, whole_s) if is_rate else whole_s)).encode()
