"""Prometheus histograms that count many equal samples at once, with vLLM's bucket boundaries.

A decode step yields one inter-token gap for all its requests, so `observe` takes a count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TRANSFER_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TRANSFER_BYTES = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, … up to ``max_model_len``: vLLM's buckets of token counts."""
    bounds = []
    power = 1
    while power <= max_model_len:
        bounds += [float(digit * power) for digit in (1, 2, 5) if digit * power <= max_model_len]
        power *= 10
    return tuple(bounds)


class Histogram:
    """Counts per bucket; upper bounds are inclusive."""

    __slots__ = ("_heads", "bounds", "counts", "name", "total")

    def __init__(self, name: str, bounds: Sequence[float], labels: str) -> None:
        """Fix name, upper bounds and labels.

        Args:
            name: Metric name.
            bounds: Strictly increasing, +Inf left out.
            labels: Rendered labels without braces, ``engine="0",model_name="m"``.
        """
        self.name = name
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        edges = [*map(repr, map(float, self.bounds)), "+Inf"]
        self._heads = [f'{name}_bucket{{{labels},le="{edge}"}} ' for edge in edges]
        self._heads += [f"{name}_sum{{{labels}}} ", f"{name}_count{{{labels}}} "]

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` samples of ``value``."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def lines(self) -> list[str]:
        """Return the sample lines of the text format."""
        heads = self._heads
        lines = []
        cumulative = 0
        for head, count in zip(heads, self.counts, strict=False):
            cumulative += count
            lines.append(f"{head}{cumulative}")
        lines.append(f"{heads[-2]}{self.total!r}")
        lines.append(f"{heads[-1]}{cumulative}")
        return lines
