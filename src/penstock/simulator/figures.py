"""Figures of a run as they are written: six decimals, None where nothing is known. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.simulator.observer import Floats

_DECIMALS = 6


def rounded(value: float | None) -> float | None:
    """Return a figure with six decimals; None stays None."""
    return None if value is None else round(float(value), _DECIMALS)


def ratio(part: float, whole: float) -> float | None:
    """Return a share; None of nothing."""
    return float(part / whole) if whole else None


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known, with six decimals; None where nothing is."""
    known = [value for value in values if value is not None]
    return rounded(float(np.mean(known))) if known else None


def known(values: Floats) -> Floats:
    """Return the values that are numbers."""
    return values[~np.isnan(values)]
