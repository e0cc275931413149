"""Sentences, tables and notes about a run, for terminal and page; used by `penstock load`, `penstock report` and the demo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.report.counterfactual import Counterfactual, sentences
from penstock.report.findings import RunReport
from penstock.report.headline import headline
from penstock.report.ledger_view import DecisionMark

_LATENCIES: Final = {"ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT", "e2e_s": "E2E"}
_RANKS: Final = ("p50", "p90", "p99", "mean", "max")


def seconds(value: float | None) -> str:
    """Return a duration in seconds as text, in milliseconds below one second; ``-`` if ``value`` is None."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def percent(value: float | None) -> str:
    """Return a fraction as text, in percent; ``-`` if ``value`` is None."""
    return "-" if value is None else f"{value:.1%}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class FigureTable:
    """A table for the terminal and the HTML page.

    Attributes:
        heads: Column headings.
        rows: Rows of cells.
        texts: Number of text columns, from the left; the others are numbers.
        note: Note below the table; None if the table has no note.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    note: str | None = None

    def for_terminal(self, title: str | None = None) -> Table:
        """Return the table for a terminal; its texts are not interpreted as markup."""
        table = Table(title=title, caption=self.note)
        for place, head in enumerate(self.heads):
            is_short = place == 0 or place < self.texts - 2  # the last texts are sentences, which may wrap
            table.add_column(head, justify="left" if place < self.texts else "right", no_wrap=is_short)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def latencies(summary: Mapping[str, Any]) -> FigureTable:
    """Return a table of the latency percentiles in a load run's summary.

    A gap between tokens that is shorter than the resolution of the client's timer is shown as less than that resolution.
    """
    latency, lag = summary["latency"], summary["lag"]

    def cell(key: str, rank: str) -> str:
        value = latency[key][rank]
        min_s = lag["resolution_s"] if key == "itl_s" and lag["is_itl_unresolved"] else 0.0
        is_below_resolution = value is not None and rank != "mean" and value < min_s
        return f"< {seconds(min_s)}" if is_below_resolution else seconds(value)

    rows = [
        (name, *(cell(key, rank) for rank in _RANKS), str(latency[key]["count"]))
        for key, name in _LATENCIES.items()
    ]
    note = f"simulated time; {latency['percentile_method']}{_why_gaps_differ(latency)}"
    return FigureTable(("", *_RANKS, "samples"), rows, note=note)


GAPS_DIFFER: Final = 1.5
"""Chosen: ratio of the medians of ITL and TPOT from which on a note explains why the two differ."""


def _why_gaps_differ(latency: Mapping[str, Any]) -> str:
    """Return what makes the medians of ITL and TPOT differ; empty if they are close."""
    itl_s, tpot_s = (latency[key].get("p50") for key in ("itl_s", "tpot_s"))
    if not itl_s or not tpot_s or max(itl_s, tpot_s) < GAPS_DIFFER * min(itl_s, tpot_s):
        return ""
    return (
        f"; ITL counts each gap between tokens, TPOT each request's mean gap, so that p50 differs ({seconds(itl_s)} and"
        f" {seconds(tpot_s)}): long answers have more gaps, and several tokens in one event are one arrival"
    )


def _tiers(tiers: Mapping[str, Mapping[str, Any]]) -> FigureTable:
    rows = [
        (
            name,
            *(str(row["requests"][status]) for status in ("ok", "rejected", "failed")),
            *(seconds(row["ttft_s"][rank]) for rank in ("p50", "p99")),
            *(seconds(row[key]["p99"]) for key in ("tpot_s", "e2e_s")),
        )
        for name, row in tiers.items()
    ]
    heads = ("tier", "ok", "rej.", "failed", "TTFT p50", "p99", "TPOT p99", "E2E p99")
    return FigureTable(heads, rows, note="requests by requested tier")


def fleets(found: Counterfactual) -> FigureTable:
    """Return a table with one row per fleet on the same traffic, the actual run first.

    ``found`` is the comparison of the actual run with other fleets.
    """
    rows = [
        (
            each.name,
            each.source,
            percent(each.in_time),
            *(
                "-" if value is None else f"{value:.1f} s"
                for value in (each.ttft_p50_s, each.ttft_p90_s, each.ttft_p99_s)
            ),
            str(each.lost),
            "-" if each.gpu_hours is None else f"{each.gpu_hours:.3f}",
        )
        for each in found.outcomes
    ]
    heads = ("fleet", "", "in time", "TTFT p50", "p90", "p99", "lost", "GPU-h")
    return FigureTable(
        heads, rows, texts=2, note=f"in time: TTFT below {found.slo_s:g} s; lost requests are late"
    )


def decisions(marks: Iterable[DecisionMark], *, with_holds: bool = False) -> FigureTable:
    """Return a table with one row for each role that a decision changed: time, decision id, sentence and outcome.

    Args:
        marks: Decisions in order of time.
        with_holds: Whether roles that a decision did not change are included.
    """
    rows = [
        (f"{mark.at_s:.0f} s", mark.id, role.sentence, role.outcome)
        for mark in marks
        for role in mark.roles
        if with_holds or role.action != "hold"
    ]
    return FigureTable(("time", "id", "decision", "outcome"), rows, texts=4)


def process_lags(lag: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the 99th percentile of each process's lag in simulated seconds, by the names of the processes in the summary's notes.

    The value is None for a process whose lag is unknown. ``lag`` is the entry of this name in the load run's summary.
    """
    return {
        "client sending": lag["send_p99_s"],
        "client event loop": lag["loop_p99_s"],
        **{server["name"]: server["p99_s"] for server in lag["servers"]},
    }


def load_summary(summary: dict[str, Any]) -> RenderableType:
    """Return a load run's summary for a terminal: requests, latencies, tokens and notes."""
    requests, tokens = load_lines(summary).values()
    parts: list[RenderableType] = [Text(requests), latencies(summary).for_terminal()]
    if summary.get("tiers"):
        parts.append(_tiers(summary["tiers"]).for_terminal())
    parts.append(Text(tokens))
    parts.extend(Text(note, style="bold yellow") for note in notes(summary))
    return Group(*parts)


def load_lines(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return two sentences, ``requests`` and ``tokens``, about the requests sent and their results."""
    counts, rates, tokens = summary["requests"], summary["throughput"], summary["tokens"]
    return {
        "requests": f"{counts['ok']} ok, {counts['failed']} failed, {counts['rejected']} rejected of {counts['planned']}"
        f" requests in {rates['duration_s']:.0f} s (simulated, speed {summary['settings']['speed']:g})",
        "tokens": f"tokens: {tokens['prompt']} prompt, {tokens['output']} output; {_rate(rates['requests_per_s'])} req/s,"
        f" {_rate(rates['output_tokens_per_s'])} output tokens/s; prefix-cache hit rate"
        f" {percent(tokens['prefix_cache_hit_rate'])}",
    }


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Return sentences that qualify a load run's figures, such as that it was partial, limited in concurrency, or distorted by lag."""
    requests, trace, settings = summary["requests"], summary["trace"], summary["settings"]
    overload, mismatches = summary.get("overload"), summary["usage_mismatches"]
    found: list[str] = []
    if overload is not None:
        found.append(
            f"OVERLOAD: {overload['factor']:g} times a capacity of {_rate(overload['capacity']['rps'])} req/s, measured with"
            f" {overload['capacity']['concurrency']} requests in flight"
        )
    broken = summary.get("broken_streams")
    if broken is not None and (broken["continued"] or broken["lost"]):
        found.append(
            f"BROKEN STREAMS: {broken['continued']} continued on another worker, {broken['lost']} ended in an error, as the router"
            " counts them for all its clients"
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
    if mismatches["prompt_tokens"] or mismatches["output_tokens"]:
        found.append(
            f"usage differs from the trace: prompt in {mismatches['prompt_tokens']} of"
            f" {mismatches['checked_prompt']}, output in {mismatches['output_tokens']} of"
            f" {mismatches['checked_output']}; {'; '.join(mismatches['examples'])}"
        )
    if mismatches["without_usage"]:
        found.append(f"{mismatches['without_usage']} answers reported no usage")
    if summary["errors"]:
        found.append("errors: " + ", ".join(f"{name} {count}" for name, count in summary["errors"].items()))
    return [*found, *_lag_notes(summary["lag"])]


def _lag_notes(lag: Mapping[str, Any]) -> list[str]:
    lags = process_lags(lag)

    def listed(names: Sequence[str]) -> str:
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


def facts(report: RunReport) -> dict[str, list[str]]:
    """Return sentences about latency targets, demand, planning and GPU-hours, by topic name; topics without data are left out."""
    parts = {
        "target": report.violations,
        "demand": report.demand,
        "mode sla": report.targets,
        "requests in time": report.prediction,
        "GPU-hours": report.use,
    }
    found = {name: part.lines() for name, part in parts.items() if part is not None}
    return {name: lines for name, lines in found.items() if lines}


def counted(marks: Sequence[DecisionMark]) -> str:
    """Return a sentence with the number of decisions, and the number of decisions that changed replicas."""
    changes = sum(mark.is_change for mark in marks)
    return f"{len(marks)} decisions, {changes} with a change, {len(marks) - changes} held"


def report_text(report: RunReport) -> RenderableType:
    """Return the complete report for a terminal: headline, load, targets, GPU-hours, and each change with its reason."""
    parts = [Text(headline(report), style="bold"), load_summary(report.load.summary)]
    parts += [Text(line) for lines in facts(report).values() for line in lines]
    if report.planner is not None:
        parts.append(Text(counted(report.planner.decisions)))
        if (changes := decisions(report.planner.decisions)).rows:
            parts.append(changes.for_terminal())
    if report.counterfactual is not None:
        parts.append(fleets(report.counterfactual).for_terminal(title="The same traffic on other fleets"))
        parts += [Text(line) for line in sentences(report.counterfactual)]
    parts += [Text(note, style="bold yellow") for note in report.notes]
    return Group(*parts)
