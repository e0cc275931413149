"""Formats a sweep's results: tables for a terminal, JSON, and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import orjson
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.report.findings import require_plots
from penstock.report.text import percent, seconds
from penstock.simulator.observer import Recording

Row = Mapping[str, Any]


def number(value: float | None, decimals: int = 2) -> str:
    """Return ``value`` as text with ``decimals`` digits after the point, or ``-`` if it is None."""
    return "-" if value is None else f"{value:.{decimals}f}"


def _rate(row: Row) -> str:
    return number(row["qps"] if row["qps"] is not None else row["rate_rps"])


_ROUTERS: Final[Mapping[str, Callable[[Row], str]]] = {
    "policy": lambda row: row["label"],
    "QPS": _rate,
    "in time": lambda row: percent(row["on_time"]),
    "seeds' range": lambda row: f"{percent(row['on_time_min'])} to {percent(row['on_time_max'])}",
    "p50": lambda row: seconds(row["ttft_s"]["p50"]),
    "p90": lambda row: seconds(row["ttft_s"]["p90"]),
    "p99": lambda row: seconds(row["ttft_s"]["p99"]),
    "hits": lambda row: percent(row["hit_rate"]),
    "bound": lambda row: percent(row["hit_share_of_bound"]),
    "CV": lambda row: number(row["imbalance_cv"]),
    "busiest": lambda row: percent(row["busiest_share"]),
    "GPU-h": lambda row: number(row["gpu_hours"], 3),
    "lost": lambda row: str(row["lost"]),
}
COLUMNS: Final = tuple(_ROUTERS)
_TOO_WIDE: Final = frozenset(("seeds' range", "busiest", "GPU-h"))
"""Columns that are left out of the table, so that it fits into a terminal of 80 characters."""

_PLANNERS: Final[Mapping[str, Callable[[Row], str]]] = {
    "planner": lambda row: row["label"],
    "in time": lambda row: percent(row["in_time"]["both"]),
    "p50": lambda row: seconds(row["ttft_s"]["p50"]),
    "p99": lambda row: seconds(row["ttft_s"]["p99"]),
    "GPU-h": lambda row: number(row["gpu_hours"]),
    "violation": lambda row: seconds(row["violation_s"]),
    "changes": lambda row: number(row["changes"], 1),
    "reversals": lambda row: number(row["reversals"], 1),
    "lost": lambda row: str(row["lost"]),
}
_REGRETS: Final = {"oracle": "/ oracle", "oracle-one-step": "/ 1-step"}
"""Columns for GPU-hours as a multiple of an oracle's, by the oracle's mode."""

_TIERS: Final[Mapping[str, Callable[[Row], str]]] = {
    "ok": lambda tier: str(tier["ok"]),
    "rej.": lambda tier: str(tier["rejected"]),
    "p50": lambda tier: seconds(tier["ttft_s"]["p50"]),
    "p99": lambda tier: seconds(tier["ttft_s"]["p99"]),
    "e2e p99": lambda tier: seconds(tier["e2e_s"]["p99"]),
    "compl.": lambda tier: percent(tier["compliance"]),
    "attained": lambda tier: percent(tier["attainment"]),
}


def cells(row: Row) -> tuple[str, ...]:
    """Return the texts of one row of the summary table, one per column (`COLUMNS`). ``row`` is a row that `sweep.summarise` returns."""
    return tuple(read(row) for read in _ROUTERS.values())


def goodput_text(row: dict[str, Any]) -> str:
    """Return a text with a goodput (the largest rate with enough requests on time) and its range over the seeds.

    ``row`` is an entry of `sweep.goodputs`. The text starts with ``>=`` if some seed reached the required fraction at every simulated rate,
    so that its goodput is a lower bound.
    """
    if row["goodput_rps"] is None:
        return "below the lowest rate"
    sign = ">= " if row["is_lower_bound"] else ""
    spread = f"{number(row['min_rps'])} to {number(row['max_rps'])}"
    missing = f", {row['seeds_missing']} seeds below the lowest rate" if row["seeds_missing"] else ""
    return f"{sign}{number(row['goodput_rps'])} ({spread}{missing})"


def scoreboard(result: dict[str, Any]) -> RenderableType:
    """Return the summary of compared runs as tables for a terminal, sorted by rate and by fraction of requests on time.

    If several rates were simulated, a table has the goodput of every policy (the largest rate with enough requests on time). ``result`` is
    the result of `plan.run_plan`.
    """
    if result["compares_planners"]:
        return _planners(result)
    shown = [place for place, name in enumerate(COLUMNS) if name not in _TOO_WIDE]
    table = _table(
        [COLUMNS[place] for place in shown],
        caption=f"in time: TTFT below {result['slo_s']:g} s; bound: hits by the ideal cache's; CV: of pending"
        " tokens over workers; virtual time, means over the seeds",
    )
    for row in sorted(result["summary"], key=lambda row: (row["qps"] or 0.0, -row["on_time"])):
        written = cells(row)
        table.add_row(*(written[place] for place in shown))
    parts: list[RenderableType] = [Text(line) for line in result["notes"]]
    parts += [table, *_continued(result["summary"])]
    if any(row["tiers"] for row in result["summary"]):
        parts.append(_tiers(result["summary"]))
    if result["by_routers"]:
        parts.append(_by_routers(result["by_routers"]))
    if len({row["qps"] for row in result["summary"]}) > 1:
        parts.append(_goodputs(result["goodput"]))
    return Group(*parts)


def _table(names: Sequence[str], *, title: str | None = None, caption: str | None = None) -> Table:
    """Return a table without rows; its first column is left-aligned, and columns of figures are right-aligned."""
    table = Table(title=title, caption=caption, box=None, padding=(0, 1, 0, 0), caption_justify="left")
    for place, name in enumerate(names):
        # On a narrow terminal a policy's name wraps; a figure is never cut.
        table.add_column(
            name,
            justify="left" if place == 0 or name == "tier" else "right",
            no_wrap=place > 0,
            overflow="fold",
        )
    return table


def _tiers(rows: Sequence[Row]) -> Table:
    table = _table(
        ("policy", "QPS", "tier", *_TIERS),
        caption="compliance: of the admitted requests; attained: of all that asked; targets are the tier's own",
    )
    for row in rows:
        for name, tier in row["tiers"].items():
            table.add_row(row["label"], _rate(row), name, *(read(tier) for read in _TIERS.values()))
    return table


def _planners(result: dict[str, Any]) -> RenderableType:
    oracles = [name for name in _REGRETS if any(name in row["regret"] for row in result["summary"])]
    table = _table(
        [*_PLANNERS, *(_REGRETS[name] for name in oracles)],
        caption=f"in time: TTFT below {result['slo_s']:g} s and the gap between tokens in time; violation: seconds in"
        " which fewer than 90% of the arrivals were; virtual time, means over the seeds",
    )
    for row in sorted(result["summary"], key=lambda row: (row["qps"] or 0.0, -row["in_time"]["both"])):
        table.add_row(
            *(read(row) for read in _PLANNERS.values()),
            *(number(row["regret"].get(name)) for name in oracles),
        )
    return Group(*(Text(note) for note in result["notes"]), table, *_continued(result["summary"]))


def _continued(rows: Sequence[Row]) -> list[Text]:
    """Return one line for each row in which streams were continued on another worker."""
    lines = ((row["label"], _rate(row), row["continued"]) for row in rows)
    return [
        Text(f"{policy}, {rate} req/s: {count} streams continued on another worker")
        for policy, rate, count in lines
        if count
    ]


def _by_routers(rows: Sequence[Mapping[str, Any]]) -> Table:
    counts = sorted({count for row in rows for count in row["in_time"]}, key=int)
    table = _table(
        ("policy", "QPS", *counts, "behind best"),
        title="in time, by the number of routers",
        caption="behind best: the largest gap to the best policy of the same rate and number, in points",
    )
    for row in sorted(rows, key=lambda row: (row["qps"] or 0.0, row["behind_best"])):
        shares = (percent(row["in_time"][count]) for count in counts)
        table.add_row(row["label"], number(row["qps"]), *shares, number(100 * row["behind_best"], 1))
    return table


def _goodputs(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        ("policy", "requests/s"),
        title="goodput: requests/s at which 90% are in time (range over the seeds)",
    )
    for row in sorted(rows, key=lambda row: -(row["goodput_rps"] or 0.0)):
        table.add_row(row["label"], goodput_text(row))
    return table


SCHEMA: Final = "penstock-simulate/2"
RESULT_FILE: Final = "simulate.json"


def to_json(value: Mapping[str, Any]) -> bytes:
    """Return indented JSON with keys in the order of the mapping; equal values give equal bytes."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(value, default=_manifest_keys, option=option)


def _manifest_keys(value: object) -> dict[str, Any]:
    """Return a section of a manifest with all its keys, defaults included."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(type(value).__name__)


def open_directory(directory: Path) -> None:
    """Create the output folder, so that a wrong path is reported before the simulation starts.

    Raises:
        ConfigError: the folder cannot be created, or the packages for charts are not installed.
    """
    require_plots()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(unwritable(f"--output-dir {directory}", exc)) from exc


def write(result: Mapping[str, Any], recordings: Mapping[str, Recording], directory: Path) -> list[Path]:
    """Write the JSON result and the charts, and return the paths of the files.

    Args:
        result: Result of `plan.run_plan`.
        recordings: One recorded run of each policy, by the policy's label, for charts.
        directory: Folder to write to.

    Raises:
        PenstockError: a file cannot be written.
    """
    from penstock.simulator.charts import draw_all  # noqa: PLC0415 - matplotlib is an extra

    try:
        pictures = draw_all(result, recordings, directory)
    except OSError as exc:
        raise PenstockError(unwritable(f"--output-dir {directory}", exc)) from exc
    return [write_result(result, directory), *pictures]


def write_result(result: Mapping[str, Any], directory: Path) -> Path:
    """Write ``result`` as ``simulate.json`` into the folder ``directory``, and return the path of the file.

    The file is replaced atomically, so no reader sees a partial file.

    Raises:
        PenstockError: the file cannot be written.
    """
    path = directory / RESULT_FILE
    try:
        with NamedTemporaryFile(dir=directory, prefix=f".{RESULT_FILE}-", delete=False) as stream:
            stream.write(to_json(result))
        Path(stream.name).chmod(0o644)
        Path(stream.name).replace(path)
    except OSError as exc:
        raise PenstockError(unwritable(f"--output-dir {directory}", exc)) from exc
    return path
