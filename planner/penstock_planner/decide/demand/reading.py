"""One measured value with its quality: fresh, stale or missing. All metric sources return such readings, and all rules use them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Quality(StrEnum):
    """Whether a value can be used.

    Attributes:
        FRESH: Measured recently enough to be used.
        STALE: Older than the maximum age.
        MISSING: Not reported, or not a valid number.
    """

    FRESH = "fresh"
    STALE = "stale"
    MISSING = "missing"


RANK = {Quality.FRESH: 2, Quality.STALE: 1, Quality.MISSING: 0}
"""Rank of each quality. If two sources have a reading of the same value, the reading with the higher rank is used."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A measured value as a source reported it.

    Attributes:
        quality: Quality of the value. Only fresh values enter a mean; stale and missing ones count as unknown.
        value: The number; None if missing.
        age_s: Simulated seconds since it was measured; None if missing.
        source: Name of the source.
        why: Reason why the value is not fresh; empty if it is.
        at_least: Whether the true value can be larger, because the source is a fallback that sees only a part of it,
            such as the queues inside the workers. Such a value can justify a scale-up, but never a scale-down.
    """

    quality: Quality
    value: float | None
    age_s: float | None
    source: str
    why: str = ""
    at_least: bool = False

    @property
    def is_known(self) -> bool:
        """Return whether the value is fresh, so that decisions can use it."""
        return self.quality is Quality.FRESH


def missing(why: str, *, source: str) -> Reading:
    """Return a reading without a value, for a metric that no source could provide.

    Args:
        why: Reason in words.
        source: Name of the source that the reading carries.
    """
    return Reading(Quality.MISSING, None, None, source, why)


def assess(
    value: float | None, *, age_s: float, max_age_s: float, source: str, upper: float | None = None
) -> Reading:
    """Return a raw number as a reading with its quality.

    The reading is missing if the number is None, NaN, infinite, negative or above ``upper``, or if its age is NaN. It
    is stale if it is older than ``max_age_s``. A value of exactly ``upper`` or an age of exactly ``max_age_s`` is
    accepted.

    Args:
        value: The number as reported.
        age_s: Simulated seconds since it was measured. A negative age, from a clock that is slightly ahead, counts as
            0.
        max_age_s: Maximum age of a fresh value, in simulated seconds.
        source: Name of the source.
        upper: Largest valid value; None for a count, which has no limit.
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
