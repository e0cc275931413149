"""One model's performance profile: the engine that prefills and the engine that decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from penstock.core.validation import findings
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
        ValueError: the data is not a profile; the message names the key.
    """
    try:
        return _PROFILE.validate_python(plain)
    except ValidationError as exc:
        raise ValueError(findings(exc, root="profile", most=1)) from exc


_PROFILE: Final = TypeAdapter(PerformanceProfile)
