"""Writes the report as one self-contained HTML page, with inline charts and without scripts or network access."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.report.counterfactual import sentences
from penstock.report.findings import RunReport, require_plots
from penstock.report.headline import headline, title
from penstock.report.html_parts import figure, page, pairs, table, text
from penstock.report.text import (
    FigureTable,
    counted,
    decisions,
    facts,
    fleets,
    latencies,
    load_lines,
    notes,
    process_lags,
    seconds,
)

PAGE_FILE = "report.html"

_CAPTIONS = {
    "replicas.png": "Replicas of each role, ready and desired, and the GPUs they hold against the budget. A"
    " draining replica still holds its GPUs.",
    "signals.png": "KV usage and prefill queue as the planner pulled them, and its changes when they were made: in mode load at"
    " the mean that was compared with the thresholds. Shaded: replicas start or drain; mode load pulls no metrics then.",
    "demand.png": "What came to the routers, what they rejected, the uncached prompt tokens that came and those that were computed, alongside the planner's forecast (at the time that it was made for) and what its workers could compute, and the oldest wait against the TTFT that is aimed for. Means over the time that the legend names; of the wait, the longest.",
    "targets.png": "Mode sla: what was predicted, drawn at the time that it was meant for, against the tokens that came (30 s means); the share of requests within the targets by arrival; how far observation is from the profile; and the replicas that profile and targets need alongside those there were.",
    "in_time.png": "Share of requests in time by windows of ten minutes: served, and predicted by the planner's model for the same fleet.",
    "counterfactual.png": "The same traffic on other fleets: GPU-hours against the share of requests in time. The star was measured, everything else simulated; grey are the other fixed fleets that were tried.",
    "ttft.png": "Time to first token by arrival, with running percentiles, and its distribution.",
    "itl.png": "Gaps between successive tokens over time, and their distribution alongside each request's TPOT.",
    "requests.png": "Arrivals as the load has them, and requests in flight.",
}


def write_report(report: RunReport, output: Path, *, with_pictures: bool = True) -> list[Path]:
    """Write the charts and the HTML page, and return their paths, the page last.

    Args:
        report: Data of the report.
        output: Folder to write to; created if it does not exist.
        with_pictures: Whether charts are drawn, which requires matplotlib.

    Raises:
        ConfigError: charts are requested and matplotlib is not installed, or the folder cannot be written to.
        PenstockError: a file cannot be written, for example because the disk is full.
    """
    if with_pictures:
        require_plots()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(unwritable(f"--output {output}", exc)) from exc
    file = output / PAGE_FILE
    try:
        pictures = _draw(report, output) if with_pictures else []
        file.write_text(render_page(report, pictures), encoding="utf-8")
    except OSError as exc:
        raise PenstockError(unwritable(f"--output {output}", exc)) from exc
    return [*pictures, file]


def _draw(report: RunReport, output: Path) -> list[Path]:
    from penstock.report.charts import draw_all  # noqa: PLC0415 - matplotlib is an extra

    return draw_all(report, output)


def render_page(report: RunReport, pictures: Sequence[Path]) -> str:
    """Return the HTML page with the chart files in ``pictures`` inline."""
    summary = report.load.summary
    name = title(report)
    said = {name: [line] for name, line in load_lines(summary).items()} | facts(report)
    parts = [
        f"<h1>{text(name)}</h1>",
        f'<p class="result">{text(headline(report))}</p>',
        *(_mark(note) for note in (*notes(summary), *report.notes)),
        "<h2>Summary</h2>",
        pairs((name, [line.removeprefix(f"{name}: ") for line in lines]) for name, lines in said.items()),
        _table(latencies(summary)),
        *(figure(path, _CAPTIONS) for path in pictures),
    ]
    if report.counterfactual is not None:
        lines = "".join(f"<li>{text(line)}</li>" for line in sentences(report.counterfactual))
        parts += [
            "<h2>The same traffic on other fleets</h2>",
            _table(fleets(report.counterfactual)),
            f"<ul>{lines}</ul>",
        ]
    if report.planner is not None:
        marks = report.planner.decisions
        parts += [
            "<h2>Decisions</h2>",
            f"<p>{counted(marks)}. Times count from the load run's zero.</p>",
            _table(decisions(marks)),
            f"<details><summary>All decisions</summary>{_table(decisions(marks, with_holds=True))}</details>",
        ]
    parts += [
        "<h2>Lag of each process</h2>",
        _table(_lags(report)),
        "<h2>Settings</h2>",
        "<h3>Load</h3>",
        pairs(summary["settings"].items()),
        "<h3>Trace</h3>",
        pairs(summary["trace"].items()),
    ]
    if report.planner is not None:
        config = report.planner.config
        shown = asdict(replace(config, performance=None))
        if config.performance is not None:  # its tables are long
            shown["performance"] = f"of {config.performance.model or 'an unnamed model'}"
        parts += ["<h3>Planner</h3>", pairs(shown.items())]
    return page(f"Penstock report: {name}", parts)


def _table(figures: FigureTable) -> str:
    note = "" if figures.note is None else f"<p>{text(figures.note)}</p>"
    return table(figures.heads, figures.rows, texts=figures.texts) + note


def _mark(note: str) -> str:
    is_bad = note.startswith(("DISTORTED", "PARTIAL", "ITL DISTORTED"))
    return f'<p class="mark{" bad" if is_bad else ""}">{text(note)}</p>'


def _lags(report: RunReport) -> FigureTable:
    lag = report.lag
    past = dict.fromkeys(lag["late_for_itl"], "past the bound of single gaps")
    past |= dict.fromkeys(lag["late"], "past the bound")
    rows = [(name, past.get(name, ""), seconds(value)) for name, value in process_lags(lag).items()]
    bounds = (
        f"Bound of the whole run: {seconds(lag['bound_s'])}, {lag['bound_rule']}. Bound of single gaps:"
        f" {seconds(lag['itl_bound_s'])}, {lag['itl_bound_rule']}. All simulated time."
    )
    return FigureTable(("process", "", "p99 lag"), rows, texts=2, note=bounds)
