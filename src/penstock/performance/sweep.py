"""What was measured, point by point, before anything is interpolated: one `EngineSweep` per engine size.

A profiler fills it, Dynamo's files are read into it, and tables, checks and recommendations are made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.performance.profile import DecodeTable, PerformanceProfile, PrefillTable, interpolated


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """TTFT of one prompt alone on the engine, none of it cached.

    Attributes:
        prompt_tokens: Its length, > 0.
        ttft_s: Seconds, > 0.
    """

    prompt_tokens: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One batch that decodes, and does nothing else.

    Attributes:
        context: Tokens that each of its requests holds, > 0.
        concurrency: Requests in flight, >= 1.
        itl_s: Mean gap between successive tokens of a request, seconds, > 0.
        tokens_per_s: Output tokens per second of the engine, > 0.
    """

    context: float
    concurrency: float
    itl_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class KvTransferCost:
    """What it takes to hand a prompt's KV from the engine that computed it to the one that decodes; seconds, >= 0."""

    fixed_s: float
    per_token_s: float

    def of(self, prompt_tokens: float) -> float:
        """Return the time of a prompt, seconds."""
        return self.fixed_s + self.per_token_s * prompt_tokens


@dataclass(frozen=True, slots=True)
class EngineSweep:
    """All points of one engine size.

    Attributes:
        gpus: GPUs of the engine, >= 1.
        kv_tokens: KV cache of the engine that decodes, tokens, > 0.
        prefill: By prompt length.
        decode: By context, then by requests in flight.
        name: What was measured, as text; empty where unknown.
        transfer: Of a prompt to this engine from one that prefills; None: unknown.
    """

    gpus: int
    kv_tokens: float
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    name: str = ""
    transfer: KvTransferCost | None = None

    def prefill_table(self) -> PrefillTable:
        """Return TTFT over prompt lengths; the points must have passed `quality.sweep_warnings`."""
        points = self.prefill
        return PrefillTable(
            tuple(each.prompt_tokens for each in points), tuple(each.ttft_s for each in points)
        )

    def decode_table(self) -> DecodeTable:
        """Return ITL and throughput over contexts and KV usage; the points must have passed `quality.sweep_warnings`.

        Contexts were measured at KV usages of their own. The table has the usages of all: each context keeps its points,
        lines join them at the others', and outside its first and last point the nearest holds.
        """
        rows = by_context(self.decode)
        measured = [[each.concurrency * each.context / self.kv_tokens for each in row] for _, row in rows]
        usages = sorted({usage for own in measured for usage in own})

        def column(values: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
            pairs = zip(measured, values, strict=True)
            return tuple(tuple(interpolated(xs, ys, usage) for usage in usages) for xs, ys in pairs)

        return DecodeTable(
            tuple(context for context, _ in rows),
            tuple(usages),
            column([[each.itl_s for each in row] for _, row in rows]),
            column([[each.tokens_per_s for each in row] for _, row in rows]),
            self.kv_tokens,
        )


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every engine size that was measured of one model.

    Attributes:
        engines: By GPUs, strictly increasing.
        model: Empty where it is not known.
        is_aggregated: One engine both prefills and decodes in the graph.
    """

    engines: tuple[EngineSweep, ...]
    model: str = ""
    is_aggregated: bool = False

    def engine(self, gpus: int) -> EngineSweep:
        """Return the engine of that many GPUs.

        Raises:
            KeyError: none was measured.
        """
        return {each.gpus: each for each in self.engines}[gpus]

    def profile(self, *, prefill_gpus: int, decode_gpus: int) -> PerformanceProfile:
        """Return the profile of one size per role.

        Raises:
            KeyError: a size was not measured.
        """
        return PerformanceProfile(
            self.engine(prefill_gpus).prefill_table(),
            self.engine(decode_gpus).decode_table(),
            prefill_gpus,
            decode_gpus,
            self.model,
        )


def by_context(points: Sequence[DecodePoint]) -> list[tuple[float, list[DecodePoint]]]:
    """Return the points of each context, contexts and requests in flight ascending."""
    ordered = sorted(points, key=lambda point: (point.context, point.concurrency))
    return [(context, list(group)) for context, group in groupby(ordered, key=lambda point: point.context)]
