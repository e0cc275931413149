"""vLLM's histograms as sample lines of the text format, with the bounds that only a worker's page has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from prometheus_client.utils import floatToGoString

from penstock.core.histogram import BucketCounts

TRANSFER_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TRANSFER_BOUNDS_BYTES: Final = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))
STEP_BOUNDS_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, … up to ``max_model_len``: vLLM's buckets of token counts."""
    bounds = []
    power = 1
    while power <= max_model_len:
        bounds += [float(digit * power) for digit in (1, 2, 5) if digit * power <= max_model_len]
        power *= 10
    return tuple(bounds)


def _edge(bound: float) -> str:
    """Return a bound as vLLM's page spells it, ``2.097152e+06`` above a million."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


class Histogram(BucketCounts):
    """Counts per bucket under one metric name."""

    __slots__ = ("_heads", "name")

    def __init__(self, name: str, bounds: Sequence[float], labels: str) -> None:
        """Fix name, upper bounds and labels.

        Args:
            name: Metric name.
            bounds: Strictly increasing, +Inf left out.
            labels: Rendered labels without braces, ``engine="0",model_name="m"``.
        """
        super().__init__(bounds)
        self.name = name
        edges = [_edge(edge) for edge in (*self.bounds, math.inf)]
        self._heads = [f'{name}_bucket{{{labels},le="{edge}"}} ' for edge in edges]
        self._heads += [f"{name}_sum{{{labels}}} ", f"{name}_count{{{labels}}} "]

    def lines(self) -> list[str]:
        """Return the sample lines of the text format."""
        counts = self.cumulative()
        values = [*counts, repr(self.total), counts[-1]]
        return [f"{head}{value}" for head, value in zip(self._heads, values, strict=True)]
