"""Writes what a sweep found: JSON, a line of JSON per run, pictures and one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import BaseModel

from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.report.findings import require_plots
from penstock.report.html_parts import figure, page, pairs, table, text
from penstock.simulator.observer import Recording
from penstock.simulator.text import (
    COLUMNS,
    PLANNER_COLUMNS,
    TIER_COLUMNS,
    cells,
    goodput_text,
    planner_cells,
    tier_cells,
)

SCHEMA: Final = "penstock-simulate/1"
RESULT_FILE: Final = "simulate.json"
PAGE_FILE: Final = "simulate.html"


def to_json(value: Mapping[str, Any]) -> bytes:
    """Return JSON with keys in the order of the mapping; the same value gives the same bytes."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(value, default=_manifest_keys, option=option)


def _manifest_keys(value: object) -> dict[str, Any]:
    """Return a section of a manifest with all its keys, as it stands in a scenario."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(type(value).__name__)


def open_directory(directory: Path) -> None:
    """Make the folder, before anything is computed.

    Raises:
        ConfigError: it cannot be made, or matplotlib is missing.
    """
    require_plots()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(unwritable(f"--output-dir {directory}", exc)) from exc


def write(result: Mapping[str, Any], recordings: Mapping[str, Recording], directory: Path) -> list[Path]:
    """Write everything and return the files.

    Raises:
        PenstockError: the disk is full or gone.
    """
    from penstock.simulator.charts import CAPTIONS, draw_all  # noqa: PLC0415 - matplotlib is an extra

    try:
        pictures = draw_all(result, recordings, directory)
        (directory / RESULT_FILE).write_bytes(to_json(result))
        document = _page(result, pictures, CAPTIONS)
        (directory / PAGE_FILE).write_text(document, encoding="utf-8")
    except OSError as exc:
        raise PenstockError(unwritable(f"--output-dir {directory}", exc)) from exc
    return [directory / RESULT_FILE, *pictures, directory / PAGE_FILE]


def _page(result: Mapping[str, Any], pictures: list[Path], captions: Mapping[str, str]) -> str:
    rows = sorted(result["summary"], key=lambda row: (row["qps"] or 0.0, -row["capacity"]))
    parts = [
        f"<h1>Penstock simulation: {text(result['workload']['name'])}</h1>",
        *(f'<p class="mark">{text(note)}</p>' for note in result["notes"]),
        "<h2>Scoreboard</h2>",
        table(COLUMNS, [cells(row) for row in rows]),
        *_planners(result, rows),
        *_tiers(rows),
        "<h2>Goodput at 90%</h2>",
        table(("policy", "requests/s"), [(row["policy"], goodput_text(row)) for row in result["goodput"]]),
        *(figure(path, captions) for path in pictures),
        "<h2>Planner</h2>",
        _changes(result),
        "<h2>Settings</h2>",
        "<h3>Workload</h3>",
        pairs(result["workload"].items()),
        "<h3>Simulation</h3>",
        pairs(result["settings"].items()),
    ]
    return page("Penstock simulation", parts)


def _planners(result: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> list[str]:
    if not result["compares_planners"]:
        return []
    return ["<h2>Planners</h2>", table(PLANNER_COLUMNS, [planner_cells(row) for row in rows])]


def _tiers(rows: list[Mapping[str, Any]]) -> list[str]:
    found = [written for row in rows for written in tier_cells(row)]
    return ["<h2>Tiers</h2>", table(TIER_COLUMNS, found)] if found else []


def _changes(result: Mapping[str, Any]) -> str:
    rows = [
        (run["policy"], run["seed"], f"{change['at_s']:.0f} s", change["sentence"])
        for run in result["runs"]
        for change in run["planner"]["changes"]
    ]
    if not rows:
        return "<p>No changes.</p>"
    return table(("policy", "seed", "time", "decision"), rows)
