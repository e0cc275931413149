"""The parts of ``summary.json`` that its readers rely on. Keys beside these are kept and shown as they are."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.core.errors import ConfigError
from penstock.core.validation import findings


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Figures(_Part):
    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class _Latency(_Part):
    percentile_method: str
    ttft_s: _Figures
    itl_s: _Figures
    tpot_s: _Figures
    e2e_s: _Figures


class _Outcomes(_Part):
    ok: int
    failed: int
    rejected: int


class _Requests(_Outcomes):
    planned: int
    unfinished: int
    not_sent: int


class _TierFigures(_Part):
    requests: _Outcomes
    ttft_s: _Figures
    tpot_s: _Figures
    e2e_s: _Figures


class _Tokens(_Part):
    prompt: int
    output: int
    prefix_cache_hit_rate: float | None


class _Throughput(_Part):
    duration_s: float
    requests_per_s: float | None
    output_tokens_per_s: float | None


class _Mismatches(_Part):
    prompt_tokens: int
    checked_prompt: int
    output_tokens: int
    checked_output: int
    without_usage: int
    examples: list[str]


class _ServerLag(_Part):
    name: str
    p99_s: float | None


class _Lag(_Part):
    send_p99_s: float | None
    loop_p99_s: float | None
    servers: list[_ServerLag]
    bound_s: float
    bound_rule: str
    late: list[str]
    is_distorted: bool
    itl_bound_s: float
    itl_bound_rule: str
    late_for_itl: list[str]
    is_itl_distorted: bool
    is_itl_unresolved: bool
    resolution_s: float


class _Settings(_Part):
    model: str | None
    speed: float
    concurrency: int | None
    max_input_tokens: int | None


class _Trace(_Part):
    name: str
    skipped_rows: list[str]
    truncated_prompts: int
    dropped_prompts: int


class _Started(_Part):
    unix_s: float
    model_s: float


class _Capacity(_Part):
    rps: float
    concurrency: int


class _Overload(_Part):
    factor: float
    capacity: _Capacity


class _Summary(_Part):
    is_partial: bool
    started: _Started
    requests: _Requests
    errors: dict[str, int]
    latency: _Latency
    tokens: _Tokens
    throughput: _Throughput
    usage_mismatches: _Mismatches
    lag: _Lag
    settings: _Settings
    trace: _Trace
    tiers: dict[str, _TierFigures] | None = None
    overload: _Overload | None = None


def check_summary(summary: dict[str, Any], place: str) -> None:
    """Refuse a summary whose parts are not of the types that `penstock load` writes.

    Raises:
        ConfigError: the message names the key.
    """
    try:
        _Summary.model_validate(summary)
    except ValidationError as exc:
        raise ConfigError(
            f"{place}: {findings(exc, root='summary', most=1)}; it was not written by `penstock load`"
        ) from exc
