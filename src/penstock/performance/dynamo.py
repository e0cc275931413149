"""Dynamo's profile format: arrays by name, TTFT and ITL in milliseconds, throughput per GPU; read and written.

``prefill``: prefill_isl, prefill_ttft, prefill_thpt_per_gpu. ``decode``: x_kv_usage, y_context_length, z_itl,
z_thpt_per_gpu, max_kv_tokens. The same names are the arrays of its ``raw_data.npz`` and the keys of its JSON files.

Source: ai-dynamo/dynamo, profiler and planner of releases 0.4 to 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint

_MS = 1e-3

PREFILL_KEYS = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
DECODE_KEYS = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu", "max_kv_tokens")


def prefill_arrays(engine: EngineSweep) -> dict[str, list[float]]:
    """Return an engine's TTFTs as Dynamo keeps them."""
    return {
        "prefill_isl": [each.prompt_tokens for each in engine.prefill],
        "prefill_ttft": [each.ttft_s / _MS for each in engine.prefill],
        "prefill_thpt_per_gpu": [each.prompt_tokens / each.ttft_s / engine.gpus for each in engine.prefill],
    }


def decode_arrays(engine: EngineSweep) -> dict[str, list[float]]:
    """Return an engine's ITLs as Dynamo keeps them."""
    points = engine.decode
    return {
        "x_kv_usage": [each.concurrency * each.context / engine.kv_tokens for each in points],
        "y_context_length": [each.context for each in points],
        "z_itl": [each.itl_s / _MS for each in points],
        "z_thpt_per_gpu": [each.tokens_per_s / engine.gpus for each in points],
        "max_kv_tokens": [engine.kv_tokens],
    }


def prefill_points(arrays: Mapping[str, Any]) -> tuple[PrefillPoint, ...]:
    """Return the points of a prefill profile, by prompt length.

    Raises:
        ValueError: an array is missing, or they differ in length; the message names it.
    """
    lengths, ttfts = _columns(arrays, ("prefill_isl", "prefill_ttft"))
    return tuple(
        PrefillPoint(tokens, ttft_ms * _MS) for tokens, ttft_ms in sorted(zip(lengths, ttfts, strict=True))
    )


def prefill_gpus(arrays: Mapping[str, Any]) -> int | None:
    """Return how many GPUs the profiled engine had, from throughput per GPU; None where that is not in the file."""
    if "prefill_thpt_per_gpu" not in arrays:
        return None
    lengths, ttfts, rates = _columns(arrays, PREFILL_KEYS)
    ratios = [
        tokens / (ttft_ms * _MS) / rate
        for tokens, ttft_ms, rate in zip(lengths, ttfts, rates, strict=True)
        if ttft_ms > 0 and rate > 0
    ]
    return max(1, round(sum(ratios) / len(ratios))) if ratios else None


def decode_gpus(arrays: Mapping[str, Any]) -> int | None:
    """Return how many GPUs the profiled engine had, from requests in flight, ITL and throughput per GPU.

    Raises:
        ValueError: an array is missing, or they differ in length; the message names it.
    """
    kv_tokens = kv_tokens_of(arrays)
    ratios = [
        usage * kv_tokens / context / (itl_ms * _MS) / rate
        for usage, context, itl_ms, rate in zip(*_columns(arrays, DECODE_KEYS[:-1]), strict=True)
        if context > 0 and itl_ms > 0 and rate > 0
    ]
    return max(1, round(sum(ratios) / len(ratios))) if ratios else None


def decode_points(arrays: Mapping[str, Any], gpus: int) -> tuple[DecodePoint, ...]:
    """Return the points of a decode profile, by context and requests in flight.

    Raises:
        ValueError: an array is missing, or they differ in length; the message names it.
    """
    kv_tokens = kv_tokens_of(arrays)
    points = [
        DecodePoint(context, max(1.0, float(round(usage * kv_tokens / context))), itl_ms * _MS, rate * gpus)
        for usage, context, itl_ms, rate in zip(*_columns(arrays, DECODE_KEYS[:-1]), strict=True)
        if context > 0
    ]
    return tuple(sorted(points, key=lambda each: (each.context, each.concurrency)))


def kv_tokens_of(arrays: Mapping[str, Any]) -> float:
    """Return the KV cache of a decode profile, tokens.

    Raises:
        ValueError: it is missing.
    """
    if "max_kv_tokens" not in arrays:
        raise ValueError("max_kv_tokens is missing; give a profile that says how many tokens the cache holds")
    value = arrays["max_kv_tokens"]
    return float(value[0] if isinstance(value, Sequence) else value)


def _columns(arrays: Mapping[str, Any], keys: Sequence[str]) -> list[list[float]]:
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; a profile holds {', '.join(keys)}")
    columns = [[float(value) for value in arrays[key]] for key in keys]
    if len({len(column) for column in columns}) != 1:
        sizes = ", ".join(f"{key} {len(column)}" for key, column in zip(keys, columns, strict=True))
        raise ValueError(f"arrays differ in length ({sizes}); a profile has one value per point in each")
    return columns
