"""One measured value with how far it can be trusted; every source builds these, every rule reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Quality(StrEnum):
    """How far a value can be trusted."""

    FRESH = "fresh"
    STALE = "stale"
    MISSING = "missing"


RANK = {Quality.FRESH: 2, Quality.STALE: 1, Quality.MISSING: 0}
"""Rank of a reading's quality: of two readings of one value the higher one is used."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A value as a source gave it.

    Attributes:
        quality: Only fresh values enter a mean; stale and missing ones are unknown.
        value: The number; None when missing.
        age_s: Simulated seconds since it was measured; None when missing.
        at_least: The true value may be larger: a backup that cannot see all of it. Good enough to scale up,
            never to scale down.
    """

    quality: Quality
    value: float | None
    age_s: float | None
    source: str
    why: str = ""
    at_least: bool = False

    @property
    def is_known(self) -> bool:
        """Return whether decisions may use the value."""
        return self.quality is Quality.FRESH


def missing(why: str, *, source: str) -> Reading:
    """Return the reading of a value that no source could give."""
    return Reading(Quality.MISSING, None, None, source, why)


def assess(
    value: float | None, *, age_s: float, max_age_s: float, source: str, upper: float | None = None
) -> Reading:
    """Return what a raw number is worth.

    None, NaN, infinite, negative, or above ``upper`` (the largest possible value, closed; None for a count) makes
    it missing. It is stale above ``max_age_s``, closed; ages are simulated seconds, and a clock a little ahead
    (negative) counts as 0.
    """
    flaw = _flaw(value, upper) or ("its age is NaN" if math.isnan(age_s) else None)
    if value is None or flaw:
        return missing(flaw or "not reported", source=source)
    age_s = max(age_s, 0.0)
    if age_s > max_age_s:
        return Reading(Quality.STALE, value, age_s, source, f"{age_s:.0f} s old, more than {max_age_s:g} s")
    return Reading(Quality.FRESH, value, age_s, source)


def _flaw(value: float | None, upper: float | None) -> str | None:
    if value is None:
        return "not reported"
    if math.isnan(value):
        return "value is NaN"
    if math.isinf(value):
        return f"value is {value}"
    if value < 0:
        return f"value {value:g} is negative"
    if upper is not None and value > upper:
        return f"value {value:g} is above {upper:g}"
    return None
