"""Shows the bench's result: tables on the terminal and a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import digest
from paper import KEY_DEPTHS
from rich.console import Console
from rich.table import Table

from penstock.report.text import percent, seconds
from penstock.simulator.output import COLUMNS, cells, goodput_text

Rows = list[tuple[str, ...]]
Block = tuple[tuple[str, ...], Rows]
"""A table: its heads and its rows."""

CLAIM_HEADS = ("paper's claim", "paper", "prefill-only server", "engines")
_LEFT_OUT = frozenset({"GPU-h", "lost"})
_SHOWN = [place for place, head in enumerate(COLUMNS) if head not in _LEFT_OUT]
_RATES_AT_ONCE = 8


def blocks(name: str, part: Mapping[str, Any]) -> list[Block]:
    """Return a part's tables."""
    if name == "depths":
        return [_depths(part)]
    if name.startswith("routers."):
        return [_by_routers(part)]
    rows = _rows(part, with_e2e=name.startswith("engines."))
    if name == "elasticity":
        return [rows]
    return [_goodputs(part), rows]


def claims(result: Mapping[str, Any]) -> Block:
    """Return the table of the paper's claims alongside our figures."""
    return CLAIM_HEADS, [
        (each["claim"], each["paper"], each["server"], each["engines"]) for each in result["claims"]
    ]


def heading(part: Mapping[str, Any]) -> str:
    """Return what a part ran: its title, and how much of it."""
    if "runs" not in part:
        return str(part["title"])
    return f"{part['title']}; {part['seeds']} seed(s), {len(part['runs'])} runs"


def show(result: Mapping[str, Any]) -> None:
    """Print goodputs, comparisons and the table alongside the paper's numbers."""
    console = Console(width=150)
    for name, part in result["parts"].items():
        heads, rows = blocks(name, part)[0]
        _print(console, heading(part), heads, rows)
    _print(console, "alongside the paper's numbers", *claims(result))


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result as a document: the claims, then each part's tables."""
    lines = _markdown_table(*claims(result))
    for name, part in result["parts"].items():
        lines += ["", f"## {name}", f"{heading(part)}."]
        for block in blocks(name, part):
            lines += ["", *_markdown_table(*block)]
    return "\n".join(lines) + "\n"


def _markdown_table(heads: Sequence[str], rows: Rows) -> list[str]:
    # A label may hold the separator of columns.
    written = ["| " + " | ".join(cell.replace("|", ", ") for cell in row) + " |" for row in (heads, *rows)]
    return [written[0], "|---" * len(heads) + "|", *written[1:]]


def _print(console: Console, title: str, heads: Sequence[str], rows: Rows) -> None:
    printed = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for place, head in enumerate(heads):
        printed.add_column(head, no_wrap=place > 0)
    for row in rows:
        printed.add_row(*row)
    console.print(printed)


def _rows(part: Mapping[str, Any], *, with_e2e: bool) -> Block:
    heads = [COLUMNS[place] for place in _SHOWN] + (["e2e p50", "e2e p90"] if with_e2e else [])
    rows = []
    for row in sorted(part["summary"], key=lambda row: (row["qps"] or 0.0, -row["on_time"])):
        written = cells(dict(row))
        e2e = [seconds(row["e2e_s"][rank]) for rank in ("p50", "p90")] if with_e2e else []
        rows.append((*(written[place] for place in _SHOWN), *e2e))
    return tuple(heads), rows


def _goodputs(part: Mapping[str, Any]) -> Block:
    rates = digest.rates_of(part["summary"])
    shown = rates if len(rates) <= _RATES_AT_ONCE else []
    heads = ("policy", "goodput at 90%, requests/s (range)", *(f"in time at {qps:g}" for qps in shown))
    shares = {(row["label"], row["qps"]): percent(row["on_time"]) for row in part["summary"]}
    ranked = sorted(
        part["goodput"],
        key=lambda row: (
            -(row["goodput_rps"] or 0.0),
            -sum(each["on_time"] for each in part["summary"] if each["label"] == row["label"]),
        ),
    )
    return heads, [
        (row["label"], goodput_text(row), *(shares.get((row["label"], qps), "") for qps in shown))
        for row in ranked
    ]


def _by_routers(part: Mapping[str, Any]) -> Block:
    found = digest.by_routers(part["summary"])
    counts = sorted({count for _, _, rows in found for count in rows})
    best = {count: max(rows[count]["on_time"] for _, _, rows in found) for count in counts}
    heads = ("policy", "routers", *map(str, counts), "behind the best, points")
    written = []
    for policy, way, rows in found:
        behind = max(best[count] - rows[count]["on_time"] for count in counts)
        shares = (percent(rows[count]["on_time"]) for count in counts)
        written.append((behind, (policy, way, *shares, f"{100 * behind:.1f}")))
    return heads, [row for _, row in sorted(written)]


def _depths(part: Mapping[str, Any]) -> Block:
    heads = ("workload", "thresholds", "blocks: share of requests")
    paper = [(workload, "the paper's figure 6", depths) for workload, depths in KEY_DEPTHS.items()]
    return heads, paper + [(row["workload"], row["thresholds"], row["depths"]) for row in part["rows"]]
