"""Whether measured points can be planned by, and whether a profile is one of the engine that a graph runs.

Errors forbid planning, warnings say where the result is doubtful. Each names the key, its value, the bound and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.core.errors import ConfigError
from penstock.performance.profile import PerformanceProfile
from penstock.performance.sweep import EngineSweep, Sweep, by_context

GAP_RATIO = 4.0
"""Neighbouring prompt lengths or contexts further apart leave a gap. Chosen: a quadratic TTFT is then off by up to a
third in between."""
NOISE = 0.05
"""A fall of less than this share is noise. Chosen: repeated measurements of an idle engine differ by a few percent."""
LEAST_S = 1e-4
"""No engine answers faster, so a smaller figure holds another unit: Dynamo's files hold milliseconds."""


def sweep_warnings(sweep: Sweep) -> list[str]:
    """Return what is doubtful in the points of every engine.

    Raises:
        ConfigError: with every reason why nothing can be planned by them.
    """
    errors = [] if sweep.engines else ["engines: none was measured; run `penstock profile`"]
    errors += [
        each for engine in sweep.engines for each in (*_prefill_errors(engine), *_decode_errors(engine))
    ]
    if errors:
        raise ConfigError("the profile cannot be used:\n" + "\n".join(f"  {each}" for each in errors))
    return [
        each for engine in sweep.engines for each in (*_prefill_warnings(engine), *_decode_warnings(engine))
    ]


def check_fits(profile: PerformanceProfile, *, model: str, prefill_gpus: int, decode_gpus: int) -> None:
    """Refuse a profile that was measured of another model or engine size than a graph runs.

    Names that differ only in letter case, in the publisher before the slash, or in a suffix such as ``-FP8`` for the weights'
    format name the same model.

    Raises:
        ConfigError: with every difference, and what to do about it.
    """
    found = []
    measured_name, served_name = (name.rpartition("/")[2].lower() for name in (profile.model, model))
    if not (measured_name.startswith(served_name) or served_name.startswith(measured_name)):
        found.append(f"model: measured of {profile.model}, but the graph serves {model}; profile that one")
    for role, measured, served in (
        ("prefill", profile.prefill_gpus, prefill_gpus),
        ("decode", profile.decode_gpus, decode_gpus),
    ):
        if measured != served:
            found.append(
                f"{role}_gpus: measured with {measured}, but a replica has {served}; set gpusPerReplica {measured}, or"
                f" profile with --tp {served}"
            )
    if found:
        raise ConfigError("; ".join(found))


def _prefill_errors(engine: EngineSweep) -> Iterator[str]:
    key, points = f"tp{engine.gpus}.prefill", engine.prefill
    if len(points) < 2:
        yield f"{key}: {len(points)} prompt lengths, but a line needs 2; measure more"
    yield from _broken(key, [(each.prompt_tokens, each.ttft_s) for each in points], "TTFT", seconds=1)
    yield from _unordered(key, [each.prompt_tokens for each in points], "prompt lengths")


def _decode_errors(engine: EngineSweep) -> Iterator[str]:
    key, points = f"tp{engine.gpus}.decode", engine.decode
    if not (math.isfinite(engine.kv_tokens) and engine.kv_tokens > 0):
        yield f"{key}.kv_tokens: {engine.kv_tokens!r} must be above 0; give --kv-tokens"
    if len(points) < 2:
        yield f"{key}: {len(points)} points, but a line needs 2; measure more requests in flight"
    values = [(each.context, each.concurrency, each.itl_s, each.tokens_per_s) for each in points]
    yield from _broken(key, values, "ITL", seconds=2)
    for context, row in by_context(points):
        counts = [each.concurrency for each in row]
        yield from _unordered(f"{key}[{context:,.0f}]", counts, "numbers of requests in flight")
    held = max((each.context * each.concurrency for each in points), default=0)
    if held > engine.kv_tokens:
        yield (
            f"{key}.kv_tokens: {held:,.0f} tokens were in flight, but the cache is said to hold {engine.kv_tokens:,.0f};"
            " correct --kv-tokens"
        )


def _broken(key: str, points: Sequence[tuple[float, ...]], what: str, *, seconds: int) -> Iterator[str]:
    """Yield what is wrong with single points, whose latency is in the column ``seconds``."""
    for point in points:
        if not all(math.isfinite(value) and value > 0 for value in point):
            yield f"{key}: point {point}: every value must be a number above 0; measure it again"
        elif point[seconds] < LEAST_S:
            yield (
                f"{key}: {what} {point[seconds] * 1000:g} ms is below {LEAST_S * 1000:g} ms, which no engine reaches; is it"
                " in another unit?"
            )


def _unordered(key: str, values: Sequence[float], what: str) -> Iterator[str]:
    for left, right in pairwise(values):
        if right <= left:
            yield f"{key}: {what} {left:g} and {right:g}: they must increase; remove or sort the second point"


def _prefill_warnings(engine: EngineSweep) -> Iterator[str]:
    key, points = f"tp{engine.gpus}.prefill", engine.prefill
    yield from _gaps(key, [each.prompt_tokens for each in points], "prompt tokens")
    yield from _falls(key, [(each.prompt_tokens, each.ttft_s) for each in points], "TTFT")


def _decode_warnings(engine: EngineSweep) -> Iterator[str]:
    key, rows = f"tp{engine.gpus}.decode", by_context(engine.decode)
    if len(rows) == 1:
        yield f"{key}: one context, {rows[0][0]:,.0f} tokens: ITL elsewhere is taken from it"
    yield from _gaps(key, [context for context, _ in rows], "tokens of context")
    for context, row in rows:
        yield from _falls(f"{key}[{context:,.0f}]", [(each.concurrency, each.itl_s) for each in row], "ITL")


def _gaps(key: str, values: Sequence[float], unit: str) -> Iterator[str]:
    for left, right in pairwise(values):
        if right > GAP_RATIO * left:
            yield (
                f"{key}: nothing between {left:,.0f} and {right:,.0f} {unit}, more than {GAP_RATIO:g} times apart; measure"
                " one in between"
            )


def _falls(key: str, points: Sequence[tuple[float, float]], what: str) -> Iterator[str]:
    for (left, before_s), (right, after_s) in pairwise(points):
        if after_s < before_s * (1 - NOISE):
            yield (
                f"{key}: {what} falls from {before_s * 1000:.1f} ms at {left:,.0f} to {after_s * 1000:.1f} ms at"
                f" {right:,.0f}, though more work cannot take less time; measure both again"
            )
