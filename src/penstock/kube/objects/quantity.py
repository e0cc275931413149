"""Parses Kubernetes quantities. Pure."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_SUFFIXES: Final = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{unit: Fraction(10 ** (3 * power)) for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", start=1)},
}
"""Suffixes of apimachinery's resource.Quantity."""

_FORM: Final = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|([numkMGTPE]|[KMGTPE]i)?)")


def quantity(value: object) -> Fraction | None:
    """Return the exact number of a quantity (a number, or text such as ``500m``, ``0.5Gi``, ``1e3``); None if it is not a quantity.

    Digits below nano are rounded up, as the API server does.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = _FORM.fullmatch(str(value).strip())
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    exact = Fraction(number) * (Fraction(10) ** int(exponent) if exponent else _SUFFIXES[suffix or ""])
    nano = exact * 10**9
    return Fraction(-(-nano.numerator // nano.denominator), 10**9)
