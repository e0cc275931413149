"""Writes the report's pictures and page from what was found in a run: the body of `penstock report`."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.report.findings import RunReport

PAGE_FILE = "report.html"


def write_report(report: RunReport, output: Path) -> list[Path]:
    """Write the pictures and the page, and return their paths.

    Raises:
        ConfigError: matplotlib is missing, or the directory cannot be written to.
        PenstockError: the disk is full or gone.
    """
    require_plots()
    from penstock.report.charts import Scene, draw_all  # noqa: PLC0415 - matplotlib is an extra
    from penstock.report.page import render_page  # noqa: PLC0415 - not needed where nothing is drawn

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(unwritable(f"--output {output}", exc)) from exc
    summary = report.load.summary
    lag = summary["lag"]
    scene = Scene(
        results=report.load.results,
        planner=report.planner,
        duration_s=summary["throughput"]["duration_s"],
        ttft_target_s=report.violations.ttft_target_s,
        itl_target_s=report.violations.itl_target_s,
        is_distorted=lag["is_distorted"],
        is_itl_distorted=lag["is_itl_distorted"],
        shortest_gap_s=lag["resolution_s"] if lag["is_itl_unresolved"] else 0.0,
        counterfactual=report.counterfactual,
    )
    page = output / PAGE_FILE
    try:
        pictures = draw_all(scene, output)
        page.write_text(render_page(report, pictures), encoding="utf-8")
    except OSError as exc:
        raise PenstockError(unwritable(f"--output {output}", exc)) from exc
    return [*pictures, page]


def require_plots() -> None:
    """Say early what a report needs.

    Raises:
        ConfigError: matplotlib is not installed; the message names the extra.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install 'penstock[plots]'")


def as_json(report: RunReport, files: list[Path]) -> dict[str, Any]:
    """Return the analysis as plain data."""
    planner = report.planner
    return {
        "load": report.load.summary,
        "gpu_use": None
        if report.use is None
        else {**asdict(report.use), "saved_fraction": report.use.saved_fraction},
        "demand": None if report.demand is None else asdict(report.demand),
        "targets": None if report.targets is None else asdict(report.targets),
        "violations": asdict(report.violations),
        "counterfactual": None if report.counterfactual is None else asdict(report.counterfactual),
        "decisions": [] if planner is None else [asdict(mark) for mark in planner.decisions],
        "notes": list(report.notes),
        "files": [str(path) for path in files],
    }
