"""Reads a performance profile from the text of its file, and refuses one that no plan can be made with. Pure."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence

from penstock.core.errors import ConfigError
from penstock.performance.profile import PerformanceProfile, profile_from

PROFILE_FILE = "profile.json"
"""Name of the file in a profiler's output folder, and its key in a ConfigMap."""

REMEDY = "write it anew with `penstock profile`"

_LEAST_PROMPTS = 2
"""Points of a line."""


def read_profile(text: str, *, origin: str = "profile") -> PerformanceProfile:
    """Return the profile that a text describes: JSON, as `penstock profile` writes it.

    Raises:
        ConfigError: not JSON, keys are missing, or points are not in order; the message says which.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as exc:  # brackets by the thousand exceed the parser's depth
        raise ConfigError(f"{origin}: not JSON: {exc}; {REMEDY}") from exc
    try:
        profile = profile_from(plain)
    except ValueError as exc:
        raise ConfigError(f"{origin}: not a performance profile: {exc}; {REMEDY}") from exc
    if (found := next(problems(profile), None)) is not None:
        raise ConfigError(f"{origin}: {found}; {REMEDY}")
    return profile


def problems(profile: PerformanceProfile) -> Iterator[str]:
    """Yield what keeps a profile from being used, each with its key, value and bound."""
    prefill, decode = profile.prefill, profile.decode
    yield from _points("prefill.prompt_tokens", prefill.prompt_tokens, least=_LEAST_PROMPTS)
    yield from _values("prefill.ttft_s", prefill.ttft_s, len(prefill.prompt_tokens))
    yield from _points("decode.contexts", decode.contexts)
    yield from _points("decode.kv_usage", decode.kv_usage)
    if decode.kv_usage and decode.kv_usage[-1] > 1:
        yield f"decode.kv_usage: {decode.kv_usage[-1]:g} exceeds 1"
    for key, rows in (("decode.itl_s", decode.itl_s), ("decode.tokens_per_s", decode.tokens_per_s)):
        if len(rows) != len(decode.contexts):
            yield f"{key}: {len(rows)} rows for {len(decode.contexts)} contexts"
        for number, row in enumerate(rows):
            yield from _values(f"{key}[{number}]", row, len(decode.kv_usage))
    if not (math.isfinite(decode.kv_tokens) and decode.kv_tokens > 0):
        yield f"decode.kv_tokens: {decode.kv_tokens:g} must be a number above 0"
    for key, gpus in (("prefill_gpus", profile.prefill_gpus), ("decode_gpus", profile.decode_gpus)):
        if gpus < 0:
            yield f"{key}: {gpus} must be 0 or more"


def _points(key: str, values: Sequence[float], *, least: int = 1) -> Iterator[str]:
    if len(values) < least:
        yield f"{key}: {len(values)} points, at least {least} are needed"
    yield from _values(key, values, len(values))
    for before, after in itertools.pairwise(values):
        if not before < after:
            yield f"{key}: {after:g} follows {before:g}, yet points must increase"


def _values(key: str, values: Sequence[float], count: int) -> Iterator[str]:
    if len(values) != count:
        yield f"{key}: {len(values)} values for {count} points"
    for number, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            yield f"{key}[{number}]: {value:g} must be a number above 0"
