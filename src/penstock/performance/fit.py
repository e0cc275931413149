"""Smooth curves through measured points, to tell a point that none of its neighbours supports; never used to plan.

TTFT = a + b·n + c·n² for prompts of n tokens; ITL = a + b·B + c·K for B requests that hold K tokens together. Both are
fitted to relative errors, so that short prompts and small batches count as much as long and large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.performance.sweep import DecodePoint, PrefillPoint

_TERMS = 3


def prefill_errors(points: Sequence[PrefillPoint]) -> list[float]:
    """Return |fitted - measured| / measured of each TTFT; 0 below four points, through which any curve goes."""
    lengths = np.array([point.prompt_tokens for point in points])
    return _errors([np.ones_like(lengths), lengths, lengths**2], [point.ttft_s for point in points])


def decode_errors(points: Sequence[DecodePoint]) -> list[float]:
    """Return |fitted - measured| / measured of each ITL; 0 below four points, through which any plane goes."""
    batch = np.array([point.concurrency for point in points])
    context = np.array([point.context for point in points])
    return _errors([np.ones_like(batch), batch, batch * context], [point.itl_s for point in points])


def _errors(columns: list[NDArray[Any]], measured: list[float]) -> list[float]:
    if len(measured) <= _TERMS:
        return [0.0] * len(measured)
    y = np.array(measured)
    scaled = np.column_stack(columns) / y[:, None]
    solution, *_ = np.linalg.lstsq(scaled, np.ones_like(y), rcond=None)
    return [float(each) for each in np.abs(scaled @ solution - 1)]
