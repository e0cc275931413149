"""One model's performance profile: the engine that prefills and the engine that decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.performance.tables import DecodeTable, PrefillTable


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
        KeyError, TypeError, ValueError: the data is not a profile.
    """
    prefill, decode = plain["prefill"], plain["decode"]
    return PerformanceProfile(
        PrefillTable(tuple(prefill["prompt_tokens"]), tuple(prefill["ttft_s"])),
        DecodeTable(
            tuple(decode["contexts"]),
            tuple(decode["kv_usage"]),
            tuple(tuple(row) for row in decode["itl_s"]),
            tuple(tuple(row) for row in decode["tokens_per_s"]),
            float(decode["kv_tokens"]),
        ),
        int(plain.get("prefill_gpus", 1)),
        int(plain.get("decode_gpus", 1)),
        str(plain.get("model", "")),
    )
