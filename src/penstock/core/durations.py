"""Durations as Kubernetes writes them: ``500ms``, ``2s``, ``1h30m``. Manifests and flags read them here. Pure."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

PATTERN: Final = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
"""What the CRDs check too. A subset of what CEL's ``duration()`` reads: no sign, nothing below a millisecond by its unit."""

MAX_CHARS: Final = 32
"""Longest text of a duration. Chosen: enough for every unit with six digits."""

EXAMPLES: Final = "500ms, 2s, 10m or 1h30m"

_UNITS: Final = {"h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_PROBABLY_MILLISECONDS: Final = 10
_CERTAINLY_MILLISECONDS: Final = 1000
"""How a suggestion reads a number without a unit. Chosen: by latency targets, which are rarely above 10 s."""


def seconds_of(text: str) -> float:
    """Return the seconds of a duration.

    Raises:
        ValueError: it is not a duration.
    """
    if len(text) > MAX_CHARS or re.match(PATTERN, text) is None:
        raise ValueError(f"{text!r} is not a duration; write {examples_for(text)}")
    return float(sum(Decimal(number) * _UNITS[unit] for number, unit in _PART.findall(text)))


def duration_text(seconds: float) -> str:
    """Return a number of seconds, 0 or more, as the duration that `seconds_of` reads back exactly."""
    exact = Decimal(repr(float(seconds)))
    for unit in ("h", "m", "s"):
        count = exact / _UNITS[unit]
        if exact and count == count.to_integral_value():
            return f"{int(count)}{unit}"
    if exact > 1:
        return f"{exact.normalize():f}s"
    return f"{(exact / _UNITS['ms']).normalize():f}ms"


def examples_for(value: object) -> str:
    """Return what to write in place of a value that is not a duration."""
    try:
        number = Decimal(str(value))
    except ArithmeticError:
        return f"a number with its unit, such as {EXAMPLES}"
    if isinstance(value, bool) or not number.is_finite() or number <= 0:
        return f"a number with its unit, such as {EXAMPLES}"
    if number >= _CERTAINLY_MILLISECONDS:
        return f"{duration_text(float(number / 1000))} or {number.normalize():f}ms"
    if number >= _PROBABLY_MILLISECONDS:
        return f"{number.normalize():f}ms or {number.normalize():f}s"
    return f"{number.normalize():f}s or {(number * 1000).normalize():f}ms"
