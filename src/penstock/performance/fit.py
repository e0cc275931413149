"""Smooth curves through measured points, to tell a point that none of its neighbours supports; never used to plan.

TTFT = a + b·n + c·n² for prompts of n tokens; ITL = a + b·B + c·K for B requests that hold K tokens together. Both are
fitted to relative errors, so that short prompts and small batches count as much as long and large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.performance.sweep import DecodePoint, PrefillPoint

_TERMS = 3


@dataclass(frozen=True, slots=True)
class Fit:
    """One fitted curve.

    Attributes:
        coefficients: a, b and c, in seconds and seconds per token or request.
        errors: |fitted - measured| / measured of each point.
    """

    coefficients: tuple[float, float, float]
    errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """Mean of the relative errors."""
        return sum(self.errors) / len(self.errors)


def fit_prefill(points: Sequence[PrefillPoint]) -> Fit | None:
    """Return the fit of TTFT; None below four points, through which any curve goes."""
    lengths = np.array([point.prompt_tokens for point in points])
    return _fitted([np.ones_like(lengths), lengths, lengths**2], [point.ttft_s for point in points])


def fit_decode(points: Sequence[DecodePoint]) -> Fit | None:
    """Return the fit of ITL; None below four points, through which any plane goes."""
    batch = np.array([point.concurrency for point in points])
    context = np.array([point.context for point in points])
    return _fitted([np.ones_like(batch), batch, batch * context], [point.itl_s for point in points])


def _fitted(columns: list[NDArray[Any]], measured: list[float]) -> Fit | None:
    if len(measured) <= _TERMS:
        return None
    y = np.array(measured)
    scaled = np.column_stack(columns) / y[:, None]
    solution, *_ = np.linalg.lstsq(scaled, np.ones_like(y), rcond=None)
    errors = np.abs(scaled @ solution - 1)
    a, b, c = (float(each) for each in solution)
    return Fit((a, b, c), tuple(float(each) for each in errors))
