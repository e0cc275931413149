"""Names of the latency profiles that come with Penstock. Pure; `tests/contract` compares them with the files."""

from __future__ import annotations

from typing import Final

PROFILE_SUFFIX: Final = ".yaml"
"""A name that ends so is a file of the user's own, read where the worker runs."""

PROFILES: Final = (
    "a100-llama-70b-bf16-tp8",
    "a100-llama-8b-bf16-tp1",
    "a100-qwen2.5-14b-bf16-tp1",
    "a100-qwen2.5-7b-bf16-tp1",
    "h100-llama-3.3-70b-tp2",
    "h100-llama-3.3-70b-tp2-table",
    "h100-llama-3.3-70b-tp4",
    "h100-llama-3.3-70b-tp4-table",
    "h100-llama-3.3-70b-tp8",
    "h100-llama-3.3-70b-tp8-table",
    "h100-llama-70b-bf16-tp8",
    "h100-llama-8b-bf16-tp1",
    "h100-qwen2.5-7b-bf16-tp1",
    "h200-llama-3.1-8b-tp1",
    "h200-llama-3.1-8b-tp1-table",
    "h200-llama-8b-bf16-tp1",
)
"""All files of ``penstock/engine/profiles``, sorted."""
