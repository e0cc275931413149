"""The scoreboard as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.report.text import percent, seconds

COLUMNS = (
    "policy",
    "QPS",
    "in time",
    "seeds' range",
    "p50",
    "p90",
    "p99",
    "hits",
    "bound",
    "CV",
    "busiest",
    "GPU-h",
    "lost",
)

_PAGE_ONLY = frozenset(("seeds' range", "busiest", "GPU-h"))
"""Columns that a terminal of 80 letters has no room for."""


_REGRETS = {"oracle": "/ oracle", "oracle-one-step": "/ 1-step"}
"""Columns of GPU-hours as a multiple of an oracle's, by its name."""
PLANNER_COLUMNS = ("planner", "in time", "p50", "p99", "GPU-h", "violation", "changes", "reversals", "lost")


TIER_COLUMNS = ("policy", "QPS", "tier", "ok", "rej.", "p50", "p99", "e2e p99", "compl.", "attained")


def number(value: float | None, decimals: int = 2) -> str:
    """Return a plain number, ``-`` when unknown."""
    return "-" if value is None else f"{value:.{decimals}f}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return one summary row as `COLUMNS`."""
    ttft = row["ttft_s"]
    return (
        row["policy"],
        number(row["qps"] if row["qps"] is not None else row["rate_rps"]),
        percent(row["capacity"]),
        f"{percent(row['capacity_min'])} to {percent(row['capacity_max'])}",
        seconds(ttft["p50"]),
        seconds(ttft["p90"]),
        seconds(ttft["p99"]),
        percent(row["hit_rate"]),
        percent(row["hit_share_of_bound"]),
        number(row["imbalance_cv"]),
        percent(row["busiest_share"]),
        number(row["gpu_hours"], 3),
        str(row["lost"]),
    )


def planner_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one summary row as `PLANNER_COLUMNS`."""
    ttft = row["ttft_s"]
    return (
        row["policy"],
        percent(row["in_time"]["both"]),
        seconds(ttft["p50"]),
        seconds(ttft["p99"]),
        number(row["gpu_hours"]),
        seconds(row["violation_s"]),
        number(row["changes"], 1),
        number(row["reversals"], 1),
        str(row["lost"]),
    )


def goodput_text(row: dict[str, Any]) -> str:
    """Return a goodput with its range over the seeds; ``>=`` where no rate missed the share."""
    if row["goodput_rps"] is None:
        return "below the lowest rate"
    sign = ">= " if row["is_lower_bound"] else ""
    spread = f"{number(row['min_rps'])} to {number(row['max_rps'])}"
    missing = f", {row['seeds_missing']} seeds below the lowest rate" if row["seeds_missing"] else ""
    return f"{sign}{number(row['goodput_rps'])} ({spread}{missing})"


def scoreboard(result: dict[str, Any]) -> RenderableType:
    """Return the summary, sorted by rate and capacity, and every policy's goodput where rates were swept."""
    if result["compares_planners"]:
        return _planners(result)
    shown = [place for place, name in enumerate(COLUMNS) if name not in _PAGE_ONLY]
    table = _table(
        [COLUMNS[place] for place in shown],
        caption=f"in time: TTFT below {result['slo_s']:g} s; bound: hits by the ideal cache's; CV: of pending"
        " tokens over workers; virtual time, means over the seeds",
    )
    for row in sorted(result["summary"], key=lambda row: (row["qps"] or 0.0, -row["capacity"])):
        written = cells(row)
        table.add_row(*(written[place] for place in shown))
    parts: list[RenderableType] = [Text(line) for line in result["notes"]]
    parts.append(table)
    if any(row["tiers"] for row in result["summary"]):
        parts.append(_tiers(result["summary"]))
    if result["by_routers"]:
        parts.append(_by_routers(result["by_routers"]))
    if len({row["qps"] for row in result["summary"]}) > 1:
        parts.append(_goodputs(result["goodput"]))
    return Group(*parts)


def _table(names: Sequence[str], *, title: str | None = None, caption: str | None = None) -> Table:
    """Return a table without rows; its texts are on the left, its figures on the right."""
    table = Table(title=title, caption=caption, box=None, padding=(0, 1, 0, 0), caption_justify="left")
    for place, name in enumerate(names):
        # On a narrow terminal a policy's name is folded; a figure is never cut.
        table.add_column(
            name,
            justify="left" if place == 0 or name == "tier" else "right",
            no_wrap=place > 0,
            overflow="fold",
        )
    return table


def tier_cells(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a summary row's tiers as `TIER_COLUMNS`."""
    return [
        (
            row["policy"],
            number(row["qps"] if row["qps"] is not None else row["rate_rps"]),
            name,
            str(tier["ok"]),
            str(tier["rejected"]),
            seconds(tier["ttft_s"]["p50"]),
            seconds(tier["ttft_s"]["p99"]),
            seconds(tier["e2e_s"]["p99"]),
            percent(tier["compliance"]),
            percent(tier["attainment"]),
        )
        for name, tier in row["tiers"].items()
    ]


def _tiers(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        TIER_COLUMNS,
        caption="compliance: of the admitted requests; attained: of all that asked; targets are the tier's own",
    )
    for row in rows:
        for written in tier_cells(row):
            table.add_row(*written)
    return table


def _planners(result: dict[str, Any]) -> RenderableType:
    oracles = [name for name in _REGRETS if any(name in row["regret"] for row in result["summary"])]
    table = _table(
        [*PLANNER_COLUMNS, *(_REGRETS[name] for name in oracles)],
        caption=f"in time: TTFT below {result['slo_s']:g} s and the gap between tokens in time; violation: seconds in"
        " which fewer than 90% of the arrivals were; virtual time, means over the seeds",
    )
    for row in sorted(result["summary"], key=lambda row: (row["qps"] or 0.0, -row["in_time"]["both"])):
        table.add_row(*planner_cells(row), *(number(row["regret"].get(name)) for name in oracles))
    return Group(*(Text(note) for note in result["notes"]), table)


def _by_routers(rows: Sequence[Mapping[str, Any]]) -> Table:
    counts = sorted({count for row in rows for count in row["in_time"]}, key=int)
    table = _table(
        ("policy", "QPS", *counts, "behind best"),
        title="in time, by the number of routers",
        caption="behind best: the largest gap to the best policy of the same rate and number, in points",
    )
    for row in sorted(rows, key=lambda row: (row["qps"] or 0.0, row["behind_best"])):
        shares = (percent(row["in_time"][count]) for count in counts)
        table.add_row(row["policy"], number(row["qps"]), *shares, number(100 * row["behind_best"], 1))
    return table


def _goodputs(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        ("policy", "requests/s"),
        title="goodput: requests/s at which 90% are in time (range over the seeds)",
    )
    for row in sorted(rows, key=lambda row: -(row["goodput_rps"] or 0.0)):
        table.add_row(row["policy"], goodput_text(row))
    return table
