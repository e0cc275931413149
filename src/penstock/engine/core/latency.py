"""Latency models for prefill and decode, and their combination to the duration of a step; formulas in docs/engine.md.

Profiles create these objects; the engine calls `LatencyModel.step_s`. All times are seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class PrefillModel(Protocol):
    """Model of the TTFT of a prompt that runs alone on a worker."""

    def ttft_s(self, tokens: int) -> float:
        """Return the TTFT in seconds for ``tokens`` >= 0 new tokens without cached context; for 0 tokens it is the fixed overhead."""


class DecodeModel(Protocol):
    """Model of the duration of one decode step."""

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Return the duration in seconds of a step for ``batch`` requests that attend to ``kv_tokens`` in total; at (0, 0) the fixed part."""


@dataclass(frozen=True, slots=True)
class QuadraticPrefill:
    """Fitted prefill model: TTFT = overhead + per_token · n + per_token2 · n².

    The linear term is the matrix work of new tokens, the quadratic one their attention.

    Attributes:
        overhead_s: Fixed part in seconds.
        per_token_s: Seconds per new token.
        per_token2_s: Seconds per squared number of new tokens.
    """

    overhead_s: float
    per_token_s: float
    per_token2_s: float

    def ttft_s(self, tokens: int) -> float:
        """Return the fitted TTFT in seconds for ``tokens`` new tokens."""
        return self.overhead_s + (self.per_token_s + self.per_token2_s * tokens) * tokens


@dataclass(frozen=True, slots=True)
class LinearDecode:
    """Fitted decode model: step = base + per_sequence · B + per_kv_token · K, for B requests with K tokens of KV in total.

    Attributes:
        base_s: Fixed part in seconds.
        per_sequence_s: Seconds per request in the batch.
        per_kv_token_s: Seconds per token of KV.
    """

    base_s: float
    per_sequence_s: float
    per_kv_token_s: float

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Return the fitted duration of a step in seconds."""
        return self.base_s + self.per_sequence_s * batch + self.per_kv_token_s * kv_tokens


@dataclass(frozen=True, slots=True)
class TablePrefill:
    """Measured TTFTs, with linear interpolation between the points.

    Attributes:
        tokens: Prompt lengths, strictly increasing. For shorter prompts the line through the first two points is
            extended.
        measured_s: Measured TTFT of each length, in seconds.
        beyond: Formula whose increase extends the table above the longest prompt.
    """

    tokens: tuple[float, ...]
    measured_s: tuple[float, ...]
    beyond: QuadraticPrefill

    def ttft_s(self, tokens: int) -> float:
        """Return the interpolated TTFT in seconds for ``tokens`` new tokens."""
        last = self.tokens[-1]
        if tokens > last:
            return self.measured_s[-1] + self.beyond.ttft_s(tokens) - self.beyond.ttft_s(int(last))
        return _interpolate(self.tokens, self.measured_s, tokens)


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Measured decode steps of batches whose requests all have the same context length.

    Attributes:
        context: Context length of every request, in tokens.
        batches: Batch sizes, strictly increasing.
        steps_s: Measured duration of a step for each batch size, in seconds.
    """

    context: float
    batches: tuple[float, ...]
    steps_s: tuple[float, ...]

    def step_s(self, batch: float, beyond: LinearDecode) -> float:
        """Return the duration of a step in seconds for ``batch`` requests; outside the measured range it follows the slope of ``beyond``."""
        nearest = min(max(batch, self.batches[0]), self.batches[-1])
        inside = _interpolate(self.batches, self.steps_s, nearest)
        extra = batch - nearest
        return inside + extra * (beyond.per_sequence_s + beyond.per_kv_token_s * self.context)


@dataclass(frozen=True, slots=True)
class TableDecode:
    """Measured decode curves, interpolated at equal total KV.

    At a total of K tokens every curve has a point (B = K / context), and between two curves the duration is linear in
    B. Below the shortest and above the longest context it follows the slope of ``beyond``.

    Attributes:
        curves: Curves by increasing context length.
        beyond: Formula that extends the curves.
    """

    curves: tuple[DecodeCurve, ...]
    beyond: LinearDecode

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Return the interpolated duration of a step in seconds."""
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
    """Computes the duration of a step from its prompt chunks and its decoding requests."""

    def __init__(self, prefill: PrefillModel, decode: DecodeModel) -> None:
        self.prefill = prefill
        self.decode = decode
        self._prefill_fixed_s = prefill.ttft_s(0)
        self._decode_fixed_s = decode.step_s(0, 0)

    def step_s(self, chunks: Sequence[tuple[int, int, bool]], batch: int, kv_tokens: int) -> float:
        """Return a step's duration in seconds.

        step = max(fixed + Σ (TTFT(end) - TTFT(start)) + (decode(B, K) - decode(0, 0)), decode(0, 0))

        ``fixed`` counts only once: TTFT(0) if a prompt begins in this step, decode(0, 0) if any request decodes, and
        the larger one if both. Therefore a prompt that runs alone takes exactly TTFT(n), however it is divided into
        chunks.

        Args:
            chunks: (start, end, begins) of each prompt chunk; start and end in tokens.
            batch: Number of decoding requests, at least 0.
            kv_tokens: Number of tokens that the decoding requests attend to in total, at least ``batch``.
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
