"""Parses and formats durations as Kubernetes writes them: ``500ms``, ``2s``, ``1h30m``; for manifests and flags. Pure."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

PATTERN: Final = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
"""Pattern of a duration, which the CRDs also check. It accepts a subset of CEL's ``duration()``: no sign and no unit
below a millisecond."""

MAX_CHARS: Final = 32
"""Maximum length of a duration's text. Chosen: enough for every unit with six digits."""

EXAMPLES: Final = "500ms, 2s, 10m or 1h30m"
"""Examples of durations for messages."""

_UNITS: Final = {"h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_PROBABLY_MILLISECONDS: Final = 10
_CERTAINLY_MILLISECONDS: Final = 1000
"""Bounds by which a suggestion interprets a number without a unit as seconds or milliseconds. Chosen for latency
targets, which are rarely above 10 s."""


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as ``1h30m``.

    Raises:
        ValueError: The text is not a duration.
    """
    if len(text) > MAX_CHARS or re.match(PATTERN, text) is None:
        raise ValueError(f"{text!r} is not a duration; write {examples_for(text)}")
    return float(sum(Decimal(number) * _UNITS[unit] for number, unit in _PART.findall(text)))


def duration_text(seconds: float) -> str:
    """Return the duration text for a number of seconds, at least 0; `seconds_of` returns exactly that number for it."""
    exact = Decimal(repr(float(seconds)))
    for unit in ("h", "m", "s"):
        count = exact / _UNITS[unit]
        if exact and count == count.to_integral_value():
            return f"{int(count)}{unit}"
    if exact > 1:
        return f"{exact.normalize():f}s"
    return f"{(exact / _UNITS['ms']).normalize():f}ms"


def examples_for(value: object) -> str:
    """Return a suggestion for messages: how to write ``value``, which is not a valid duration, as a duration."""
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
