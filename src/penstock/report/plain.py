"""The report as plain data, for ``--json``. Pure."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.report.findings import RunReport
from penstock.report.headline import headline, title


def as_json(report: RunReport, files: list[Path]) -> dict[str, Any]:
    """Return the report as plain data; ``files`` are the paths of the written files."""
    parts = {
        "gpu_use": report.use,
        "demand": report.demand,
        "targets": report.targets,
        "prediction": report.prediction,
        "violations": report.violations,
        "counterfactual": report.counterfactual,
    }
    found = {name: None if part is None else asdict(part) for name, part in parts.items()}
    if report.use is not None:
        found["gpu_use"] = {**asdict(report.use), "saved_fraction": report.use.saved_fraction}
    decisions = [] if report.planner is None else [asdict(mark) for mark in report.planner.decisions]
    more = {"decisions": decisions, "notes": list(report.notes), "files": [str(path) for path in files]}
    result = {"headline": headline(report), "title": title(report)}
    return {**result, "load": report.load.summary, **found, **more}
