"""The two things that an engine is measured at."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What is measured: TTFT of prompts alone, or ITL of batches."""

    PREFILL = "prefill"
    DECODE = "decode"
