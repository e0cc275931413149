"""The summary as text for a terminal; printed by `penstock load`, `penstock report` and the demo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.report.analysis import GpuUse, Violations, demand_line
from penstock.report.counterfactual import Counterfactual, sentences
from penstock.report.findings import RunReport
from penstock.report.ledger_view import PlannerRun
from penstock.report.targets import target_lines

LATENCIES: Final = (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"))
"""The summary's latencies by their key, in the order shown."""

RANKS: Final = ("p50", "p90", "p99", "mean", "max")
"""What is shown of each."""


def seconds(value: float | None) -> str:
    """Return a readable duration: milliseconds below one second, ``-`` when unknown."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def latency_cells(summary: Mapping[str, Any], key: str) -> list[str]:
    """Return one latency's figures in the order of `RANKS`; a gap below the timers' resolution is shown as that bound."""
    row, lag = summary["latency"][key], summary["lag"]
    least_s = lag["resolution_s"] if key == "itl_s" and lag["is_itl_unresolved"] else 0.0

    def cell(rank: str) -> str:
        value = row[rank]
        is_below_resolution = value is not None and rank != "mean" and value < least_s
        return f"< {seconds(least_s)}" if is_below_resolution else seconds(value)

    return [cell(rank) for rank in RANKS]


def percent(value: float | None) -> str:
    """Return a fraction as a percentage, ``-`` when unknown."""
    return "-" if value is None else f"{value:.1%}"


def rate(value: float | None) -> str:
    """Return a number per second, ``-`` when unknown."""
    return "-" if value is None else f"{value:.2f}"


def process_lags(lag: Mapping[str, Any]) -> dict[str, float | None]:
    """Return each process's p99 lag in simulated seconds by the name that the summary's marks use."""
    return {
        "client sending": lag["send_p99_s"],
        "client event loop": lag["loop_p99_s"],
        **{server["name"]: server["p99_s"] for server in lag["servers"]},
    }


def lag_warnings(lag: dict[str, Any]) -> list[str]:
    """Return what to say of processes that could not keep up, and of gaps too short to measure."""
    lags = process_lags(lag)

    def listed(names: list[str]) -> str:
        return ", ".join(f"{name} {seconds(lags.get(name))}" for name in names)

    found = []
    if lag["is_distorted"]:
        found.append(
            f"DISTORTED: not every process kept up with its schedule, p99 lag past {seconds(lag['bound_s'])}"
            f" (simulated): {listed(lag['late'])}. Times may be wrong by that much; use a lower --speed or a faster"
            " machine."
        )
    if lag["is_itl_distorted"]:
        found.append(
            f"ITL DISTORTED: p99 lag past {seconds(lag['itl_bound_s'])} (simulated): {listed(lag['late_for_itl'])}."
            " The high percentiles of single gaps hold that lag; read TPOT, which averages over it."
        )
    if lag["is_itl_unresolved"]:
        found.append(
            f"ITL UNRESOLVED: timers tick each {seconds(lag['resolution_s'])} (simulated; 1 ms real), so tokens"
            " closer than that come in bunches; read TPOT, which averages over them."
        )
    return found


def load_summary(summary: dict[str, Any]) -> RenderableType:
    """Return a load run's summary: requests, latencies, tokens, and every mark that it carries."""
    parts: list[RenderableType] = [_requests_line(summary), _latency_table(summary), _tokens_line(summary)]
    if summary.get("tiers"):
        parts.insert(2, _tier_table(summary["tiers"]))
    parts.extend(Text(note, style="bold yellow") for note in notes(summary))
    return Group(*parts)


def notes(summary: dict[str, Any]) -> list[str]:
    """Return what qualifies the figures: partial, closed loop, skipped rows, mismatches, lag."""
    found: list[str] = []
    requests, trace, settings = summary["requests"], summary["trace"], summary["settings"]
    overload = summary.get("overload")
    if overload is not None:
        found.append(
            f"OVERLOAD: {overload['factor']:g} times a capacity of {rate(overload['capacity']['rps'])} req/s, measured with"
            f" {overload['capacity']['concurrency']} requests in flight"
        )
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
    found.extend(lag_warnings(summary["lag"]))
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
        f" requests in {rates['duration_s']:.0f} s (simulated, speed {summary['settings']['speed']:g})"
    )


def _latency_table(summary: dict[str, Any]) -> Table:
    table = Table(title=None, caption=f"simulated time; {summary['latency']['percentile_method']}")
    table.add_column("")
    for heading in (*RANKS, "samples"):
        table.add_column(heading, justify="right")
    for key, name in LATENCIES:
        count = summary["latency"][key]["count"]
        table.add_row(name, *latency_cells(summary, key), str(count))
    return table


def _tier_table(tiers: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(caption="requests by the tier that they asked for")
    for heading in ("tier", "ok", "rej.", "failed", "TTFT p50", "p99", "TPOT p99", "E2E p99"):
        table.add_column(heading, justify="left" if heading == "tier" else "right", no_wrap=heading == "tier")
    for name, row in tiers.items():
        counts = row["requests"]
        table.add_row(
            name,
            str(counts["ok"]),
            str(counts["rejected"]),
            str(counts["failed"]),
            seconds(row["ttft_s"]["p50"]),
            seconds(row["ttft_s"]["p99"]),
            seconds(row["tpot_s"]["p99"]),
            seconds(row["e2e_s"]["p99"]),
        )
    return table


def _tokens_line(summary: dict[str, Any]) -> Text:
    tokens, rates = summary["tokens"], summary["throughput"]
    return Text(
        f"tokens: {tokens['prompt']} prompt, {tokens['output']} output; {rate(rates['requests_per_s'])} req/s,"
        f" {rate(rates['output_tokens_per_s'])} output tokens/s; prefix-cache hit rate"
        f" {percent(tokens['prefix_cache_hit_rate'])}"
    )


def facts(report: RunReport) -> list[tuple[str, list[str]]]:
    """Return the findings in addition to the load run's own figures: a name and its sentences, for terminal and page."""
    found = [("target", violation_lines(report.violations))]
    if report.demand is not None:
        found.append(("demand", [demand_line(report.demand)]))
    if report.targets is not None:
        found.append(("mode sla", target_lines(report.targets)))
    if report.use is not None:
        found.append(("GPU-hours", [gpu_line(report.use)]))
    return [(name, lines) for name, lines in found if lines]


def report_text(report: RunReport) -> RenderableType:
    """Return the complete report for a terminal: load, targets, GPU-hours, each change with its reason."""
    parts = [load_summary(report.load.summary)]
    parts.extend(Text(line) for _, lines in facts(report) for line in lines)
    if report.planner is not None:
        parts.append(planner_summary(report.planner))
    if report.counterfactual is not None:
        parts.append(counterfactual_summary(report.counterfactual))
    parts.extend(Text(note, style="bold yellow") for note in report.notes)
    return Group(*parts)


def planner_summary(run: PlannerRun) -> RenderableType:
    """Return how many decisions there were, and every one that changed something."""
    changes = [mark for mark in run.decisions if mark.is_change]
    held = len(run.decisions) - len(changes)
    counted = Text(f"{len(run.decisions)} decisions, {len(changes)} with a change, {held} held")
    parts: list[RenderableType] = [counted]
    if changes:
        table = Table()
        table.add_column("time", justify="right")
        table.add_column("decision")
        table.add_column("outcome")
        for mark in changes:
            for role in mark.roles:
                if role.action != "hold":
                    table.add_row(f"{mark.at_s:.0f} s", Text(role.sentence), Text(role.outcome))
        parts.append(table)
    return Group(*parts)


COUNTERFACTUAL_COLUMNS: Final = ("fleet", "", "in time", "TTFT p50", "p90", "p99", "lost", "GPU-h")
"""Headings of `counterfactual_rows`."""


def counterfactual_rows(found: Counterfactual) -> list[tuple[str, ...]]:
    """Return a row per fleet, the measured one first; see `COUNTERFACTUAL_COLUMNS`."""
    return [
        (
            each.name,
            each.source,
            percent(each.in_time),
            *(_tenths(value) for value in (each.ttft_p50_s, each.ttft_p90_s, each.ttft_p99_s)),
            str(each.lost),
            "-" if each.gpu_hours is None else f"{each.gpu_hours:.3f}",
        )
        for each in found.outcomes
    ]


def _tenths(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def counterfactual_summary(found: Counterfactual) -> RenderableType:
    """Return what other fleets would have cost and kept in time: a table, and a sentence for each."""
    table = Table(title=f"The same traffic on other fleets (in time: TTFT below {found.slo_s:g} s)")
    for place, heading in enumerate(COUNTERFACTUAL_COLUMNS):
        table.add_column(heading, justify="left" if place < 2 else "right")
    for row in counterfactual_rows(found):
        table.add_row(*row)
    return Group(table, *(Text(line) for line in (*sentences(found), *found.notes)))


def gpu_line(use: GpuUse) -> str:
    """Return GPU-hours in one sentence."""
    ceiling = "the peak held" if use.budget_gpus is None else f"the budget of {use.budget_gpus}"
    return (
        f"GPU-hours: {use.used_hours:.3f} used over {use.end_s - use.start_s:.0f} s; {use.static_max_hours:.3f}"
        f" static at {ceiling} ({percent(use.saved_fraction)} saved), {use.static_min_hours:.3f} static at the"
        f" floor; peak {use.peak_gpus} GPUs"
    )


def violation_lines(missed: Violations) -> list[str]:
    """Return a sentence for each target that was given."""
    lines = []
    if missed.ttft_target_s is not None and missed.late_first_tokens is not None:
        lines.append(
            f"TTFT target {seconds(missed.ttft_target_s)}: missed by {missed.late_first_tokens} of"
            f" {missed.requests} requests ({_share(missed.late_first_tokens, missed.requests)}), failed and"
            " rejected ones included"
        )
    if missed.itl_target_s is not None and missed.long_gaps is not None:
        lines.append(
            f"ITL target {seconds(missed.itl_target_s)}: exceeded by {missed.long_gaps} of {missed.gaps} gaps"
            f" ({_share(missed.long_gaps, missed.gaps)})"
        )
    return lines


def _share(part: int, total: int) -> str:
    return percent(part / total if total else None)
