"""Dynamo's profile format: arrays by name, TTFT and ITL in milliseconds, throughput per GPU; read and written.

The same names are the arrays of its ``raw_data.npz`` and the keys of its JSON files.

Source: ai-dynamo/dynamo, profiler and planner of releases 0.4 to 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint

_MS = 1e-3


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


def engine_of(prefill: Mapping[str, Any], decode: Mapping[str, Any], gpus: int | None) -> EngineSweep:
    """Return the points of an engine, by prompt length and by context and requests in flight.

    Args:
        prefill: Arrays as of `prefill_arrays`; those of throughput are needed without ``gpus`` only.
        decode: Arrays as of `decode_arrays`.
        gpus: Of the engine; None: what throughput and throughput per GPU say.

    Raises:
        ValueError: an array is missing, they differ in length, or they do not say one size; the message names it.
    """
    prompts = _rows(prefill, "prefill_isl", "prefill_ttft")
    if "max_kv_tokens" not in decode:
        raise ValueError("max_kv_tokens is missing; give a profile that says how many tokens the cache holds")
    kv_tokens = decode["max_kv_tokens"]
    kv_tokens = float(kv_tokens[0] if isinstance(kv_tokens, Sequence) else kv_tokens)
    batches = [
        (context, usage * kv_tokens / context, itl_ms * _MS, rate)
        for usage, context, itl_ms, rate in _rows(
            decode, "x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu"
        )
        if context > 0
    ]
    if gpus is None:
        known = "prefill_thpt_per_gpu" in prefill
        rates = _rows(prefill, "prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu") if known else []
        sizes = {
            _gpus([(tokens, ttft_ms * _MS, rate) for tokens, ttft_ms, rate in rates]),
            _gpus([(count, itl_s, rate) for _, count, itl_s, rate in batches]),
        }
        (gpus,) = sizes if len(sizes) == 1 else (None,)
        if gpus is None:
            raise ValueError(
                "the throughput per GPU does not tell one size for prefill and decode; give --tp N"
            )
    points = [
        DecodePoint(context, max(1.0, float(round(count))), itl_s, rate * gpus)
        for context, count, itl_s, rate in batches
    ]
    return EngineSweep(
        gpus,
        kv_tokens,
        tuple(PrefillPoint(tokens, ttft_ms * _MS) for tokens, ttft_ms in sorted(prompts)),
        tuple(sorted(points, key=lambda each: (each.context, each.concurrency))),
        "Dynamo's profile",
    )


def _gpus(points: Sequence[tuple[float, float, float]]) -> int | None:
    """Return the GPUs of the engine by (units of work, their seconds, units per second and GPU); None: unknown."""
    ratios = [work / seconds / rate for work, seconds, rate in points if seconds > 0 and rate > 0]
    return max(1, round(fmean(ratios))) if ratios else None


def _rows(arrays: Mapping[str, Any], *keys: str) -> list[tuple[float, ...]]:
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; a profile holds {', '.join(keys)}")
    columns = [[float(value) for value in arrays[key]] for key in keys]
    if len({len(column) for column in columns}) != 1:
        sizes = ", ".join(f"{key} {len(column)}" for key, column in zip(keys, columns, strict=True))
        raise ValueError(f"arrays differ in length ({sizes}); a profile has one value per point in each")
    return list(zip(*columns, strict=True))
