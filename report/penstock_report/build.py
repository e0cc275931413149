"""Reads a run and a ledger, analyses them, and writes the report: the body of `penstock report`."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock_core.errors import ConfigError, PenstockError
from penstock_report.analysis import GpuUse, Violations, gpu_use, violations
from penstock_report.ledger_view import LoadOrigin, PlannerRun, load_planner_run
from penstock_workload.results import LoadRun, read_run

PAGE_FILE = "report.html"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the page, the pictures and the text are made from.

    Attributes:
        load: The load run.
        planner: None without a ledger.
        use: None without a ledger, or where it saw nothing of the load run.
        violations: Against the targets given.
    """

    load: LoadRun
    planner: PlannerRun | None
    use: GpuUse | None
    violations: Violations

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of the planner's part; the load's notes are in its summary."""
        if self.planner is None:
            return ()
        if self.use is None:
            return (*self.planner.notes, "the ledger holds nothing from the time of the load run")
        duration_s = self.load.summary["throughput"]["duration_s"]
        covered_s = self.use.end_s - self.use.start_s
        if covered_s < 0.99 * duration_s:
            note = f"the ledger covers {covered_s:.0f} s of the load run's {duration_s:.0f} s"
            return (*self.planner.notes, note)
        return self.planner.notes


def analyse(
    run: Path,
    *,
    ledger: Path | None = None,
    ttft_target_s: float | None = None,
    itl_target_s: float | None = None,
) -> Report:
    """Read a load run and, if given, the planner's ledger.

    Args:
        run: Output directory of `penstock load`.
        ledger: A ledger file or the planner's log directory.
        ttft_target_s: Modelled seconds, > 0; None counts no violations.
        itl_target_s: Modelled seconds, > 0; None counts no violations.

    Raises:
        ConfigError: the run's files cannot be read, or a target is not above 0.
        LedgerError: the ledger cannot be read.
    """
    for flag, target in (("--ttft-target-s", ttft_target_s), ("--itl-target-s", itl_target_s)):
        if target is not None and not target > 0:
            raise ConfigError(f"{flag}: {target!r} must be above 0 modelled seconds")
    load = read_run(run)
    summary = load.summary
    duration_s = summary["throughput"]["duration_s"]
    planner = use = None
    if ledger is not None:
        started = summary["started"]
        origin = LoadOrigin(
            started["model_s"], started["unix_s"], speed=summary["settings"]["speed"], duration_s=duration_s
        )
        planner = load_planner_run(ledger, origin=origin)
        use = gpu_use(planner, start_s=0.0, end_s=duration_s)
    missed = violations(load.results, ttft_target_s=ttft_target_s, itl_target_s=itl_target_s)
    return Report(load, planner, use, missed)


def write_report(report: Report, output: Path) -> list[Path]:
    """Write the pictures and the page, and return their paths.

    Raises:
        ConfigError: matplotlib is missing, or the directory cannot be written to.
        PenstockError: the disk is full or gone.
    """
    require_plots()
    from penstock_report.charts import Scene, draw_all  # noqa: PLC0415 - matplotlib is an extra
    from penstock_report.page import render_page  # noqa: PLC0415 - not needed where nothing is drawn

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--output {output}: cannot be created: {exc.strerror}") from exc
    summary = report.load.summary
    lag = summary["lag"]
    scene = Scene(
        results=report.load.results,
        planner=report.planner,
        duration_s=summary["throughput"]["duration_s"],
        ttft_target_s=report.violations.ttft_target_s,
        itl_target_s=report.violations.itl_target_s,
        is_distorted=lag["is_distorted"],
        is_itl_distorted=lag["is_itl_distorted"] or lag["is_itl_unresolved"],
    )
    page = output / PAGE_FILE
    try:
        pictures = draw_all(scene, output)
        page.write_text(render_page(report, pictures), encoding="utf-8")
    except OSError as exc:
        raise PenstockError(
            f"--output {output}: cannot be written to: {exc.strerror}; free some space"
        ) from exc
    return [*pictures, page]


def require_plots() -> None:
    """Say early what a report needs.

    Raises:
        ConfigError: matplotlib is not installed; the message names the extra.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install 'penstock[plots]'")


def as_json(report: Report, files: list[Path]) -> dict[str, Any]:
    """Return the analysis as plain data."""
    planner = report.planner
    return {
        "load": report.load.summary,
        "gpu_use": None
        if report.use is None
        else {**asdict(report.use), "saved_fraction": report.use.saved_fraction},
        "violations": asdict(report.violations),
        "decisions": [] if planner is None else [asdict(mark) for mark in planner.decisions],
        "notes": list(report.notes),
        "files": [str(path) for path in files],
    }
