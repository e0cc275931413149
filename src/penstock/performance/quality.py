"""Whether measured points can be planned by: errors forbid it, warnings say where the result is doubtful.

Each finding names the key, its value, the bound and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from penstock.core.errors import ConfigError
from penstock.performance.profile import PerformanceProfile
from penstock.performance.sweep import DecodePoint, EngineSweep, Sweep, by_context

GAP_RATIO = 4.0
"""Neighbouring prompt lengths or contexts further apart leave a gap. Chosen: a quadratic TTFT is then off by up to a
third in between."""
NOISE = 0.05
"""A fall of less than this share is noise. Chosen: repeated measurements of an idle engine differ by a few percent."""
LEAST_S = 1e-4
"""No engine answers faster, so a smaller figure holds another unit: Dynamo's files hold milliseconds."""


class Severity(StrEnum):
    """What a finding does: an error forbids planning, a warning is shown."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a profile.

    Attributes:
        key: Where, such as ``tp4.prefill``.
        message: Value, bound and remedy.
    """

    severity: Severity
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


def sweep_findings(sweep: Sweep) -> list[Finding]:
    """Return what is wrong with every engine of a sweep, errors first."""
    found = [] if sweep.engines else [_error("engines", "none was measured; run `penstock profile`")]
    for engine in sweep.engines:
        found += [*prefill_findings(engine), *decode_findings(engine)]
    return sorted(found, key=lambda each: each.severity is Severity.WARNING)


def check_fits(profile: PerformanceProfile, *, model: str, prefill_gpus: int, decode_gpus: int) -> None:
    """Refuse a profile that was measured of another model or engine size than a graph runs.

    Args:
        profile: What was measured.
        model: Model that the graph serves.
        prefill_gpus: GPUs of one replica that prefills.
        decode_gpus: GPUs of one replica that decodes.

    Raises:
        ConfigError: with every difference, and what to do about it.
    """
    found = []
    if profile.model and not is_same_model(profile.model, model):
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


def is_same_model(one: str, other: str) -> bool:
    """Return whether two names mean one model.

    Letters' case, the publisher before the slash and a suffix such as ``-FP8``, which names the weights' format, do not count.
    """
    first, second = (name.rpartition("/")[2].lower() for name in (one, other))
    return first.startswith(second) or second.startswith(first)


def prefill_findings(engine: EngineSweep) -> list[Finding]:
    """Return what is wrong with an engine's TTFTs."""
    key, points = f"tp{engine.gpus}.prefill", engine.prefill
    if broken := list(_broken(key, ((each.prompt_tokens, each.ttft_s) for each in points), "TTFT")):
        return broken
    if len(points) < 2:
        return [_error(key, f"{len(points)} prompt lengths, but a line needs 2; measure more")]
    found = list(_unordered(key, [each.prompt_tokens for each in points], "prompt lengths"))
    if found:
        return found
    for left, right in pairwise(points):
        if right.prompt_tokens > GAP_RATIO * left.prompt_tokens:
            found.append(_gap(key, left.prompt_tokens, right.prompt_tokens, "prompt tokens"))
        if right.ttft_s < left.ttft_s * (1 - NOISE):
            found.append(
                _falls(key, "TTFT", (left.prompt_tokens, left.ttft_s), (right.prompt_tokens, right.ttft_s))
            )
    return found


def decode_findings(engine: EngineSweep) -> list[Finding]:
    """Return what is wrong with an engine's ITLs."""
    key, points = f"tp{engine.gpus}.decode", engine.decode
    if not (math.isfinite(engine.kv_tokens) and engine.kv_tokens > 0):
        return [_error(f"{key}.kv_tokens", f"{engine.kv_tokens!r} must be above 0; give --kv-tokens")]
    values = ((each.context, each.concurrency, each.itl_s, each.tokens_per_s) for each in points)
    if broken := list(_broken(key, values, "ITL")):
        return broken
    if len(points) < 2:
        return [_error(key, f"{len(points)} points, but a line needs 2; measure more requests in flight")]
    rows = by_context(points)
    found = [finding for context, row in rows for finding in _row(f"{key}[{context:,.0f}]", row)]
    held = max(each.context * each.concurrency for each in points)
    if held > engine.kv_tokens:
        bound = f"but the cache is said to hold {engine.kv_tokens:,.0f}; correct --kv-tokens"
        found.append(_error(f"{key}.kv_tokens", f"{held:,.0f} tokens were in flight, {bound}"))
    if len(rows) == 1:
        found.append(_warning(key, f"one context, {rows[0][0]:,.0f} tokens: ITL elsewhere is taken from it"))
    for (left, _), (right, _) in pairwise(rows):
        if right > GAP_RATIO * left:
            found.append(_gap(key, left, right, "tokens of context"))
    return found


def _row(key: str, row: Sequence[DecodePoint]) -> Iterator[Finding]:
    yield from _unordered(key, [each.concurrency for each in row], "numbers of requests in flight")
    for left, right in pairwise(row):
        if right.itl_s < left.itl_s * (1 - NOISE):
            yield _falls(key, "ITL", (left.concurrency, left.itl_s), (right.concurrency, right.itl_s))


def _broken(key: str, points: Iterable[tuple[float, ...]], what: str) -> Iterator[Finding]:
    for point in points:
        if not all(math.isfinite(value) and value > 0 for value in point):
            yield _error(key, f"point {point}: every value must be a number above 0; measure it again")
        elif (seconds := point[1] if len(point) == 2 else point[2]) < LEAST_S:
            unit = f"is below {LEAST_S * 1000:g} ms, which no engine reaches; is it in another unit?"
            yield _error(key, f"{what} {seconds * 1000:g} ms {unit}")


def _unordered(key: str, values: Sequence[float], what: str) -> Iterator[Finding]:
    for left, right in pairwise(values):
        if right <= left:
            yield _error(
                key, f"{what} {left:g} and {right:g}: they must increase; remove or sort the second point"
            )


def _gap(key: str, left: float, right: float, unit: str) -> Finding:
    text = f"nothing between {left:,.0f} and {right:,.0f} {unit}, more than {GAP_RATIO:g} times apart"
    return _warning(key, f"{text}; measure one in between")


def _falls(key: str, what: str, left: tuple[float, float], right: tuple[float, float]) -> Finding:
    text = f"{what} falls from {left[1] * 1000:.1f} ms at {left[0]:,.0f} to {right[1] * 1000:.1f} ms at {right[0]:,.0f}"
    return _warning(key, f"{text}, though more work cannot take less time; measure both again")


def _error(key: str, message: str) -> Finding:
    return Finding(Severity.ERROR, key, message)


def _warning(key: str, message: str) -> Finding:
    return Finding(Severity.WARNING, key, message)
