"""The summary as text for a terminal; printed by `penstock load`, `penstock report` and the demo."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_LATENCIES = (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"))


def seconds(value: float | None) -> str:
    """Return a duration for people: milliseconds below one second, ``-`` when unknown."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def percent(value: float | None) -> str:
    """Return a fraction as a percentage, ``-`` when unknown."""
    return "-" if value is None else f"{value:.1%}"


def lag_warning(summary: dict[str, Any]) -> str | None:
    """Return what to say when the client could not keep up, or None when it did."""
    lag = summary["lag"]
    if not lag["is_distorted"]:
        return None
    lags = {
        "client sending": lag["send_p99_s"],
        "client event loop": lag["loop_p99_s"],
        **{server["name"]: server["p99_s"] for server in lag["servers"]},
    }
    late = ", ".join(f"{name} {seconds(lags[name])}" for name in lag["late"])
    return (
        f"DISTORTED: not every process kept up with its schedule, p99 lag past {seconds(lag['bound_s'])}"
        f" (modelled): {late}. Times may be wrong by that much; use a lower --speed or a faster machine."
    )


def load_summary(summary: dict[str, Any]) -> RenderableType:
    """Return a load run's summary: requests, latencies, tokens, and every mark that it carries."""
    parts: list[RenderableType] = [_requests_line(summary), _latency_table(summary), _tokens_line(summary)]
    parts.extend(Text(note, style="bold yellow") for note in notes(summary))
    return Group(*parts)


def notes(summary: dict[str, Any]) -> list[str]:
    """Return what qualifies the figures: partial, closed loop, skipped rows, mismatches, lag."""
    found: list[str] = []
    requests, trace, settings = summary["requests"], summary["trace"], summary["settings"]
    if summary["is_partial"]:
        found.append(
            f"PARTIAL: stopped early; {requests['not_sent']} requests not sent, {requests['unfinished']} cut off"
        )
    if settings["concurrency"] is not None:
        found.append(
            f"CLOSED LOOP: at most {settings['concurrency']} requests in flight, so arrivals waited for answers"
        )
    if trace["skipped_rows"]:
        found.append(f"{len(trace['skipped_rows'])} trace rows skipped, first: {trace['skipped_rows'][0]}")
    if trace["truncated_prompts"] or trace["dropped_prompts"]:
        found.append(
            f"prompts above {settings['max_input_tokens']} tokens: {trace['truncated_prompts']} truncated,"
            f" {trace['dropped_prompts']} requests dropped"
        )
    found.extend(_mismatch_notes(summary["usage_mismatches"]))
    if summary["errors"]:
        found.append("errors: " + ", ".join(f"{name} {count}" for name, count in summary["errors"].items()))
    warning = lag_warning(summary)
    if warning is not None:
        found.append(warning)
    return found


def _mismatch_notes(mismatches: dict[str, Any]) -> list[str]:
    found = []
    if mismatches["prompt_tokens"] or mismatches["output_tokens"]:
        found.append(
            f"usage differs from the trace: prompt in {mismatches['prompt_tokens']} of"
            f" {mismatches['checked_prompt']}, output in {mismatches['output_tokens']} of"
            f" {mismatches['checked_output']}; {'; '.join(mismatches['examples'])}"
        )
    if mismatches["without_usage"]:
        found.append(f"{mismatches['without_usage']} answers reported no usage")
    return found


def _requests_line(summary: dict[str, Any]) -> Text:
    counts, rates = summary["requests"], summary["throughput"]
    return Text(
        f"{counts['ok']} ok, {counts['failed']} failed, {counts['rejected']} rejected of {counts['planned']}"
        f" requests in {rates['duration_s']:.0f} s (modelled, speed {summary['settings']['speed']:g})"
    )


def _latency_table(summary: dict[str, Any]) -> Table:
    table = Table(title=None, caption=f"modelled time; {summary['latency']['percentile_method']}")
    table.add_column("")
    for heading in ("p50", "p90", "p99", "mean", "max", "samples"):
        table.add_column(heading, justify="right")
    for key, name in _LATENCIES:
        row = summary["latency"][key]
        table.add_row(
            name, *(seconds(row[rank]) for rank in ("p50", "p90", "p99", "mean", "max")), str(row["count"])
        )
    return table


def _tokens_line(summary: dict[str, Any]) -> Text:
    tokens, rates = summary["tokens"], summary["throughput"]
    return Text(
        f"tokens: {tokens['prompt']} prompt, {tokens['output']} output; {_rate(rates['requests_per_s'])} req/s,"
        f" {_rate(rates['output_tokens_per_s'])} output tokens/s; prefix-cache hit rate"
        f" {percent(tokens['prefix_cache_hit_rate'])}"
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
