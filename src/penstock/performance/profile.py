"""One model's performance profile: TTFT by prompt length, ITL and throughput by KV usage and context; and its file's text.

Lines join the points, over contexts in 1 / context: at one KV usage the batch goes with it, and a step's time with the
batch. Dynamo interpolates its own cubically. All figures are of one engine, not of one GPU. Outside the
points the nearest edge holds: nothing is extrapolated. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from penstock.core.errors import ConfigError
from penstock.core.validation import findings

PROFILE_FILE = "profile.json"
"""Name of the file in a profiler's output folder, and its key in a ConfigMap."""


def _positive(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{value:g} must be a number above 0")
    return value


def _increasing(values: tuple[float, ...]) -> tuple[float, ...]:
    for before, after in pairwise(values):
        if not before < after:
            raise ValueError(f"{after:g} follows {before:g}, yet points must increase")
    return values


def _shares(values: tuple[float, ...]) -> tuple[float, ...]:
    if values[-1] > 1:
        raise ValueError(f"{values[-1]:g} exceeds 1")
    return values


Positive = Annotated[float, AfterValidator(_positive)]
_Increasing = Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(_increasing)]


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """TTFT by prompt length, one prompt at a time.

    Attributes:
        prompt_tokens: Prompt lengths, strictly increasing, two at least.
        ttft_s: Their TTFT without queueing, > 0.
    """

    prompt_tokens: Annotated[_Increasing, Field(min_length=2)]
    ttft_s: tuple[Positive, ...]

    def ttft_of(self, prompt_tokens: float) -> float:
        """Return the TTFT of a length, that of the nearest end outside the table."""
        return interpolated(self.prompt_tokens, self.ttft_s, prompt_tokens)

    def tokens_per_s(self, prompt_tokens: float) -> float:
        """Return the prompt tokens per second of an engine that computes such prompts one after the other.

        Example: 3,000 tokens in 0.075 s: 40,000.
        """
        length = min(max(prompt_tokens, self.prompt_tokens[0]), self.prompt_tokens[-1])
        return length / self.ttft_of(length)


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

    contexts: _Increasing
    kv_usage: Annotated[_Increasing, AfterValidator(_shares)]
    itl_s: tuple[tuple[Positive, ...], ...]
    tokens_per_s: tuple[tuple[Positive, ...], ...]
    kv_tokens: Positive

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
        """Return the ITL of this many requests, each holding ``context`` tokens."""
        row = _between_rows(self.contexts, self.itl_s, context)
        return interpolated(self.kv_usage, row, concurrency * context / self.kv_tokens)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Inter-token latency and throughput over KV usage at one context length.

    Attributes:
        context: Tokens that each request holds, > 0.
    """

    context: float
    kv_tokens: float
    kv_usage: tuple[float, ...]
    itl_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]

    def itl_of(self, concurrency: float) -> float:
        """Return the ITL of this many requests."""
        return interpolated(self.kv_usage, self.itl_s, concurrency * self.context / self.kv_tokens)

    def concurrency_at(self, tokens_per_s: float) -> float | None:
        """Return the requests in flight at which the engine decodes this many tokens/s; None: it never does.

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
    """Return y at ``x`` on the line through the points, that of the nearest end outside them; ``xs`` strictly increase."""
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

    GPUs are of the engines that were measured; the model is empty where it is not known.
    """

    prefill: PrefillTable
    decode: DecodeTable
    prefill_gpus: Annotated[int, Field(ge=0)] = 1
    decode_gpus: Annotated[int, Field(ge=0)] = 1
    model: str = ""


def _fitting(profile: PerformanceProfile) -> PerformanceProfile:
    """Return a profile whose tables have a value for each point."""
    prefill, decode = profile.prefill, profile.decode
    columns: list[tuple[str, Sequence[object], Sequence[float]]] = [
        ("prefill.ttft_s", prefill.ttft_s, prefill.prompt_tokens)
    ]
    for key, rows in (("decode.itl_s", decode.itl_s), ("decode.tokens_per_s", decode.tokens_per_s)):
        columns.append((key, rows, decode.contexts))
        columns += [(f"{key}.{number}", row, decode.kv_usage) for number, row in enumerate(rows)]
    for key, values, points in columns:
        if len(values) != len(points):
            raise ValueError(f"{key}: {len(values)} values for {len(points)} points")
    return profile


_PROFILE: Final = TypeAdapter(Annotated[PerformanceProfile, AfterValidator(_fitting)])


def profile_from(plain: Mapping[str, Any]) -> PerformanceProfile:
    """Return the profile of which `dataclasses.asdict` made plain data.

    Raises:
        ValueError: the data is not a profile; the message names the key.
    """
    try:
        return _PROFILE.validate_python(plain)
    except ValidationError as exc:
        raise ValueError(findings(exc, root="profile", most=1)) from exc


def read_profile(text: str, *, origin: str = "profile") -> PerformanceProfile:
    """Return the profile that a text describes: JSON, as `penstock profile` writes it.

    Raises:
        ConfigError: not JSON, keys are missing, or points are not in order; the message says which.
    """
    try:
        return _PROFILE.validate_json(text)
    except ValidationError as exc:
        found = findings(exc, root="profile", most=1)
        raise ConfigError(
            f"{origin}: not a performance profile: {found}; write it again with `penstock profile`"
        ) from exc
