"""How long a step takes: prefill and decode models and their composition; formulas in docs/engine.md.

Profiles build these objects; the engine calls `LatencyModel.step_s`. All times in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class PrefillModel(Protocol):
    """Time to the first token of one prompt alone on the worker."""

    def ttft_s(self, tokens: int) -> float:
        """Return TTFT for ``tokens`` >= 0 new tokens without context; at 0 the fixed overhead."""


class DecodeModel(Protocol):
    """Time of one decode step."""

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Return the step for ``batch`` requests attending to ``kv_tokens``; at (0, 0) the fixed part."""


@dataclass(frozen=True, slots=True)
class QuadraticPrefill:
    """TTFT = overhead + per_token · n + per_token2 · n².

    The linear term is the matrix work of new tokens, the quadratic one their attention.
    """

    overhead_s: float
    per_token_s: float
    per_token2_s: float

    def ttft_s(self, tokens: int) -> float:
        """Return the fitted TTFT in seconds."""
        return self.overhead_s + (self.per_token_s + self.per_token2_s * tokens) * tokens


@dataclass(frozen=True, slots=True)
class LinearDecode:
    """Step = base + per_sequence · B + per_kv_token · K."""

    base_s: float
    per_sequence_s: float
    per_kv_token_s: float

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Return the fitted step in seconds."""
        return self.base_s + self.per_sequence_s * batch + self.per_kv_token_s * kv_tokens


@dataclass(frozen=True, slots=True)
class TablePrefill:
    """Measured TTFT in seconds, linear between points, extended below by the first segment, above along ``beyond``."""

    tokens: tuple[float, ...]
    measured_s: tuple[float, ...]
    beyond: QuadraticPrefill

    def ttft_s(self, tokens: int) -> float:
        """Return the interpolated TTFT in seconds."""
        last = self.tokens[-1]
        if tokens > last:
            return self.measured_s[-1] + self.beyond.ttft_s(tokens) - self.beyond.ttft_s(int(last))
        return _interpolate(self.tokens, self.measured_s, tokens)


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Measured steps, in seconds, of batches whose requests all hold ``context`` tokens; ``batches`` increase strictly."""

    context: float
    batches: tuple[float, ...]
    steps_s: tuple[float, ...]

    def step_s(self, batch: float, beyond: LinearDecode) -> float:
        """Return the step at ``batch``; outside the measured range it continues the slope of ``beyond``."""
        nearest = min(max(batch, self.batches[0]), self.batches[-1])
        inside = _interpolate(self.batches, self.steps_s, nearest)
        extra = batch - nearest
        return inside + extra * (beyond.per_sequence_s + beyond.per_kv_token_s * self.context)


@dataclass(frozen=True, slots=True)
class TableDecode:
    """Measured decode curves, joined at equal total KV.

    At a given K every curve has a point (B = K / context), and between two curves the step is linear in B.
    Beyond the shortest and longest context the step continues the slope of ``beyond``.
    """

    curves: tuple[DecodeCurve, ...]
    beyond: LinearDecode

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Return the interpolated step in seconds, never less than its fixed part."""
        curves = self.curves
        context = kv_tokens / batch if batch else curves[0].context
        at = bisect_left(curves, context, key=lambda curve: curve.context)
        if at in {0, len(curves)}:
            curve = curves[min(at, len(curves) - 1)]
            on_curve = kv_tokens / curve.context
            return curve.step_s(on_curve, self.beyond) + (batch - on_curve) * self.beyond.per_sequence_s
        short, long = curves[at - 1], curves[at]
        batch_short, batch_long = kv_tokens / short.context, kv_tokens / long.context
        weight = (batch - batch_long) / (batch_short - batch_long)
        return weight * short.step_s(batch_short, self.beyond) + (1 - weight) * long.step_s(
            batch_long, self.beyond
        )


class LatencyModel:
    """Composes a step out of prompt chunks and decodes."""

    def __init__(self, prefill: PrefillModel, decode: DecodeModel) -> None:
        self.prefill = prefill
        self.decode = decode
        self._prefill_fixed_s = prefill.ttft_s(0)
        self._decode_fixed_s = decode.step_s(0, 0)

    def step_s(self, chunks: Sequence[tuple[int, int, bool]], batch: int, kv_tokens: int) -> float:
        """Return a step's duration in seconds.

        step = max(fixed + Σ (TTFT(end) - TTFT(start)) + (decode(B, K) - decode(0, 0)), decode(0, 0))

        ``fixed`` is paid once: TTFT(0) if a prompt begins in this step, decode(0, 0) if it decodes, the larger one if both. One
        prompt alone therefore takes exactly TTFT(n), however it is chunked.

        Args:
            chunks: (start, end, begins) of each prompt chunk, in tokens.
            batch: Decoding requests, >= 0.
            kv_tokens: Tokens that they attend to, >= batch.
        """
        if not chunks:
            return self.decode.step_s(batch, kv_tokens)
        fixed_s = 0.0
        variable_s = 0.0
        if batch:
            fixed_s = self._decode_fixed_s
            variable_s = self.decode.step_s(batch, kv_tokens) - fixed_s
        ttft_s = self.prefill.ttft_s
        for start, end, begins in chunks:
            variable_s += ttft_s(end) - ttft_s(start)
            if begins:
                fixed_s = max(fixed_s, self._prefill_fixed_s)
        return max(fixed_s + variable_s, self._decode_fixed_s)


def _interpolate(xs: tuple[float, ...], ys: tuple[float, ...], x: float) -> float:
    if len(xs) == 1:
        return ys[0]
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
