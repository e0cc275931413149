"""Writes the report as one self-contained HTML page: pictures inline, no script, nothing from a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.report.counterfactual import Counterfactual, sentences
from penstock.report.findings import RunReport, require_plots
from penstock.report.html_parts import figure, page, pairs, table, text
from penstock.report.ledger_view import DecisionMark
from penstock.report.text import (
    COUNTERFACTUAL_COLUMNS,
    LATENCIES,
    RANKS,
    counterfactual_rows,
    facts,
    latency_cells,
    notes,
    percent,
    process_lags,
    rate,
    seconds,
)

PAGE_FILE = "report.html"

_CAPTIONS = {
    "replicas.png": "Replicas of each role, ready and desired, and the GPUs they hold against the budget. A"
    " draining replica still holds its GPUs.",
    "signals.png": "KV usage and prefill queue as the planner pulled them, and its changes at the time that they were made.",
    "demand.png": "What came to the routers, what they rejected, the uncached prompt tokens that came and those that were computed, beside the planner's forecast (at the time that it was made for) and what its workers could compute, and the oldest wait against the TTFT that is aimed for. Means over the time that the legend names; of the wait, the longest.",
    "targets.png": "Mode sla: what was predicted, drawn at the time that it was meant for, against the tokens that came (30 s means); the share of requests within the targets by arrival; how far observation is from the profile; and the replicas that profile and targets need beside those there were.",
    "counterfactual.png": "The same traffic on other fleets: GPU-hours against the share of requests in time. The star was measured, everything else simulated; grey are the other fixed fleets that were tried.",
    "ttft.png": "Time to first token by arrival, with running percentiles, and its distribution.",
    "itl.png": "Gaps between successive tokens over time, and their distribution beside each request's TPOT.",
    "requests.png": "Arrivals as the load has them, and requests in flight.",
}
_SIGNALS_OF_LOAD = (
    " This mode compares means of an interval with thresholds; each change stands at the mean that decided it. The lines"
    " rest while an adjustment is under way (shaded): metrics are not pulled then."
)
_SIGNALS_ELSE = (
    " What this mode decides by is in the decisions' sentences; while replicas start or drain (shaded) it goes on measuring"
    " and deciding."
)


def write_report(report: RunReport, output: Path) -> list[Path]:
    """Write the pictures and the page, and return their paths.

    Raises:
        ConfigError: matplotlib is missing, or the directory cannot be written to.
        PenstockError: the disk is full or gone.
    """
    require_plots()
    from penstock.report.charts import draw_all  # noqa: PLC0415 - matplotlib is an extra

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(unwritable(f"--output {output}", exc)) from exc
    page = output / PAGE_FILE
    try:
        pictures = draw_all(report, output)
        page.write_text(render_page(report, pictures), encoding="utf-8")
    except OSError as exc:
        raise PenstockError(unwritable(f"--output {output}", exc)) from exc
    return [*pictures, page]


def render_page(report: RunReport, pictures: Sequence[Path]) -> str:
    """Return the page; the pictures are read and put into it."""
    summary = report.load.summary
    name = f"{summary['trace']['name']} against {summary['settings']['model']}"
    captions = _CAPTIONS
    if report.planner is not None:
        more = _SIGNALS_OF_LOAD if report.planner.config.mode == Mode.LOAD else _SIGNALS_ELSE
        captions = {**_CAPTIONS, "signals.png": _CAPTIONS["signals.png"] + more}
    parts = [
        f"<h1>Penstock report: {text(name)}</h1>",
        *_marks(report),
        "<h2>Summary</h2>",
        _counts(report),
        _latencies(summary),
        *(figure(path, captions) for path in pictures),
        *_counterfactual(report.counterfactual),
        *_decisions(report),
        "<h2>Lag of each process</h2>",
        _lags(summary["lag"]),
        "<h2>Settings</h2>",
        "<h3>Load</h3>",
        pairs(summary["settings"].items()),
        "<h3>Trace</h3>",
        pairs(summary["trace"].items()),
    ]
    if report.planner is not None:
        parts += ["<h3>Planner</h3>", pairs(_planner_settings(report.planner.config))]
    return page("Penstock report", parts)


def _planner_settings(config: DecideConfig) -> list[tuple[str, object]]:
    """Return the settings by name; of a performance profile only its subject, because its tables are long."""
    shown: dict[str, object] = asdict(replace(config, performance=None))
    profile = config.performance
    if profile is not None:
        prompts, contexts = profile.prefill.prompt_tokens, profile.decode.contexts
        shown["performance"] = (
            f"{profile.model or 'model not named'}: prompts of {prompts[0]:g} to {prompts[-1]:g} tokens, contexts of"
            f" {contexts[0]:g} to {contexts[-1]:g}"
        )
    return list(shown.items())


def _marks(report: RunReport) -> list[str]:
    marks = []
    for note in (*notes(report.load.summary), *report.notes):
        kind = "mark bad" if note.startswith(("DISTORTED", "PARTIAL", "ITL DISTORTED")) else "mark"
        marks.append(f'<p class="{kind}">{text(note)}</p>')
    return marks


def _counts(report: RunReport) -> str:
    summary = report.load.summary
    counts, rates, tokens = summary["requests"], summary["throughput"], summary["tokens"]
    rows: list[tuple[str, object]] = [
        (
            "requests",
            f"{counts['ok']} ok, {counts['failed']} failed, {counts['rejected']} rejected of {counts['planned']}",
        ),
        ("duration", f"{rates['duration_s']:.0f} s simulated, at speed {summary['settings']['speed']:g}"),
        (
            "throughput",
            f"{rate(rates['requests_per_s'])} requests/s, {rate(rates['output_tokens_per_s'])} output tokens/s",
        ),
        ("tokens", f"{tokens['prompt']} prompt, {tokens['output']} output"),
        ("prefix-cache hit rate", percent(tokens["prefix_cache_hit_rate"])),
    ]
    for name, lines in facts(report):
        shown = [line.removeprefix(f"{name}: ") for line in lines]
        rows.append((name, shown))
    return pairs(rows)


def _latencies(summary: Mapping[str, Any]) -> str:
    latency = summary["latency"]
    rows = [(name, *latency_cells(summary, key), latency[key]["count"]) for key, name in LATENCIES]
    return f"{table(('', *RANKS, 'samples'), rows)}<p>Simulated time; percentiles by {text(latency['percentile_method'])}.</p>"


def _counterfactual(found: Counterfactual | None) -> list[str]:
    if found is None:
        return []
    lines = (*sentences(found), *found.notes)
    return [
        "<h2>The same traffic on other fleets</h2>",
        f"<p>In time: TTFT below {found.slo_s:g} s. Lost requests are late.</p>",
        table(COUNTERFACTUAL_COLUMNS, counterfactual_rows(found)),
        f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>",
    ]


def _decisions(report: RunReport) -> list[str]:
    if report.planner is None:
        return []
    marks = report.planner.decisions
    changes = [mark for mark in marks if mark.is_change]
    parts = [
        "<h2>Decisions</h2>",
        f"<p>{len(marks)} decisions, {len(changes)} with a change. Times count from the load run's zero.</p>",
        _decision_table(changes, with_holds=False),
    ]
    if len(marks) > len(changes):
        table = _decision_table(marks, with_holds=True)
        parts.append(f"<details><summary>All decisions, holds included</summary>{table}</details>")
    return parts


def _decision_table(marks: Iterable[DecisionMark], *, with_holds: bool) -> str:
    rows = [
        f'<tr{" class=held" if role.action == "hold" else ""}><td class="n">{mark.at_s:.0f} s</td>'
        f"<td>{text(mark.id)}</td><td>{text(role.role)}</td><td>{text(role.action)}</td>"
        f"<td>{text(role.reason)}</td><td>{text(role.sentence)}</td><td>{text(role.outcome)}</td></tr>"
        for mark in marks
        for role in mark.roles
        if with_holds or role.action != "hold"
    ]
    if not rows:
        return "<p>None.</p>"
    names = ("time", "id", "role", "action", "reason", "decision", "outcome")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _lags(lag: Mapping[str, Any]) -> str:
    cells = "".join(
        f'<tr><th>{text(name)}</th><td class="n">{seconds(value)}</td><td>{_past(name, lag)}</td></tr>'
        for name, value in process_lags(lag).items()
    )
    return (
        f'<table><tr><th>process</th><th class="n">p99 lag</th><th></th></tr>{cells}</table>'
        f"<p>Bound of the whole run: {seconds(lag['bound_s'])}, {text(lag['bound_rule'])}. Bound of single gaps:"
        f" {seconds(lag['itl_bound_s'])}, {text(lag['itl_bound_rule'])}. All simulated time.</p>"
    )


def _past(name: str, lag: Mapping[str, Any]) -> str:
    if name in lag["late"]:
        return "past the bound"
    return "past the bound of single gaps" if name in lag["late_for_itl"] else ""
