"""What was measured, point by point, before anything is interpolated: one `EngineSweep` per engine size.

A profiler fills it, Dynamo's files are read into it, and tables, checks and recommendations are made from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from penstock.core.validation import findings
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
class EngineSweep:
    """All points of one engine size.

    Attributes:
        gpus: GPUs of the engine, >= 1.
        kv_tokens: KV cache of the engine that decodes, tokens, > 0.
        prefill: By prompt length.
        decode: By context, then by requests in flight.
        name: What was measured, as text; empty where unknown.
    """

    gpus: int
    kv_tokens: float
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    name: str = ""

    def prefill_table(self) -> PrefillTable:
        """Return TTFT over prompt lengths; the points must have passed `quality.findings`."""
        return PrefillTable(
            tuple(point.prompt_tokens for point in self.prefill),
            tuple(point.ttft_s for point in self.prefill),
        )

    def decode_table(self) -> DecodeTable:
        """Return ITL and throughput over contexts and KV usage; the points must have passed `quality.findings`.

        Contexts were measured at KV usages of their own. The table has the usages of all: each context keeps its points,
        lines join them at the others', and outside its first and last point the nearest holds.
        """
        rows = [(context, self._columns(points)) for context, points in by_context(self.decode)]
        usages = sorted({usage for _, (measured, _, _) in rows for usage in measured})
        return DecodeTable(
            tuple(context for context, _ in rows),
            tuple(usages),
            tuple(tuple(interpolated(xs, itls, usage) for usage in usages) for _, (xs, itls, _) in rows),
            tuple(tuple(interpolated(xs, rates, usage) for usage in usages) for _, (xs, _, rates) in rows),
            self.kv_tokens,
        )

    def _columns(self, points: Sequence[DecodePoint]) -> tuple[list[float], list[float], list[float]]:
        return (
            [point.concurrency * point.context / self.kv_tokens for point in points],
            [point.itl_s for point in points],
            [point.tokens_per_s for point in points],
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


def sweep_of(profile: PerformanceProfile) -> Sweep:
    """Return the points that a profile's tables hold, so that it can be checked as a measured one is."""
    decode = profile.decode
    points = tuple(
        DecodePoint(context, max(1.0, usage * decode.kv_tokens / context), itl_s, rate)
        for context, itls, rates in zip(decode.contexts, decode.itl_s, decode.tokens_per_s, strict=True)
        for usage, itl_s, rate in zip(decode.kv_usage, itls, rates, strict=True)
        if usage * decode.kv_tokens >= context  # below, the table holds the value of one request
    )
    prefill = tuple(
        PrefillPoint(tokens, ttft_s)
        for tokens, ttft_s in zip(profile.prefill.prompt_tokens, profile.prefill.ttft_s, strict=True)
    )
    if profile.prefill_gpus == profile.decode_gpus:
        return Sweep((EngineSweep(profile.decode_gpus, decode.kv_tokens, prefill, points),), profile.model)
    engines = (
        EngineSweep(profile.prefill_gpus, decode.kv_tokens, prefill, ()),
        EngineSweep(profile.decode_gpus, decode.kv_tokens, (), points),
    )
    return Sweep(tuple(sorted(engines, key=lambda engine: engine.gpus)), profile.model)


def sweep_from(plain: Mapping[str, Any]) -> Sweep:
    """Return the sweep of which `dataclasses.asdict` made plain data.

    Raises:
        ValueError: the data is not a sweep; the message names the key.
    """
    try:
        return _SWEEP.validate_python(plain)
    except ValidationError as exc:
        raise ValueError(findings(exc, root="sweep", most=1)) from exc


_SWEEP: Final = TypeAdapter(Sweep)
