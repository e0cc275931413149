"""One model's performance profile: TTFT by prompt length, ITL and throughput by KV usage and context; and its file's text.

Lines join the points, over contexts in 1 / context: at one KV usage the batch goes with it, and a step's time with the
batch. Dynamo interpolates its own cubically. All figures are of one engine, not of one GPU. Outside the
points the nearest edge holds: nothing is extrapolated. Pure.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from penstock.core.errors import ConfigError
from penstock.core.validation import findings

PROFILE_FILE = "profile.json"
"""Name of the file in a profiler's output folder, and its key in a ConfigMap."""

REMEDY = "write it anew with `penstock profile`"

_LEAST_PROMPTS = 2
"""Points of a line."""


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """TTFT by prompt length, one prompt at a time.

    Attributes:
        prompt_tokens: Prompt lengths, strictly increasing, two at least.
        ttft_s: Their TTFT without queueing, > 0.
    """

    prompt_tokens: tuple[float, ...]
    ttft_s: tuple[float, ...]

    def ttft_of(self, prompt_tokens: float) -> float:
        """Return the TTFT of a length, that of the nearest end outside the table."""
        return interpolated(self.prompt_tokens, self.ttft_s, prompt_tokens)

    def tokens_per_s(self, prompt_tokens: float) -> float:
        """Return the prompt tokens per second of an engine that computes such prompts one after the other.

        Example: 3,000 tokens in 0.075 s: 40,000.
        """
        length = min(max(prompt_tokens, self.prompt_tokens[0]), self.prompt_tokens[-1])
        return length / self.ttft_of(length)

    def prompt_tokens_within(self, ttft_s: float) -> float | None:
        """Return the longest length, inside the table, up to which every TTFT is within ``ttft_s``; None: no length is."""
        if self.ttft_s[0] > ttft_s:
            return None
        for place, slow_s in enumerate(self.ttft_s):
            if slow_s > ttft_s:
                xs, ys = self.prompt_tokens[place - 1 : place + 1], self.ttft_s[place - 1 : place + 1]
                return interpolated(ys, xs, ttft_s)
        return self.prompt_tokens[-1]


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """Inter-token latency and throughput over KV usage, a row per context length.

    Attributes:
        contexts: Tokens that each request holds, strictly increasing.
        kv_usage: Shares of the KV cache in use, strictly increasing, in (0, 1].
        itl_s: By context and usage, > 0.
        tokens_per_s: By context and usage, > 0.
        kv_tokens: KV cache of the engine, tokens.
    """

    contexts: tuple[float, ...]
    kv_usage: tuple[float, ...]
    itl_s: tuple[tuple[float, ...], ...]
    tokens_per_s: tuple[tuple[float, ...], ...]
    kv_tokens: float

    def at_context(self, context: float) -> DecodeRow:
        """Return what the engine does with requests that hold ``context`` tokens each, over KV usage."""
        return DecodeRow(
            context,
            self.kv_tokens,
            self.kv_usage,
            tuple(_between_rows(self.contexts, self.itl_s, context)),
            tuple(_between_rows(self.contexts, self.tokens_per_s, context)),
        )

    def itl_of(self, concurrency: float, context: float) -> float:
        """Return the ITL of so many requests, each holding ``context`` tokens."""
        row = _between_rows(self.contexts, self.itl_s, context)
        return interpolated(self.kv_usage, row, concurrency * context / self.kv_tokens)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Inter-token latency and throughput over KV usage at one context length.

    Attributes:
        context: Tokens that each request holds, > 0.
        kv_tokens: KV cache of the engine, tokens.
        kv_usage: As in the table.
        itl_s: By usage, > 0.
        tokens_per_s: By usage, > 0.
    """

    context: float
    kv_tokens: float
    kv_usage: tuple[float, ...]
    itl_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]

    def itl_of(self, concurrency: float) -> float:
        """Return the ITL of so many requests."""
        return interpolated(self.kv_usage, self.itl_s, concurrency * self.context / self.kv_tokens)

    def concurrency_at(self, tokens_per_s: float) -> float | None:
        """Return the requests in flight at which the engine decodes so many tokens/s; None: it never does.

        By Little's law they are the throughput times the ITL.
        """
        rates = self.tokens_per_s
        right = next((place for place, rate in enumerate(rates) if rate >= tokens_per_s), None)
        if right is None:
            return None
        if right == 0:
            return tokens_per_s * self.itl_s[0]
        weight = (tokens_per_s - rates[right - 1]) / (rates[right] - rates[right - 1])
        return tokens_per_s * (self.itl_s[right - 1] + weight * (self.itl_s[right] - self.itl_s[right - 1]))


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at ``x`` on the line through the points, that of the nearest end outside them.

    Args:
        xs: Strictly increasing, one at least.
        ys: As many.
        x: Anything.
    """
    right = bisect_left(xs, x)
    if right == 0:
        return ys[0]
    if right == len(xs):
        return ys[-1]
    weight = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + weight * (ys[right] - ys[right - 1])


def _between_rows(contexts: Sequence[float], rows: Sequence[Sequence[float]], context: float) -> list[float]:
    shares = [-1 / each for each in contexts]
    return [interpolated(shares, column, -1 / context) for column in zip(*rows, strict=True)]


@dataclass(frozen=True, slots=True)
class PerformanceProfile:
    """An engine that prefills and one that decodes; the same engine twice where the graph is aggregated.

    Attributes:
        prefill_gpus: GPUs of the prefill engine that was measured, >= 1.
        decode_gpus: GPUs of the decode engine that was measured, >= 1.
        model: Model that was measured; empty where it is not known.
    """

    prefill: PrefillTable
    decode: DecodeTable
    prefill_gpus: int = 1
    decode_gpus: int = 1
    model: str = ""


def profile_from(plain: Mapping[str, Any]) -> PerformanceProfile:
    """Return the profile of which `dataclasses.asdict` made plain data.

    Raises:
        ValueError: the data is not a profile; the message names the key.
    """
    try:
        return _PROFILE.validate_python(plain)
    except ValidationError as exc:
        raise ValueError(findings(exc, root="profile", most=1)) from exc


_PROFILE: Final = TypeAdapter(PerformanceProfile)


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
